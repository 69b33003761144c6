# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Patches of float images to matrix rows and back, several patches a block through shared memory.

A line of a patch is a short run: 28 bytes of a 14-pixel plane in half precision, which is less than a memory
sector and never 16-byte aligned. Patches that follow each other in the table lie side by side in the image
nearly everywhere, so a block takes `tile` of them: its threads walk the lines downwards, neighbouring threads
on neighbouring words, across the borders of the patches. The matrix rows of a tile are one stretch of memory,
copied from or to shared memory 16 bytes a thread. Elements are copied as they are: no rounding.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, int64, uint32

from loongforge_fuse.kernels.source.intrinsics import (
    LOAD_WORDS,
    SHARED_LOAD,
    SHARED_STORE,
    STORE_WORDS,
    load_i64,
    load_u8,
    load_u16,
    load_word,
    misalignment,
    store_u16,
    store_word,
)

Kernel = Callable[..., None]


def tile_threads(size: int, patch: int, channels: int, tile: int) -> int:
    """Threads that have work when `tile` patches of elements of `size` bytes are taken by a block."""
    return tile * patch * channels * size // 4


def _shape(y: str, patch: int, channels: int, *, last: bool) -> tuple[int, ...]:
    """Elements in a word, planes, words of a line, words of a row, and of a row with the spacing in shared
    memory that keeps the same column of neighbouring patches on different banks.
    """
    unit = 1 if y == "f32" else 2
    planes, run = (1, patch * channels) if last else (channels, patch)
    line = run // unit
    row = -(-patch * patch * channels // 8) * 8 // unit
    return unit, planes, line, row, row + (line if row % 32 == 0 else 0)


@cuda.jit(device=True, inline="always")
def word_aligned(pixels, origin, row_step, channel_step, size):
    """Tell whether every line of a patch starts on a 4-byte border, for elements of `size` bytes."""
    odd = misalignment(pixels, size * origin) | (size * (row_step | channel_step))
    return (odd & 3) == 0


@cuda.jit(device=True, inline="always")
def place_in_tile(threads, tile, line):
    """Return (plane, patch of the tile, word of the line) of a thread."""
    t = uint32(cuda.threadIdx.x)
    plane = uint32(t // uint32(threads))
    rest = uint32(t - plane * uint32(threads))
    patch = uint32(rest // uint32(line))
    return int64(plane), int64(patch), int64(uint32(rest - patch * uint32(line)))


@cuda.jit(device=True, inline="always")
def patch_place(table, row, patches, place):
    """Set place[0:3] to origin, row step and channel step of a patch; an origin of -1 beyond the last one."""
    place[0] = int64(-1)
    if row < patches:
        place[0] = load_i64(table, 4 * row)
        place[1] = load_i64(table, 4 * row + 1)
        place[2] = load_i64(table, 4 * row + 3)


@cuda.jit(device=True, inline="always")
def read_lines(pin, place, plane, column, patch, unit, held):
    """Fill held[0:patch] with the words of a column of a patch, zeros where it is left out."""
    size = 4 // unit
    for k in range(patch):
        held[k] = uint32(0)
    if place[0] >= 0:
        at = place[0] + plane * place[2] + column * unit
        if unit == 1 or word_aligned(pin, place[0], place[1], place[2], size):
            start = size * at
            step = size * place[1]
            for k in range(patch):
                held[k] = load_word(pin, start + k * step)
        else:
            for k in range(patch):
                low = uint32(load_u16(pin, at + k * place[1]))
                high = uint32(load_u16(pin, at + k * place[1] + 1))
                held[k] = low | uint32(high << uint32(16))


def patch_tiles(
    *, y: str, patch: int, channels: int, last: bool, masked: bool, tile: int, walk: bool, block: int
) -> Kernel:
    """Kernel (pixels, table, mask, out, patches, a0, a1, a2, b0, b1, b2): gather patches into matrix rows.

    `last`: interleaved images, rows in the order (y, x, channel); else planes and (channel, y, x). The six
    factors are those of the other gathering kernels and not used. `walk`: blocks walk the tiles by the width
    of the grid; the lines of the next tile are under way while this one is written, and the table is read
    one tile further ahead.
    """
    unit, planes, line, words, spaced = _shape(y, patch, channels, last=last)
    across = tile * line
    filled = planes * patch * line
    padding = words - filled
    slots = tile * spaced
    vectors = words // 4
    load4, store4 = SHARED_LOAD[4], STORE_WORDS[4]

    def kernel(pin, table, mask, pout, patches, a0, a1, a2, b0, b1, b2):
        scratch = cuda.shared.array(slots, uint32, alignment=16)
        held = cuda.local.array(patch, uint32)
        four = cuda.local.array(4, uint32)
        place = cuda.local.array(3, int64)
        plane, mine, column = place_in_tile(across, tile, line)
        works = plane < planes
        stride = int64(cuda.gridDim.x) * tile
        first = int64(cuda.blockIdx.x) * tile
        for k in range(3):
            place[k] = int64(-1)
        if works:
            patch_place(table, first + mine, patches, place)
            if masked and place[0] >= 0 and load_u8(mask, first + mine) == 0:
                place[0] = int64(-1)
        read_lines(pin, place, plane, column, patch, unit, held)
        if walk and works:
            patch_place(table, first + stride + mine, patches, place)
        if padding > 0 and cuda.threadIdx.x < tile * padding:
            row_of = cuda.threadIdx.x // max(padding, 1)
            scratch[row_of * spaced + filled + cuda.threadIdx.x - row_of * padding] = uint32(0)
        alive = True
        while alive:
            if works:
                to = mine * spaced + plane * (patch * line) + column
                for k in range(patch):
                    scratch[to + k * line] = held[k]
            cuda.syncthreads()
            alive = walk and first + stride < patches
            if alive:
                if masked and place[0] >= 0 and load_u8(mask, first + stride + mine) == 0:
                    place[0] = int64(-1)
                read_lines(pin, place, plane, column, patch, unit, held)
                if works:
                    patch_place(table, first + 2 * stride + mine, patches, place)
            count = min(patches - first, int64(tile)) * vectors
            v = int64(cuda.threadIdx.x)
            while v < count:
                spot = v
                if spaced != words:
                    spot += int64(uint32(v) // uint32(vectors)) * ((spaced - words) // 4)
                load4(scratch, spot, four, 0)
                store4(pout, first * vectors + v, four, 0)
                v += block
            if alive:
                cuda.syncthreads()
            first += stride

    return kernel


def patch_tiles_backward(
    *,
    y: str,
    patch: int,
    channels: int,
    last: bool,
    masked: bool,
    fill: bool,
    tile: int,
    walk: bool,
    block: int,
) -> Kernel:
    """Kernel (grad_rows, table, mask, grad_pixels, patches): the gradient of :func:`patch_tiles`.

    Patches do not overlap, so every pixel has one writer. The caller cleared the buffer, or with `fill` the
    kernel writes zeros for masked patches. `walk` as in :func:`patch_tiles`.
    """
    unit, planes, line, words, spaced = _shape(y, patch, channels, last=last)
    size = 4 // unit
    across = tile * line
    slots = tile * spaced
    vectors = words // 4
    load4, store4 = LOAD_WORDS[4], SHARED_STORE[4]
    rounds = -(-tile * vectors // block)
    copied = 4 * rounds

    def kernel(pg, table, mask, pout, patches):
        scratch = cuda.shared.array(slots, uint32, alignment=16)
        four = cuda.local.array(copied, uint32)
        place = cuda.local.array(3, int64)
        plane, mine, column = place_in_tile(across, tile, line)
        works = plane < planes
        stride = int64(cuda.gridDim.x) * tile
        first = int64(cuda.blockIdx.x) * tile
        count = min(patches - first, int64(tile)) * vectors
        for k in range(3):
            place[k] = int64(-1)
        for r in range(rounds):
            v = int64(cuda.threadIdx.x) + r * block
            if v < count:
                load4(pg, first * vectors + v, four, 4 * r)
        alive = True
        while alive:
            if works:
                patch_place(table, first + mine, patches, place)
            for r in range(rounds):
                v = int64(cuda.threadIdx.x) + r * block
                if v < count:
                    spot = v
                    if spaced != words:
                        spot += int64(uint32(v) // uint32(vectors)) * ((spaced - words) // 4)
                    store4(scratch, spot, four, 4 * r)
            cuda.syncthreads()
            alive = walk and first + stride < patches
            if alive:
                count = min(patches - first - stride, int64(tile)) * vectors
                for r in range(rounds):
                    v = int64(cuda.threadIdx.x) + r * block
                    if v < count:
                        load4(pg, (first + stride) * vectors + v, four, 4 * r)
            keep = uint32(0xFFFFFFFF)
            if masked and place[0] >= 0 and load_u8(mask, first + mine) == 0:
                if fill:
                    keep = uint32(0)
                else:
                    place[0] = int64(-1)
            if place[0] >= 0:
                at = place[0] + plane * place[2] + column * unit
                source = mine * spaced + plane * (patch * line) + column
                if unit == 1 or word_aligned(pout, place[0], place[1], place[2], size):
                    start = size * at
                    step = size * place[1]
                    for k in range(patch):
                        store_word(pout, start + k * step, scratch[source + k * line] & keep)
                else:
                    for k in range(patch):
                        word = scratch[source + k * line] & keep
                        store_u16(pout, at + k * place[1], word & uint32(0xFFFF))
                        store_u16(pout, at + k * place[1] + 1, word >> uint32(16))
            if alive:
                cuda.syncthreads()
            first += stride

    return kernel
