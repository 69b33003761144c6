# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Gradient of the row normalisation, with the column sums that weights and modulation need."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32

from loongforge_fuse.kernels.source.barriers import begin_next, some_barrier
from loongforge_fuse.kernels.source.common import FULL_WARP, narrow_sum
from loongforge_fuse.kernels.source.intrinsics import (
    AWAIT_COPIES,
    COPY_ASYNC,
    EXPAND,
    LOAD,
    LOAD_RAW,
    LOAD_SCALAR,
    SHARED_LOAD,
    STORE,
    close_copies,
    fetch_run,
    raw_words,
    reciprocal,
)
from loongforge_fuse.kernels.source.norm_forward import (
    copy_pieces,
    place_in_row,
    put_pair,
    take_pair,
    take_pieces,
)

Kernel = Callable[..., None]


@cuda.jit(device=True, inline="always")
def add_below(sums, others, lane, sub, row, threads, size):
    """Add the sums that the threads of row `row` of the block hold to those of row 0, lane by lane."""
    if sub == row:
        for k in range(size):
            others[uint32(k * threads + lane)] = sums[k]
    cuda.syncthreads()
    if sub == 0:
        for k in range(size):
            sums[k] += others[uint32(k * threads + lane)]
    cuda.syncthreads()


@cuda.jit(device=True, inline="always")
def kept(value):
    """Return the value in a way that the compiler cannot repeat: it holds it instead of making it anew.

    All lanes of the warp must come here.
    """
    return cuda.shfl_xor_sync(FULL_WARP, value, 0)


@cuda.jit(device=True, inline="always")
def turned_row(row, begin, rows, turned):
    """Return the row of a group that is number `row` when counting starts at `begin` and wraps around."""
    if turned:
        row += begin
        if row >= rows:
            row -= rows
    return row


@cuda.jit(device=True, inline="always")
def write_joined(part, line, sums, others, lane, sub, threads, vectors, each, rows, store):
    """Add the sums of all rows of a block, each thread those of one vector of columns, and store them."""
    size = vectors * each
    for k in range(size):
        others[uint32((sub * size + k) * threads + lane)] = sums[k]
    cuda.syncthreads()
    mine = uint32(cuda.threadIdx.x)
    if mine < uint32(threads * vectors):
        j = uint32(mine // uint32(threads))
        at = uint32(j * uint32((each - 1) * threads) + mine)
        for k in range(each):
            total = others[uint32(at + uint32(k * threads))]
            for r in range(1, rows):
                total += others[uint32(at + uint32((r * size + k) * threads))]
            sums[k] = total
        store(part, line * (threads * vectors) + int64(mine), sums, 0)
    cuda.syncthreads()


def norm_backward(
    *,
    layer: bool,
    x: str,
    w: str,
    y: str,
    gain: str,
    columns: bool,
    offset: bool,
    carry: bool,
    threads: int,
    vectors: int,
    each: int,
    full: bool,
    stages: int,
    apart: bool,
    turned: bool,
    early: bool,
    fetch: bool,
    block: int,
) -> Kernel:
    """Kernel (x, dy, gain, mean, rstd, carry, dx, part_g, part_o, group_rows, width, gain_step).

    blockIdx.y is the group; blocks walk its rows by the width of the grid, so that all blocks together
    read one stretch of memory, and the loads of the next rows are under way while the sums of these are
    made. Rows stay packed in registers and are widened twice, which leaves room for more blocks. With
    `columns` the block keeps the column sums of dy * xhat and dy in registers, adds those of its rows, and
    writes them as float32 rows: part_g is the start of (groups, 1 or 2 with `offset`, blocks, width), part_o
    the start of its second part. `carry` adds the gradient
    that reached the residual sum directly. `each` and `full` as in :func:`norm_forward`.

    With `stages` rows are copied to shared memory without passing through registers, `stages` rows ahead.
    Each thread copies what it reads itself, so no barrier is needed for that.

    `apart`: each row of a block has a barrier of its own, so rows do not wait for each other; `threads` is a
    multiple of 32. `turned`: each group begins at another of its rows, so that groups whose size is a power
    of two do not all read at the same distance from such a border. `early`: the kernel that adds the partial
    sums may start before this one ends. `fetch`: the row after the next one is on its way to the second-level
    cache, at the cost of one instruction of one thread, while the next one is to the registers.

    With m1 and m2 the means of dy * g and dy * g * xhat, dx = rstd * (dy * g - m1 - xhat * m2), which is one
    product and two fused multiply-adds an element: rstd * (dy * g) + (x * slope + level).
    """
    load_x, load_y, load_w = LOAD_RAW[x, each], LOAD_RAW[y, each], LOAD[w, each]
    expand_x, expand_y = EXPAND[x, each], EXPAND[y, each]
    load_c, load_f32 = LOAD[x, each], LOAD_SCALAR["f32"]
    store_x, store_part = STORE[x, each], STORE["f32", each]
    words_x, words_y = raw_words(x, each), raw_words(y, each)
    size, held_x, held_y = each * vectors, words_x * vectors, words_y * vectors
    per_block = block // threads
    wide, warps, lanes = threads > 32, max(1, threads // 32), min(threads, 32)
    half = block // 32  # pairs of a row of all rows of the block
    slots = 4 * half
    modulate, scaled = gain == "modulate", gain != "none"
    # Half rows are rounded far more coarsely than x * rstd - mean * rstd loses; float32 rows are centred.
    centred = layer and x == "f32"
    moved = layer and not centred
    kinds = 2 if offset else 1
    single, shift, share = per_block == 1, 3 if each == 8 else 2, 1.0 / (threads * vectors * each)
    piped = stages > 0
    copy_x, copy_y = COPY_ASYNC[min(words_x, 4)], COPY_ASYNC[min(words_y, 4)]
    take_x, take_y = SHARED_LOAD[min(words_x, 4)], SHARED_LOAD[min(words_y, 4)]
    pieces_x, pieces_y = max(1, words_x // 4), max(1, words_y // 4)
    await_row = AWAIT_COPIES[max(stages - 1, 0)]
    # Runs of one piece for each thread of the block: its neighbours' pieces are its pieces' neighbours.
    runs_x, runs_y = vectors * pieces_x, vectors * pieces_y
    staged_x, staged_y = max(stages * held_x * block, 4), max(stages * held_y * block, 4)
    bytes_x, bytes_y = 4 * held_x * threads, 4 * held_y * threads  # of a full row
    joined = columns and not single
    # With column sums the compiler widens gains again for each row, to save registers that are there. A block
    # of one row walks too few of them for that to matter.
    holds = scaled and joined and each == 8
    # Where rows are copied ahead, shared memory has place for the sums of one row; else for those of all.
    together = joined and full and not piped
    gathered = (threads * size * (per_block if together else 1)) if joined else 4

    def kernel(px, pd, pg, pm, ps, pc, po, part_g, part_o, group_rows, width, gain_step):
        lane, sub = place_in_row(single, threads)
        count = int64(threads * vectors) if full else width >> shift
        group = int64(cuda.blockIdx.y)
        first = group * group_rows
        stride = int64(cuda.gridDim.x) * per_block
        row = int64(cuda.blockIdx.x) * per_block + sub
        begin = int64(0)
        if turned:
            begin = int64(uint32(uint32(first) // uint32(cuda.gridDim.y)))
        sum_g = cuda.local.array(size, float32)
        sum_o = cuda.local.array(size, float32)
        g = cuda.local.array(size, float32)
        h = cuda.local.array(each, float32)
        d = cuda.local.array(each, float32)
        raw_x = cuda.local.array(held_x, uint32)
        raw_y = cuda.local.array(held_y, uint32)
        next_x = cuda.local.array(held_x, uint32)
        next_y = cuda.local.array(held_y, uint32)
        scratch = cuda.shared.array(slots, uint32, alignment=16)
        words = cuda.local.array(4, uint32)
        pair = cuda.local.array(4, float32)
        for j in range(4):
            words[j] = uint32(0)
        stage_x = cuda.shared.array(staged_x, uint32, alignment=16)
        stage_y = cuda.shared.array(staged_y, uint32, alignment=16)
        others = cuda.shared.array(gathered, float32, alignment=16)
        if early:
            begin_next()
        if piped:
            # First of all: what comes before this would wait for gains.
            for s in range(stages):
                if row + s * stride < group_rows:
                    ahead = first + turned_row(row + s * stride, begin, group_rows, turned)
                    for j in range(vectors):
                        c = lane + j * threads
                        if full or c < count:
                            at = ahead * count + c
                            copy_pieces(copy_x, stage_x, s * runs_x + j * pieces_x, px, at, pieces_x, block)
                            copy_pieces(copy_y, stage_y, s * runs_y + j * pieces_y, pd, at, pieces_y, block)
                close_copies(stage_x)
        for j in range(held_x):
            next_x[j] = uint32(0)
        for j in range(held_y):
            next_y[j] = uint32(0)
        next_mean = float32(0.0)
        next_rstd = float32(0.0)
        place_of = first + turned_row(row, begin, group_rows, turned)
        if single or row < group_rows:
            if layer:
                next_mean = load_f32(pm, place_of)
            next_rstd = load_f32(ps, place_of)
        for j in range(vectors):
            for k in range(each):
                sum_g[each * j + k] = float32(0.0)
                sum_o[each * j + k] = float32(0.0)
                g[each * j + k] = float32(0.0) if scaled else float32(1.0)
            c = lane + j * threads
            if full or c < count:
                if not piped and (single or row < group_rows):
                    load_x(px, place_of * count + c, next_x, words_x * j)
                    load_y(pd, place_of * count + c, next_y, words_y * j)
                if scaled:
                    load_w(pg, group * (gain_step >> shift) + c, g, each * j)
        if modulate:
            for j in range(size):
                g[j] += float32(1.0)
        if holds:
            for j in range(size):
                g[j] = kept(g[j])
        scale = float32(share) if full else reciprocal(float32(int32(width)))
        turn = int64(0)
        stage = 0
        while row - sub < group_rows:
            live = single or row < group_rows
            base = (first + turned_row(row, begin, group_rows, turned)) * count
            mean = next_mean
            rstd = next_rstd
            if fetch and lane == 0 and row + 2 * stride < group_rows:
                far = first + turned_row(row + 2 * stride, begin, group_rows, turned)
                fetch_run(px, far, int32(bytes_x))
                fetch_run(pd, far, int32(bytes_y))
            if piped:
                await_row(stage_x)
                for j in range(vectors):
                    c = lane + j * threads
                    if live and (full or c < count):
                        run = stage * runs_x + j * pieces_x
                        take_pieces(take_x, stage_x, run, pieces_x, block, raw_x, words_x * j)
                        run = stage * runs_y + j * pieces_y
                        take_pieces(take_y, stage_y, run, pieces_y, block, raw_y, words_y * j)
                    else:
                        for p in range(words_x):
                            raw_x[words_x * j + p] = uint32(0)
                        for p in range(words_y):
                            raw_y[words_y * j + p] = uint32(0)
            else:
                for j in range(held_x):
                    raw_x[j] = next_x[j]
                for j in range(held_y):
                    raw_y[j] = next_y[j]
            if row + stride < group_rows:
                ahead = first + turned_row(row + stride, begin, group_rows, turned)
                if layer:
                    next_mean = load_f32(pm, ahead)
                next_rstd = load_f32(ps, ahead)
                for j in range(vectors):
                    c = lane + j * threads
                    if not piped and (full or c < count):
                        load_x(px, ahead * count + c, next_x, words_x * j)
                        load_y(pd, ahead * count + c, next_y, words_y * j)
            elif joined:
                # Other rows of the block may go on: what this one holds must not be added again.
                for j in range(held_y):
                    next_y[j] = uint32(0)
            move = -mean * rstd
            s1 = float32(0.0)
            s2 = float32(0.0)
            for j in range(vectors):
                expand_x(raw_x, words_x * j, h, 0)
                expand_y(raw_y, words_y * j, d, 0)
                for k in range(each):
                    # Lanes past the end of the row hold dy = 0, so what they hold for x does not matter.
                    if centred:
                        xhat = (h[k] - mean) * rstd
                    elif moved:
                        xhat = h[k] * rstd + move
                    else:
                        xhat = h[k] * rstd
                    if columns:
                        sum_g[each * j + k] += d[k] * xhat
                        if offset:
                            sum_o[each * j + k] += d[k]
                    inner = d[k] * g[each * j + k]
                    if layer:
                        s1 += inner
                    s2 += inner * xhat
            if layer:
                s1 = narrow_sum(s1, lanes)
            s2 = narrow_sum(s2, lanes)
            if wide:
                if lane & 31 == 0:
                    put_pair(scratch, turn + int64(cuda.threadIdx.x >> 5), words, s2, s1)
                # One barrier a row: the next row writes the other half.
                if apart:
                    some_barrier(int32(sub + 1), int32(threads))
                else:
                    cuda.syncthreads()
                s1 = float32(0.0)
                s2 = float32(0.0)
                for u in range(warps):
                    take_pair(scratch, turn + warps * sub + u, words, pair)
                    s2 += pair[0]
                    if layer:
                        s1 += pair[1]
                turn = half - turn
            if piped:
                # What the row needs is in registers: its place is free for the row `stages` further on.
                if row + stages * stride < group_rows:
                    ahead = first + turned_row(row + stages * stride, begin, group_rows, turned)
                    for j in range(vectors):
                        c = lane + j * threads
                        if full or c < count:
                            at = ahead * count + c
                            copy_pieces(
                                copy_x, stage_x, stage * runs_x + j * pieces_x, px, at, pieces_x, block
                            )
                            copy_pieces(
                                copy_y, stage_y, stage * runs_y + j * pieces_y, pd, at, pieces_y, block
                            )
                close_copies(stage_x)
                stage = stage + 1 if stage + 1 < stages else 0
            if live:
                m2 = s2 * scale
                slope = -rstd * rstd * m2
                level = float32(0.0)
                if layer:
                    level = -rstd * (s1 * scale)
                    if moved:
                        level -= rstd * m2 * move
                for j in range(vectors):
                    c = lane + j * threads
                    if full or c < count:
                        expand_x(raw_x, words_x * j, h, 0)
                        expand_y(raw_y, words_y * j, d, 0)
                        for k in range(each):
                            if centred:
                                h[k] -= mean
                            d[k] = d[k] * g[each * j + k] * rstd + (h[k] * slope + level)
                        if carry:
                            load_c(pc, base + c, h, 0)
                            for k in range(each):
                                d[k] += h[k]
                        store_x(po, base + c, d, 0)
            row += stride
        line = group * kinds * int64(cuda.gridDim.x) + int64(cuda.blockIdx.x)
        if together:
            write_joined(
                part_g, line, sum_g, others, lane, sub, threads, vectors, each, per_block, store_part
            )
            if offset:
                write_joined(
                    part_o, line, sum_o, others, lane, sub, threads, vectors, each, per_block, store_part
                )
        elif columns:
            if joined:
                for r in range(1, per_block):
                    add_below(sum_g, others, lane, sub, r, threads, size)
                    if offset:
                        add_below(sum_o, others, lane, sub, r, threads, size)
            for j in range(vectors):
                c = lane + j * threads
                if (single or sub == 0) and (full or c < count):
                    store_part(part_g, line * count + c, sum_g, each * j)
                    if offset:
                        store_part(part_o, line * count + c, sum_o, each * j)

    return kernel
