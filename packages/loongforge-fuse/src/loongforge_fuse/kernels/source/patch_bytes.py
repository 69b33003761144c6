# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Patches of interleaved uint8 images to normalised matrix rows, three forms for rows of (y, x, channel).

A byte is read once and two (or four) are written, so the work is arithmetic as much as memory: at full speed
a multiprocessor has about 13 instructions for an element. The channel of an element depends on its place
modulo 3, and 32 lanes of 8 elements advance it by exactly one, so each lane rotates three factors once and
for all.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32, uint64

from loongforge_fuse.kernels.source.intrinsics import (
    EXPAND,
    LOAD_AT,
    SHARED_LOAD,
    STORE,
    load_i64,
    load_pair,
    load_u8,
    load_word,
    misalignment,
    shared_store_u16,
)
from loongforge_fuse.kernels.source.patches import patch_origin
from loongforge_fuse.kernels.source.reading import load_word_of_run

Kernel = Callable[..., None]
CHANNELS = 3


@cuda.jit(device=True, inline="always")
def rotate(values, first, v0, v1, v2):
    """Set values[0:3] to the three factors, beginning with factor `first`."""
    values[0] = v0 if first == 0 else (v1 if first == 1 else v2)
    values[1] = v1 if first == 0 else (v2 if first == 1 else v0)
    values[2] = v2 if first == 0 else (v0 if first == 1 else v1)


@cuda.jit(device=True, inline="always")
def byte_window(pin, offset, wanted):
    """Return `wanted` (up to 8) bytes from any byte offset as one 64-bit word, the first byte lowest.

    Reads whole aligned words, so up to 3 bytes beside the window are read too; they lie in words that the
    window touches, hence in the same allocation.
    """
    above = misalignment(pin, offset) & 3
    base = offset - above
    need = above + wanted
    low = uint64(load_word(pin, base))
    middle = uint64(0)
    high = uint64(0)
    if need > 4:
        middle = uint64(load_word(pin, base + 4))
    if need > 8:
        high = uint64(load_word(pin, base + 8))
    shift = uint64(8 * above)
    # Two shifts, because a shift by 64 is not defined.
    return ((low | (middle << uint64(32))) >> shift) | ((high << (uint64(32) - shift)) << uint64(32))


def patch_runs(*, y: str, patch: int, masked: bool) -> Kernel:
    """Kernel (pixels, table, mask, out, patches, a0, a1, a2, b0, b1, b2): one thread makes one vector.

    The 8 elements of a vector are 8 neighbouring bytes of one image row, or the end of one and the start
    of the next.
    """
    store, expand = STORE[y, 8], EXPAND["u8", 8]
    run = patch * CHANNELS
    length = patch * run
    per_row = -(-length // 8)
    crossing = run % 8 != 0

    def kernel(pin, table, mask, pout, patches, a0, a1, a2, b0, b1, b2):
        i = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        row = int64(uint32(i) // uint32(per_row))
        v = cuda.local.array(8, float32)
        a = cuda.local.array(3, float32)
        b = cuda.local.array(3, float32)
        words = cuda.local.array(2, uint32)
        if row < patches:
            k0 = uint32(uint32(i) - uint32(uint32(row) * uint32(per_row))) * uint32(8)
            origin = patch_origin(table, mask, row, masked)
            for e in range(8):
                v[e] = float32(0.0)
            if origin >= 0:
                line = uint32(uint32(k0) // uint32(run))
                at = uint32(uint32(k0) - uint32(line * uint32(run)))
                row_step = load_i64(table, 4 * row + 1)
                start = origin + int64(line) * row_step + int64(at)
                count = int32(8)
                if crossing:
                    left = int32(run) - int32(at)
                    count = int32(min(int32(length) - int32(k0), int32(8)))
                    here = int32(min(left, count))
                    bits = byte_window(pin, start, int64(here))
                    if here < count:
                        # The first bytes of the next image row, moved up behind what is left of this one.
                        more = byte_window(pin, start + int64(left) + row_step - run, int64(count - here))
                        keep = (uint64(1) << uint64(8 * here)) - uint64(1)
                        bits = (bits & keep) | (more << uint64(8 * here))
                else:
                    bits = byte_window(pin, start, int64(8))
                phase = uint32(uint32(at) % uint32(CHANNELS))
                rotate(a, phase, a0, a1, a2)
                rotate(b, phase, b0, b1, b2)
                words[0] = uint32(bits)
                words[1] = uint32(bits >> uint64(32))
                expand(words, 0, v, 0)
                for e in range(8):
                    v[e] = v[e] * a[e % CHANNELS] + b[e % CHANNELS]
                    if crossing:
                        v[e] = v[e] if int32(e) < count else float32(0.0)
            store(pout, int64(i), v, 0)

    return kernel


def patch_vectors(*, y: str, patch: int, masked: bool) -> Kernel:
    """Kernel like :func:`patch_runs` for lines of whole vectors (patches of 16): one warp makes one patch.

    A patch is 3 vectors a lane, all under way together, with one index calculation for each.
    """
    store, expand, load2 = STORE[y, 8], EXPAND["u8", 8], LOAD_AT[2]
    per_line = patch * CHANNELS // 8
    per_row = patch * per_line
    rounds = -(-per_row // 32)
    held = 2 * rounds

    def kernel(pin, table, mask, pout, patches, a0, a1, a2, b0, b1, b2):
        lane = int64(cuda.threadIdx.x & 31)
        row = int64(cuda.blockIdx.x) * int64(cuda.blockDim.x >> 5) + int64(cuda.threadIdx.x >> 5)
        v = cuda.local.array(8, float32)
        a = cuda.local.array(3, float32)
        b = cuda.local.array(3, float32)
        words = cuda.local.array(held, uint32)
        if row < patches:
            origin = patch_origin(table, mask, row, masked)
            phase = uint32(uint32(2 * lane) % uint32(CHANNELS))
            rotate(a, phase, a0, a1, a2)
            rotate(b, phase, b0, b1, b2)
            if origin >= 0:
                row_step = load_i64(table, 4 * row + 1)
                aligned = ((misalignment(pin, origin) | row_step) & 7) == 0
                for j in range(rounds):
                    spot = uint32(lane + 32 * j)
                    line = uint32(spot // uint32(per_line))
                    column = uint32(spot - uint32(line * uint32(per_line)))
                    at = origin + int64(line) * row_step + 8 * int64(column)
                    if lane + 32 * j < per_row:
                        if aligned:
                            load2(pin, at, words, 2 * j)
                        else:
                            bits = byte_window(pin, at, int64(8))
                            words[2 * j] = uint32(bits)
                            words[2 * j + 1] = uint32(bits >> uint64(32))
            for j in range(rounds):
                if lane + 32 * j < per_row:
                    for e in range(8):
                        v[e] = float32(0.0)
                    if origin >= 0:
                        expand(words, 2 * j, v, 0)
                        for e in range(8):
                            v[e] = v[e] * a[(j + e) % CHANNELS] + b[(j + e) % CHANNELS]
                    store(pout, row * per_row + lane + 32 * j, v, 0)

    return kernel


@cuda.jit(device=True, inline="always")
def read_strip(pin, table, mask, masked, first, patches, lane, shape, raw):
    """Fill raw with the pairs of bytes of a lane, zeros where a patch is left out; `shape`: see below."""
    patch, pairs, tile, across = shape
    for j in range(across):
        spot = uint32(lane + 32 * j)
        which = uint32(spot // uint32(pairs))
        column = int64(uint32(spot - uint32(which * uint32(pairs))))
        row = first + int64(which)
        for k in range(patch):
            raw[patch * j + k] = uint32(0)
        if int64(which) < tile and row < patches:
            origin = load_i64(table, 4 * row)
            row_step = load_i64(table, 4 * row + 1)
            if masked and load_u8(mask, row) == 0:
                origin = int64(-1)
            if origin >= 0:
                at = origin + 2 * column
                if ((misalignment(pin, origin) | row_step) & 1) == 0:
                    for k in range(patch):
                        raw[patch * j + k] = load_pair(pin, at + k * row_step)
                else:
                    for k in range(patch):
                        low = uint32(load_u8(pin, at + k * row_step))
                        high = uint32(load_u8(pin, at + k * row_step + 1))
                        raw[patch * j + k] = low | uint32(high << uint32(8))


def patch_strips(*, y: str, patch: int, masked: bool, tile: int, walk: bool, block: int) -> Kernel:
    """Kernel like :func:`patch_runs`: one warp makes `tile` patches, through shared memory of its own.

    The lanes of a warp lie on neighbouring pairs of bytes of an image line, across the patches of the tile,
    which follow each other in the image nearly everywhere: a load touches one or two cache lines, where
    one thread a vector touches one for every line of the patch. From shared memory, where the bytes of a
    patch lie one after the other, a vector is one access. `walk`: warps walk the tiles by the width of the
    grid, the bytes of the next tile under way while this one is written.
    """
    store, expand, load2 = STORE[y, 8], EXPAND["u8", 8], SHARED_LOAD[2]
    run = patch * CHANNELS
    pairs = run // 2
    length = patch * run
    per_row = -(-length // 8)
    spare = length % 8  # elements of the last vector, 0: all
    rounds = -(-per_row // 32)
    across = -(-tile * pairs // 32)
    held = across * patch
    row_words = 2 * per_row
    warps = block // 32
    slots = warps * tile * row_words
    shape = (patch, pairs, tile, across)

    def kernel(pin, table, mask, pout, patches, a0, a1, a2, b0, b1, b2):
        scratch = cuda.shared.array(slots, uint32, alignment=16)
        raw = cuda.local.array(held, uint32)
        words = cuda.local.array(2, uint32)
        v = cuda.local.array(8, float32)
        a = cuda.local.array(3, float32)
        b = cuda.local.array(3, float32)
        lane = int64(cuda.threadIdx.x & 31)
        warp = int64(cuda.threadIdx.x >> 5)
        first = (int64(cuda.blockIdx.x) * warps + warp) * tile
        stride = int64(cuda.gridDim.x) * (warps * tile)
        mine = warp * tile * row_words
        phase = uint32(uint32(2 * lane) % uint32(CHANNELS))
        rotate(a, phase, a0, a1, a2)
        rotate(b, phase, b0, b1, b2)
        read_strip(pin, table, mask, masked, first, patches, lane, shape, raw)
        alive = True
        while alive:
            for j in range(across):
                spot = uint32(lane + 32 * j)
                which = uint32(spot // uint32(pairs))
                if int64(which) < tile:
                    column = int64(uint32(spot - uint32(which * uint32(pairs))))
                    to = 2 * (mine + int64(which) * row_words) + column
                    for k in range(patch):
                        shared_store_u16(scratch, to + k * pairs, raw[patch * j + k])
            if spare > 0 and lane < tile:
                scratch[mine + lane * row_words + row_words - 1] = uint32(0)
            cuda.syncwarp()
            alive = walk and first + stride < patches
            if alive:
                read_strip(pin, table, mask, masked, first + stride, patches, lane, shape, raw)
            for p in range(tile):
                row = first + p
                if row < patches:
                    live = patch_origin(table, mask, row, masked) >= 0
                    for j in range(rounds):
                        if lane + 32 * j < per_row:
                            for e in range(8):
                                v[e] = float32(0.0)
                            if live:
                                load2(scratch, (mine + p * row_words) // 2 + lane + 32 * j, words, 0)
                                expand(words, 0, v, 0)
                                for e in range(8):
                                    v[e] = v[e] * a[(j + e) % CHANNELS] + b[(j + e) % CHANNELS]
                                if spare > 0 and j == rounds - 1 and lane + 32 * j == per_row - 1:
                                    for e in range(spare, 8):
                                        v[e] = float32(0.0)
                            store(pout, row * per_row + lane + 32 * j, v, 0)
            if alive:
                cuda.syncwarp()
            first += stride

    return kernel


@cuda.jit(device=True, inline="always")
def joined_window(pin, table, mask, masked, first, patches, tile, run):
    """Return (origin, row step) of `tile` patches that lie side by side in one image on words of 4 bytes,
    all of them wanted; an origin of -1 where they do not.
    """
    origin = int64(-1)
    step = int64(0)
    if first + tile <= patches:
        start = load_i64(table, 4 * first)
        step = load_i64(table, 4 * first + 1)
        good = start >= 0 and (step & 3) == 0 and (misalignment(pin, start) & 1) == 0
        for p in range(1, tile):
            good = good and load_i64(table, 4 * (first + p)) == start + p * run
            good = good and load_i64(table, 4 * (first + p) + 1) == step
        if masked:
            for p in range(tile):
                good = good and load_u8(mask, first + p) != 0
        if good:
            origin = start
    return origin, step


def patch_words(*, y: str, patch: int, masked: bool, tile: int, walk: bool, block: int) -> Kernel:
    """Kernel like :func:`patch_strips` that reads a line of the whole tile as one word a lane.

    `tile` patches of 14 pixels side by side are 126 bytes: 32 aligned words hold them wherever they begin.
    That is half the loads, and half the registers for what is under way. Tiles that do not lie side by side
    are read pair by pair, as they are stored.
    """
    store, expand, load2 = STORE[y, 8], EXPAND["u8", 8], SHARED_LOAD[2]
    run = patch * CHANNELS
    pairs = run // 2
    length = patch * run
    per_row = -(-length // 8)
    spare = length % 8
    rounds = -(-per_row // 32)
    row_words = 2 * per_row
    warps = block // 32
    slots = warps * tile * row_words

    def kernel(pin, table, mask, pout, patches, a0, a1, a2, b0, b1, b2):
        scratch = cuda.shared.array(slots, uint32, alignment=16)
        raw = cuda.local.array(patch, uint32)
        words = cuda.local.array(2, uint32)
        v = cuda.local.array(8, float32)
        a = cuda.local.array(3, float32)
        b = cuda.local.array(3, float32)
        lane = int64(cuda.threadIdx.x & 31)
        warp = int64(cuda.threadIdx.x >> 5)
        first = (int64(cuda.blockIdx.x) * warps + warp) * tile
        stride = int64(cuda.gridDim.x) * (warps * tile)
        mine = warp * tile * row_words
        phase = uint32(uint32(2 * lane) % uint32(CHANNELS))
        rotate(a, phase, a0, a1, a2)
        rotate(b, phase, b0, b1, b2)
        for k in range(patch):
            raw[k] = uint32(0)
        origin, step = joined_window(pin, table, mask, masked, first, patches, tile, run)
        if origin >= 0:
            at = origin - (misalignment(pin, origin) & 3) + 4 * lane
            for k in range(patch):
                raw[k] = load_word_of_run(pin, at + k * step)
        alive = True
        while alive:
            if origin >= 0:
                half = int32((misalignment(pin, origin) & 3) >> 1)
                for s in range(2):
                    pair = int32(2 * lane) + int32(s) - half
                    if pair >= 0 and pair < tile * pairs:
                        which = uint32(uint32(pair) // uint32(pairs))
                        column = uint32(uint32(pair) - which * uint32(pairs))
                        to = 2 * (mine + int64(which) * row_words) + int64(column)
                        for k in range(patch):
                            shared_store_u16(scratch, to + k * pairs, uint32(raw[k] >> uint32(16 * s)))
            elif lane < pairs:
                for p in range(tile):
                    start = int64(-1)
                    if first + p < patches:
                        start = patch_origin(table, mask, first + p, masked)
                    if start >= 0:
                        row_step = load_i64(table, 4 * (first + p) + 1)
                        to = 2 * (mine + p * row_words) + lane
                        for k in range(patch):
                            low = uint32(load_u8(pin, start + 2 * lane + k * row_step))
                            high = uint32(load_u8(pin, start + 2 * lane + k * row_step + 1))
                            shared_store_u16(scratch, to + k * pairs, low | uint32(high << uint32(8)))
            if spare > 0 and lane < tile:
                scratch[mine + lane * row_words + row_words - 1] = uint32(0)
            cuda.syncwarp()
            alive = walk and first + stride < patches
            if alive:
                origin, step = joined_window(pin, table, mask, masked, first + stride, patches, tile, run)
                if origin >= 0:
                    at = origin - (misalignment(pin, origin) & 3) + 4 * lane
                    for k in range(patch):
                        raw[k] = load_word_of_run(pin, at + k * step)
            for p in range(tile):
                row = first + p
                if row < patches:
                    live = patch_origin(table, mask, row, masked) >= 0
                    for j in range(rounds):
                        if lane + 32 * j < per_row:
                            for e in range(8):
                                v[e] = float32(0.0)
                            if live:
                                load2(scratch, (mine + p * row_words) // 2 + lane + 32 * j, words, 0)
                                expand(words, 0, v, 0)
                                for e in range(8):
                                    v[e] = v[e] * a[(j + e) % CHANNELS] + b[(j + e) % CHANNELS]
                                if spare > 0 and j == rounds - 1 and lane + 32 * j == per_row - 1:
                                    for e in range(spare, 8):
                                        v[e] = float32(0.0)
                            store(pout, row * per_row + lane + 32 * j, v, 0)
            if alive:
                cuda.syncwarp()
            first += stride

    return kernel
