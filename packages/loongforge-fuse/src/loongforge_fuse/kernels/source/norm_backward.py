# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Gradient of the row normalisation, with the column sums that weights and modulation need."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32

from loongforge_fuse.kernels.source.common import narrow_sum
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
    raw_words,
    reciprocal,
)
from loongforge_fuse.kernels.source.norm_forward import place_in_row

Kernel = Callable[..., None]


@cuda.jit(device=True, inline="always")
def add_below(sums, others, lane, sub, row, threads, size):
    """Add the sums that the threads of row `row` of the block hold to those of row 0, lane by lane."""
    if sub == row:
        for k in range(size):
            others[k * threads + lane] = sums[k]
    cuda.syncthreads()
    if sub == 0:
        for k in range(size):
            sums[k] += others[k * threads + lane]
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
    half = 2 * (block // 32)
    slots = 2 * half
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
    joined = columns and not single
    gathered = threads * size if joined else 4

    def kernel(px, pd, pg, pm, ps, pc, po, part_g, part_o, group_rows, width, gain_step):
        lane, sub = place_in_row(single, threads)
        count = int64(threads * vectors) if full else width >> shift
        group = int64(cuda.blockIdx.y)
        first = group * group_rows
        stride = int64(cuda.gridDim.x) * per_block
        row = int64(cuda.blockIdx.x) * per_block + sub
        sum_g = cuda.local.array(size, float32)
        sum_o = cuda.local.array(size, float32)
        g = cuda.local.array(size, float32)
        h = cuda.local.array(each, float32)
        d = cuda.local.array(each, float32)
        raw_x = cuda.local.array(held_x, uint32)
        raw_y = cuda.local.array(held_y, uint32)
        next_x = cuda.local.array(held_x, uint32)
        next_y = cuda.local.array(held_y, uint32)
        scratch = cuda.shared.array(slots, float32, alignment=16)
        stage_x = cuda.shared.array(staged_x, uint32, alignment=16)
        stage_y = cuda.shared.array(staged_y, uint32, alignment=16)
        others = cuda.shared.array(gathered, float32, alignment=16)
        mine = int64(cuda.threadIdx.x)
        for j in range(held_x):
            next_x[j] = uint32(0)
        for j in range(held_y):
            next_y[j] = uint32(0)
        next_mean = float32(0.0)
        next_rstd = float32(0.0)
        if single or row < group_rows:
            if layer:
                next_mean = load_f32(pm, first + row)
            next_rstd = load_f32(ps, first + row)
        for j in range(vectors):
            for k in range(each):
                sum_g[each * j + k] = float32(0.0)
                sum_o[each * j + k] = float32(0.0)
                g[each * j + k] = float32(0.0) if scaled else float32(1.0)
            c = lane + j * threads
            if full or c < count:
                if not piped and (single or row < group_rows):
                    load_x(px, (first + row) * count + c, next_x, words_x * j)
                    load_y(pd, (first + row) * count + c, next_y, words_y * j)
                if scaled:
                    load_w(pg, group * (gain_step >> shift) + c, g, each * j)
        if modulate:
            for j in range(size):
                g[j] += float32(1.0)
        scale = float32(share) if full else reciprocal(float32(int32(width)))
        turn = 0
        stage = 0
        if piped:
            for s in range(stages):
                if row + s * stride < group_rows:
                    for j in range(vectors):
                        c = lane + j * threads
                        if full or c < count:
                            at = (first + row + s * stride) * count + c
                            for p in range(pieces_x):
                                place = (s * runs_x + j * pieces_x + p) * block + mine
                                copy_x(stage_x, place, px, at * pieces_x + p)
                            for p in range(pieces_y):
                                place = (s * runs_y + j * pieces_y + p) * block + mine
                                copy_y(stage_y, place, pd, at * pieces_y + p)
                close_copies(stage_x)
        while row - sub < group_rows:
            live = single or row < group_rows
            base = (first + row) * count
            mean = next_mean
            rstd = next_rstd
            if piped:
                await_row(stage_x)
                for j in range(vectors):
                    c = lane + j * threads
                    if live and (full or c < count):
                        for p in range(pieces_x):
                            place = (stage * runs_x + j * pieces_x + p) * block + mine
                            take_x(stage_x, place, raw_x, words_x * j + 4 * p)
                        for p in range(pieces_y):
                            place = (stage * runs_y + j * pieces_y + p) * block + mine
                            take_y(stage_y, place, raw_y, words_y * j + 4 * p)
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
                if layer:
                    next_mean = load_f32(pm, first + row + stride)
                next_rstd = load_f32(ps, first + row + stride)
                for j in range(vectors):
                    c = lane + j * threads
                    if not piped and (full or c < count):
                        load_x(px, base + stride * count + c, next_x, words_x * j)
                        load_y(pd, base + stride * count + c, next_y, words_y * j)
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
                    at = turn + 2 * (cuda.threadIdx.x >> 5)
                    scratch[at] = s2
                    if layer:
                        scratch[at + 1] = s1
                # One barrier a row: the next row writes the other half.
                cuda.syncthreads()
                at = turn + 2 * warps * sub
                s1 = float32(0.0)
                s2 = float32(0.0)
                for u in range(warps):
                    s2 += scratch[at + 2 * u]
                    if layer:
                        s1 += scratch[at + 2 * u + 1]
                turn = half - turn
            if piped:
                # What the row needs is in registers: its place is free for the row `stages` further on.
                if row + stages * stride < group_rows:
                    for j in range(vectors):
                        c = lane + j * threads
                        if full or c < count:
                            at = base + stages * stride * count + c
                            for p in range(pieces_x):
                                place = (stage * runs_x + j * pieces_x + p) * block + mine
                                copy_x(stage_x, place, px, at * pieces_x + p)
                            for p in range(pieces_y):
                                place = (stage * runs_y + j * pieces_y + p) * block + mine
                                copy_y(stage_y, place, pd, at * pieces_y + p)
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
        if columns:
            if joined:
                for r in range(1, per_block):
                    add_below(sum_g, others, lane, sub, r, threads, size)
                    if offset:
                        add_below(sum_o, others, lane, sub, r, threads, size)
            line = group * kinds * int64(cuda.gridDim.x) + int64(cuda.blockIdx.x)
            for j in range(vectors):
                c = lane + j * threads
                if (single or sub == 0) and (full or c < count):
                    store_part(part_g, line * count + c, sum_g, each * j)
                    if offset:
                        store_part(part_o, line * count + c, sum_o, each * j)

    return kernel
