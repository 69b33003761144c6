# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Row normalisation (LayerNorm and RMSNorm) with optional residual add and optional per-group modulation.

A row of `width` elements is held in registers by `threads` threads, `vectors` vectors each, so memory is read
once. Up to 32 threads per row the sums run through warp shuffles alone; above, through shared memory too.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32

from loongforge_fuse.kernels.source.common import FULL_WARP, narrow_sum
from loongforge_fuse.kernels.source.intrinsics import (
    AWAIT_COPIES,
    COPY_CACHED,
    EXPAND,
    LOAD_RAW,
    ROUNDED,
    SHARED_LOAD,
    SHARED_STORE,
    STORE,
    STORE_SCALAR,
    bits_of,
    close_copies,
    inverse_root,
    raw_words,
    reciprocal,
)

Kernel = Callable[..., None]


@cuda.jit(device=True, inline="always")
def place_in_row(single, threads):
    """Return (lane of the row, row of the block) of a thread; `single`: a block has one row."""
    if single:
        return int64(cuda.threadIdx.x), int64(0)
    t = uint32(cuda.threadIdx.x)
    return int64(uint32(t % uint32(threads))), int64(uint32(t // uint32(threads)))


@cuda.jit(device=True, inline="always")
def warp_elements(warp, count, threads, vectors, each):
    """Number of row elements that the lanes of a warp of the row hold."""
    held = int64(0)
    for j in range(vectors):
        held += min(max(count - j * threads - 32 * warp, int64(0)), int64(32))
    return float32(each * held)


@cuda.jit(device=True, inline="always")
def joined_moments(mean, square, lanes, held):
    """Join mean and sum of squared deviations of `lanes` lanes that hold `held` values each (Chan et al.)."""
    weight = float32(0.5) * float32(held)
    half = 1
    while half < lanes:
        other = cuda.shfl_xor_sync(FULL_WARP, mean, half)
        square += cuda.shfl_xor_sync(FULL_WARP, square, half)
        d = other - mean
        mean = float32(0.5) * (mean + other)
        square += d * d * weight
        weight *= float32(2.0)
        half *= 2
    return mean, square


_LOAD_PAIR, _STORE_PAIR, _WIDEN = SHARED_LOAD[2], SHARED_STORE[2], EXPAND["f32", 4]


@cuda.jit(device=True, inline="always")
def put_pair(scratch, place, words, first, second):
    """Store two numbers of a warp as pair `place` of shared memory; `words` is an array of four words.

    An index into a shared array is signed, and each use of it costs five instructions for the case that it
    counts from the end; the accesses here take it as it is.
    """
    words[0] = bits_of(first)
    words[1] = bits_of(second)
    _STORE_PAIR(scratch, place, words, 0)


@cuda.jit(device=True, inline="always")
def take_pair(scratch, place, words, numbers):
    """Set numbers[0:2] to pair `place`; `words` and `numbers` are arrays of four."""
    _LOAD_PAIR(scratch, place, words, 0)
    _WIDEN(words, 0, numbers, 0)


@cuda.jit(device=True, inline="always")
def copy_pieces(copy, stage, run, source, at, pieces, block):
    """Start to copy vector `at` to the runs of shared memory from `run` on: this thread's place in each."""
    for p in range(pieces):
        copy(stage, (run + p) * block + int64(cuda.threadIdx.x), source, at * pieces + p)


@cuda.jit(device=True, inline="always")
def take_pieces(take, stage, run, pieces, block, words, at):
    """Set words[at:] to what this thread's places in the runs of shared memory from `run` on hold."""
    for p in range(pieces):
        take(stage, (run + p) * block + int64(cuda.threadIdx.x), words, at + 4 * p)


def norm_forward(
    *,
    layer: bool,
    x: str,
    r: str,
    w: str,
    y: str,
    gain: str,
    offset: bool,
    residual: bool,
    threads: int,
    vectors: int,
    each: int,
    full: bool,
    ahead: bool,
    late: bool,
    shared: bool,
    block: int,
) -> Kernel:
    """Kernel (x, residual, gain, offset, y, total, mean, rstd, group_rows, width, gain_step, offset_step,
    eps).

    total = x + residual in the type of x (only with `residual`); y = norm(total) * g + offset, where g is
    gain ("scale"), 1 + gain ("modulate") or 1 ("none"). blockIdx.y is the group of rows, which has one row
    of gain and offset, `*_step` elements after that of the group before. `mean` (LayerNorm) and `rstd`
    receive one float32 per row.

    A vector has `each` (8 or 4) elements; `full`: threads * vectors fill the row exactly. `ahead`: blocks
    walk the rows of their group by the width of the grid, the loads of the next row under way while the
    sums of this one are made; without it the grid covers all rows. `late`: gain and offset are read where
    they are used, from a cache, instead of being held from the start: fewer registers, so more warps.
    `shared`: they are copied to shared memory from the start, past the registers and through the cache that
    the blocks beside share, and read there: as few registers, and nothing to wait for at the end of a row.
    """
    load_x, load_r, load_w = LOAD_RAW[x, each], LOAD_RAW[r, each], LOAD_RAW[w, each]
    expand_x, expand_r, expand_w = EXPAND[x, each], EXPAND[r, each], EXPAND[w, each]
    store_y, store_x, store_f32 = STORE[y, each], STORE[x, each], STORE_SCALAR["f32"]
    rounded = ROUNDED[x]
    words_x, words_r, words_w = raw_words(x, each), raw_words(r, each), raw_words(w, each)
    size, held_x, held_r, held_w = each * vectors, words_x * vectors, words_r * vectors, words_w * vectors
    per_block = block // threads
    wide, warps, lanes = threads > 32, max(1, threads // 32), min(threads, 32)
    half = block // 32  # pairs of a row of all rows of the block
    slots = 4 * half
    warp_holds = 32 * each * vectors  # elements of a warp in a full row
    modulate, scaled = gain == "modulate", gain != "none"
    # Half rows are rounded far more coarsely than x * rstd - mean * rstd loses; float32 rows are centred.
    moved = layer and x != "f32"
    # A block of one row has a row: the grid has no more blocks than the group has rows.
    single, shift, share = per_block == 1, 3 if each == 8 else 2, 1.0 / (threads * vectors * each)
    from_start = not late and not shared
    copy_w, take_w, await_tables = COPY_CACHED[min(words_w, 4)], SHARED_LOAD[min(words_w, 4)], AWAIT_COPIES[0]
    pieces_w = max(1, words_w // 4)
    kept = block * held_w if shared else 4

    def kernel(px, pr, pg, po, py, pt, pm, ps, group_rows, width, gain_step, offset_step, eps):
        lane, sub = place_in_row(single, threads)
        count = int64(threads * vectors) if full else width >> shift
        group = int64(cuda.blockIdx.y)
        stride = int64(cuda.gridDim.x) * per_block
        row = int64(cuda.blockIdx.x) * per_block + sub
        first = group * group_rows
        v = cuda.local.array(size, float32)
        t = cuda.local.array(each, float32)
        raw_x = cuda.local.array(held_x, uint32)
        raw_r = cuda.local.array(held_r, uint32)
        raw_g = cuda.local.array(held_w, uint32)
        raw_o = cuda.local.array(held_w, uint32)
        scratch = cuda.shared.array(slots, uint32, alignment=16)
        kept_g = cuda.shared.array(kept, uint32, alignment=16)
        kept_o = cuda.shared.array(kept, uint32, alignment=16)
        words = cuda.local.array(4, uint32)
        pair = cuda.local.array(4, float32)
        for j in range(4):
            words[j] = uint32(0)
        for j in range(held_x):
            raw_x[j] = uint32(0)
        for j in range(held_r):
            raw_r[j] = uint32(0)
        for j in range(vectors):
            c = lane + j * threads
            if full or c < count:
                if single or row < group_rows:
                    load_x(px, (first + row) * count + c, raw_x, words_x * j)
                    if residual:
                        load_r(pr, (first + row) * count + c, raw_r, words_r * j)
                at_g = group * (gain_step >> shift) + c
                at_o = group * (offset_step >> shift) + c
                if scaled and from_start:
                    load_w(pg, at_g, raw_g, words_w * j)
                if offset and from_start:
                    load_w(po, at_o, raw_o, words_w * j)
                if scaled and shared:
                    copy_pieces(copy_w, kept_g, pieces_w * j, pg, at_g, pieces_w, block)
                if offset and shared:
                    copy_pieces(copy_w, kept_o, pieces_w * j, po, at_o, pieces_w, block)
        if shared:
            close_copies(kept_g)
        scale = float32(share) if full else reciprocal(float32(int32(width)))
        turn = int64(0)
        alive = True
        while alive:
            live = single or row < group_rows
            base = (first + row) * count
            for j in range(vectors):
                expand_x(raw_x, words_x * j, v, each * j)
                if residual:
                    expand_r(raw_r, words_r * j, t, 0)
                    for k in range(each):
                        v[each * j + k] = rounded(v[each * j + k] + t[k])
                    if live and (full or lane + j * threads < count):
                        store_x(pt, base + lane + j * threads, v, each * j)
            if ahead and row + stride < group_rows:
                for j in range(vectors):
                    c = lane + j * threads
                    if full or c < count:
                        load_x(px, base + stride * count + c, raw_x, words_x * j)
                        if residual:
                            load_r(pr, base + stride * count + c, raw_r, words_r * j)
            mean = float32(0.0)
            q = float32(0.0)
            if layer:
                # Two chains of additions: each waits for the one before.
                other = float32(0.0)
                for j in range(vectors):
                    for k in range(0, each, 2):
                        mean += v[each * j + k]
                        other += v[each * j + k + 1]
                mean += other
                if full:
                    # Every lane holds as many values, so lanes join mean and deviations in one go.
                    mean *= float32(1.0 / size)
                else:
                    mean = narrow_sum(mean, lanes)
                    if wide:
                        held = warp_elements(lane >> 5, count, threads, vectors, each)
                        mean = mean * reciprocal(held) if held > float32(0.0) else float32(0.0)
                    else:
                        mean *= scale
            second = float32(0.0)
            for j in range(vectors):
                if full or lane + j * threads < count:
                    for k in range(0, each, 2):
                        d = v[each * j + k] - mean
                        q += d * d
                        d = v[each * j + k + 1] - mean
                        second += d * d
            q += second
            if layer and full:
                mean, q = joined_moments(mean, q, lanes, size)
            else:
                q = narrow_sum(q, lanes)
            if wide:
                # Mean and deviations of the warps, joined after one barrier. The next row uses the other
                # half of the scratch, so this barrier is also the one that protects it.
                if lane & 31 == 0:
                    put_pair(scratch, turn + int64(cuda.threadIdx.x >> 5), words, q, mean)
                cuda.syncthreads()
                at = turn + warps * sub
                q = float32(0.0)
                if layer:
                    mean = float32(0.0)
                    for u in range(warps):
                        take_pair(scratch, at + u, words, pair)
                        if full:
                            mean += pair[1]
                        else:
                            mean += pair[1] * warp_elements(u, count, threads, vectors, each)
                    mean *= float32(1.0 / warps) if full else scale
                for u in range(warps):
                    take_pair(scratch, at + u, words, pair)
                    q += pair[0]
                    if layer:
                        held = float32(warp_holds)
                        if not full:
                            held = warp_elements(u, count, threads, vectors, each)
                        d = pair[1] - mean
                        q += held * d * d
                turn = half - turn
            rstd = inverse_root(q * scale + eps)
            move = -mean * rstd
            if shared:
                await_tables(kept_g)
            if live:
                if lane == 0:
                    if layer:
                        store_f32(pm, first + row, mean)
                    store_f32(ps, first + row, rstd)
                for j in range(vectors):
                    c = lane + j * threads
                    if full or c < count:
                        if scaled and late:
                            load_w(pg, group * (gain_step >> shift) + c, raw_g, words_w * j)
                        if offset and late:
                            load_w(po, group * (offset_step >> shift) + c, raw_o, words_w * j)
                        if scaled and shared:
                            take_pieces(take_w, kept_g, pieces_w * j, pieces_w, block, raw_g, words_w * j)
                        if offset and shared:
                            take_pieces(take_w, kept_o, pieces_w * j, pieces_w, block, raw_o, words_w * j)
                        for k in range(each):
                            if moved:
                                v[each * j + k] = v[each * j + k] * rstd + move
                            else:
                                v[each * j + k] = (v[each * j + k] - mean) * rstd
                        if scaled:
                            expand_w(raw_g, words_w * j, t, 0)
                            for k in range(each):
                                v[each * j + k] *= t[k] + float32(1.0) if modulate else t[k]
                        if offset:
                            expand_w(raw_o, words_w * j, t, 0)
                            for k in range(each):
                                v[each * j + k] += t[k]
                        store_y(py, base + c, v, each * j)
            row += stride
            alive = ahead and row - sub < group_rows

    return kernel
