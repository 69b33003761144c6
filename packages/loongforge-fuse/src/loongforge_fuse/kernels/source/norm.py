# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Row normalisation (LayerNorm and RMSNorm) with optional residual add and optional per-group modulation.

A row of `width` elements is held in registers by `threads` threads, `vectors` vectors each, so memory is read
once. Up to 32 threads per row the sums run through warp shuffles alone; above, through shared memory too.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int64, uint32

from loongforge_fuse.kernels.source.intrinsics import (
    EXPAND,
    LOAD_PART,
    LOAD_RAW,
    LOAD_SCALAR,
    ROUNDED,
    STORE_PART,
    STORE_SCALAR,
    inverse_root,
    raw_words,
    reciprocal,
)

Kernel = Callable[..., None]
FULL_WARP = 0xFFFFFFFF


@cuda.jit(device=True, inline="always")
def narrow_sum(value, threads):
    """Sum over an aligned group of `threads` <= 32 lanes; every lane gets the result."""
    step = threads // 2
    while step > 0:
        value += cuda.shfl_xor_sync(FULL_WARP, value, step)
        step //= 2
    return value


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
    sums of this one are made; without it the grid covers all rows.
    """
    load_x, load_r, load_w = LOAD_RAW[x, each], LOAD_RAW[r, each], LOAD_RAW[w, each]
    expand_x, expand_r, expand_w = EXPAND[x, each], EXPAND[r, each], EXPAND[w, each]
    store_y, store_x, store_f32 = STORE_PART[y, each], STORE_PART[x, each], STORE_SCALAR["f32"]
    rounded = ROUNDED[x]
    words_x, words_r, words_w = raw_words(x, each), raw_words(r, each), raw_words(w, each)
    size, held_x, held_r, held_w = each * vectors, words_x * vectors, words_r * vectors, words_w * vectors
    per_block = block // threads
    wide, warps, lanes = threads > 32, max(1, threads // 32), min(threads, 32)
    half = 2 * (block // 32)
    slots = 2 * half
    warp_holds = 32 * each * vectors  # elements of a warp in a full row
    modulate, scaled = gain == "modulate", gain != "none"

    def kernel(px, pr, pg, po, py, pt, pm, ps, group_rows, width, gain_step, offset_step, eps):
        lane = int64(cuda.threadIdx.x % threads)
        sub = int64(cuda.threadIdx.x // threads)
        count = int64(threads * vectors) if full else width // each
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
        scratch = cuda.shared.array(slots, float32)
        for j in range(held_x):
            raw_x[j] = uint32(0)
        for j in range(held_r):
            raw_r[j] = uint32(0)
        for j in range(vectors):
            c = lane + j * threads
            if full or c < count:
                if row < group_rows:
                    load_x(px, (first + row) * count + c, raw_x, words_x * j)
                    if residual:
                        load_r(pr, (first + row) * count + c, raw_r, words_r * j)
                if scaled:
                    load_w(pg, group * (gain_step // each) + c, raw_g, words_w * j)
                if offset:
                    load_w(po, group * (offset_step // each) + c, raw_o, words_w * j)
        scale = reciprocal(float32(width))
        turn = 0
        alive = row - sub < group_rows
        while alive:
            live = row < group_rows
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
                for j in range(vectors):
                    for k in range(each):
                        mean += v[each * j + k]
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
            for j in range(vectors):
                if full or lane + j * threads < count:
                    for k in range(each):
                        d = v[each * j + k] - mean
                        q += d * d
            if layer and full:
                mean, q = joined_moments(mean, q, lanes, size)
            else:
                q = narrow_sum(q, lanes)
            if wide:
                # Mean and deviations of the warps, joined after one barrier. The next row uses the other
                # half of the scratch, so this barrier is also the one that protects it.
                if lane & 31 == 0:
                    at = turn + 2 * (cuda.threadIdx.x >> 5)
                    scratch[at] = q
                    if layer:
                        scratch[at + 1] = mean
                cuda.syncthreads()
                at = turn + 2 * warps * sub
                q = float32(0.0)
                if layer:
                    mean = float32(0.0)
                    for u in range(warps):
                        if full:
                            mean += scratch[at + 2 * u + 1]
                        else:
                            mean += scratch[at + 2 * u + 1] * warp_elements(u, count, threads, vectors, each)
                    mean *= float32(1.0 / warps) if full else scale
                for u in range(warps):
                    q += scratch[at + 2 * u]
                    if layer:
                        held = float32(warp_holds)
                        if not full:
                            held = warp_elements(u, count, threads, vectors, each)
                        d = scratch[at + 2 * u + 1] - mean
                        q += held * d * d
                turn = half - turn
            rstd = inverse_root(q * scale + eps)
            if live:
                if lane == 0:
                    if layer:
                        store_f32(pm, first + row, mean)
                    store_f32(ps, first + row, rstd)
                for j in range(vectors):
                    c = lane + j * threads
                    if full or c < count:
                        for k in range(each):
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
    block: int,
) -> Kernel:
    """Kernel (x, dy, gain, mean, rstd, carry, dx, part_g, part_o, group_rows, width, gain_step).

    blockIdx.y is the group; blocks walk its rows by the width of the grid, so that all blocks together
    read one stretch of memory, and the loads of the next rows are under way while the sums of these are
    made. Rows stay packed in registers and are widened twice, which leaves room for more blocks. With
    `columns` (then block = threads) the block keeps the column sums of dy * xhat and dy in registers and
    writes them as float32 rows of part_g and part_o, (groups * blocks, width). `carry` adds the gradient
    that reached the residual sum directly. `each` and `full` as in :func:`norm_forward`.
    """
    load_x, load_y, load_w = LOAD_RAW[x, each], LOAD_RAW[y, each], LOAD_RAW[w, each]
    expand_x, expand_y, expand_w = EXPAND[x, each], EXPAND[y, each], EXPAND[w, each]
    load_c, load_f32 = LOAD_PART[x, each], LOAD_SCALAR["f32"]
    store_x, store_part = STORE_PART[x, each], STORE_PART["f32", each]
    words_x, words_y, words_w = raw_words(x, each), raw_words(y, each), raw_words(w, each)
    size, held_x, held_y, held_w = each * vectors, words_x * vectors, words_y * vectors, words_w * vectors
    per_block = block // threads
    wide, warps, lanes = threads > 32, max(1, threads // 32), min(threads, 32)
    half = 2 * (block // 32)
    slots = 2 * half
    modulate, scaled = gain == "modulate", gain != "none"

    def kernel(px, pd, pg, pm, ps, pc, po, part_g, part_o, group_rows, width, gain_step):
        lane = int64(cuda.threadIdx.x % threads)
        sub = int64(cuda.threadIdx.x // threads)
        count = int64(threads * vectors) if full else width // each
        group = int64(cuda.blockIdx.y)
        first = group * group_rows
        stride = int64(cuda.gridDim.x) * per_block
        row = int64(cuda.blockIdx.x) * per_block + sub
        sum_g = cuda.local.array(size, float32)
        sum_o = cuda.local.array(size, float32)
        h = cuda.local.array(each, float32)
        d = cuda.local.array(each, float32)
        g = cuda.local.array(each, float32)
        raw_x = cuda.local.array(held_x, uint32)
        raw_y = cuda.local.array(held_y, uint32)
        raw_g = cuda.local.array(held_w, uint32)
        next_x = cuda.local.array(held_x, uint32)
        next_y = cuda.local.array(held_y, uint32)
        scratch = cuda.shared.array(slots, float32)
        for j in range(held_x):
            next_x[j] = uint32(0)
        for j in range(held_y):
            next_y[j] = uint32(0)
        for j in range(held_w):
            raw_g[j] = uint32(0)
        for k in range(each):
            g[k] = float32(1.0)
        next_mean = float32(0.0)
        next_rstd = float32(0.0)
        if row < group_rows:
            if layer:
                next_mean = load_f32(pm, first + row)
            next_rstd = load_f32(ps, first + row)
        for j in range(vectors):
            for k in range(each):
                sum_g[each * j + k] = float32(0.0)
                sum_o[each * j + k] = float32(0.0)
            c = lane + j * threads
            if full or c < count:
                if row < group_rows:
                    load_x(px, (first + row) * count + c, next_x, words_x * j)
                    load_y(pd, (first + row) * count + c, next_y, words_y * j)
                if scaled:
                    load_w(pg, group * (gain_step // each) + c, raw_g, words_w * j)
        scale = reciprocal(float32(width))
        turn = 0
        while row - sub < group_rows:
            live = row < group_rows
            base = (first + row) * count
            mean = next_mean
            rstd = next_rstd
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
                    if full or c < count:
                        load_x(px, base + stride * count + c, next_x, words_x * j)
                        load_y(pd, base + stride * count + c, next_y, words_y * j)
            s1 = float32(0.0)
            s2 = float32(0.0)
            for j in range(vectors):
                expand_x(raw_x, words_x * j, h, 0)
                expand_y(raw_y, words_y * j, d, 0)
                if scaled:
                    expand_w(raw_g, words_w * j, g, 0)
                for k in range(each):
                    # Lanes past the end of the row hold dy = 0, so what they hold for x does not matter.
                    xhat = (h[k] - mean) * rstd
                    if columns:
                        sum_g[each * j + k] += d[k] * xhat
                        if offset:
                            sum_o[each * j + k] += d[k]
                    inner = d[k] * (g[k] + float32(1.0) if modulate else g[k])
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
            if live:
                m1 = s1 * scale if layer else float32(0.0)
                m2 = s2 * scale
                for j in range(vectors):
                    c = lane + j * threads
                    if full or c < count:
                        expand_x(raw_x, words_x * j, h, 0)
                        expand_y(raw_y, words_y * j, d, 0)
                        if scaled:
                            expand_w(raw_g, words_w * j, g, 0)
                        for k in range(each):
                            xhat = (h[k] - mean) * rstd
                            inner = d[k] * (g[k] + float32(1.0) if modulate else g[k])
                            d[k] = (inner - m1 - xhat * m2) * rstd
                        if carry:
                            load_c(pc, base + c, h, 0)
                            for k in range(each):
                                d[k] += h[k]
                        store_x(po, base + c, d, 0)
            row += stride
        if columns:
            line = group * int64(cuda.gridDim.x) + int64(cuda.blockIdx.x)
            for j in range(vectors):
                c = lane + j * threads
                if full or c < count:
                    store_part(part_g, line * count + c, sum_g, each * j)
                    if offset:
                        store_part(part_o, line * count + c, sum_o, each * j)

    return kernel


def column_sums(*, y: str) -> Kernel:
    """Kernel (part, out, width, chunks): out[group, c] = sum over chunks of part[group * chunks + i, c].

    A block of 32 x 32 threads sums 32 columns; blockIdx.y is the group.
    """
    load, store = LOAD_SCALAR["f32"], STORE_SCALAR[y]

    def kernel(part, out, width, chunks):
        scratch = cuda.shared.array(1056, float32)
        column_in_block = cuda.threadIdx.x & 31
        line = cuda.threadIdx.x >> 5
        column = int64(cuda.blockIdx.x) * 32 + column_in_block
        group = int64(cuda.blockIdx.y)
        total = float32(0.0)
        if column < width:
            i = int64(line)
            while i < chunks:
                total += load(part, (group * chunks + i) * width + column)
                i += 32
        scratch[line * 33 + column_in_block] = total
        cuda.syncthreads()
        # Transposed read: each warp now holds one column, one value per lane.
        total = narrow_sum(scratch[column_in_block * 33 + line], 32)
        if column_in_block == 0 and int64(cuda.blockIdx.x) * 32 + line < width:
            store(out, group * width + int64(cuda.blockIdx.x) * 32 + line, total)

    return kernel
