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
    LOAD_RAW,
    LOAD_SCALAR,
    LOAD_VECTOR,
    RAW_WORDS,
    ROUNDED,
    STORE_SCALAR,
    STORE_VECTOR,
    inverse_root,
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
def warp_elements(warp, count, threads, vectors):
    """Number of row elements that the lanes of a warp of the row hold."""
    held = int64(0)
    for j in range(vectors):
        held += min(max(count - j * threads - 32 * warp, int64(0)), int64(32))
    return float32(8 * held)


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
    full: bool,
    ahead: bool,
    block: int,
) -> Kernel:
    """Kernel (x, residual, gain, offset, y, total, mean, rstd, group_rows, width, gain_step, offset_step,
    eps).

    total = x + residual in the type of x (only with `residual`); y = norm(total) * g + offset, where g is
    gain ("scale"), 1 + gain ("modulate") or 1 ("none"). blockIdx.y is the group of rows, which has one row
    of gain and offset, `*_step` vectors after that of the group before. `mean` (LayerNorm) and `rstd`
    receive one float32 per row. `full`: threads * vectors fill the row exactly. `ahead`: blocks walk the
    rows of their group by the width of the grid, the loads of the next row under way while the sums of
    this one are made; without it the grid covers all rows.
    """
    load_x, load_r, load_w = LOAD_RAW[x], LOAD_RAW[r], LOAD_RAW[w]
    expand_x, expand_r, expand_w = EXPAND[x], EXPAND[r], EXPAND[w]
    store_y, store_x, store_f32 = STORE_VECTOR[y], STORE_VECTOR[x], STORE_SCALAR["f32"]
    rounded = ROUNDED[x]
    words_x, words_r, words_w = RAW_WORDS[x], RAW_WORDS[r], RAW_WORDS[w]
    size, held_x, held_r, held_w = 8 * vectors, words_x * vectors, words_r * vectors, words_w * vectors
    per_block = block // threads
    wide, warps = threads > 32, max(1, threads // 32)
    half = 2 * (block // 32)
    slots = 2 * half
    each = 256 * vectors  # elements of a warp in a full row
    modulate, scaled = gain == "modulate", gain != "none"

    def kernel(px, pr, pg, po, py, pt, pm, ps, group_rows, width, gain_step, offset_step, eps):
        lane = int64(cuda.threadIdx.x % threads)
        sub = int64(cuda.threadIdx.x // threads)
        count = int64(threads * vectors) if full else width >> 3
        group = int64(cuda.blockIdx.y)
        stride = int64(cuda.gridDim.x) * per_block
        row = int64(cuda.blockIdx.x) * per_block + sub
        first = group * group_rows
        v = cuda.local.array(size, float32)
        t = cuda.local.array(8, float32)
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
                    load_w(pg, group * gain_step + c, raw_g, words_w * j)
                if offset:
                    load_w(po, group * offset_step + c, raw_o, words_w * j)
        scale = reciprocal(float32(width))
        turn = 0
        alive = row - sub < group_rows
        while alive:
            live = row < group_rows
            base = (first + row) * count
            for j in range(vectors):
                expand_x(raw_x, words_x * j, v, 8 * j)
                if residual:
                    expand_r(raw_r, words_r * j, t, 0)
                    for k in range(8):
                        v[8 * j + k] = rounded(v[8 * j + k] + t[k])
                    if live and (full or lane + j * threads < count):
                        store_x(pt, base + lane + j * threads, v, 8 * j)
            if ahead and row + stride < group_rows:
                for j in range(vectors):
                    c = lane + j * threads
                    if full or c < count:
                        load_x(px, base + stride * count + c, raw_x, words_x * j)
                        if residual:
                            load_r(pr, base + stride * count + c, raw_r, words_r * j)
            mean = float32(0.0)
            if layer:
                s = float32(0.0)
                for j in range(vectors):
                    for k in range(8):
                        s += v[8 * j + k]
                s = narrow_sum(s, min(threads, 32))
                if wide:
                    held = float32(each) if full else warp_elements(lane >> 5, count, threads, vectors)
                    mean = s * reciprocal(held) if held > float32(0.0) else float32(0.0)
                else:
                    mean = s * scale
            q = float32(0.0)
            for j in range(vectors):
                if full or lane + j * threads < count:
                    for k in range(8):
                        d = v[8 * j + k] - mean
                        q += d * d
            q = narrow_sum(q, min(threads, 32))
            if wide:
                # Sums of the warps about their own means, joined after one barrier. The next row uses the
                # other half of the scratch, so this barrier is also the one that protects it.
                if lane & 31 == 0:
                    at = turn + 2 * (cuda.threadIdx.x >> 5)
                    scratch[at] = q
                    if layer:
                        scratch[at + 1] = s
                cuda.syncthreads()
                at = turn + 2 * warps * sub
                q = float32(0.0)
                if layer:
                    s = float32(0.0)
                    for u in range(warps):
                        s += scratch[at + 2 * u + 1]
                    mean = s * scale
                for u in range(warps):
                    q += scratch[at + 2 * u]
                    if layer:
                        held = float32(each) if full else warp_elements(u, count, threads, vectors)
                        if held > float32(0.0):
                            d = scratch[at + 2 * u + 1] * reciprocal(held) - mean
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
                        for k in range(8):
                            v[8 * j + k] = (v[8 * j + k] - mean) * rstd
                        if scaled:
                            expand_w(raw_g, words_w * j, t, 0)
                            for k in range(8):
                                v[8 * j + k] *= t[k] + float32(1.0) if modulate else t[k]
                        if offset:
                            expand_w(raw_o, words_w * j, t, 0)
                            for k in range(8):
                                v[8 * j + k] += t[k]
                        store_y(py, base + c, v, 8 * j)
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
    full: bool,
    block: int,
) -> Kernel:
    """Kernel (x, dy, gain, mean, rstd, carry, dx, part_g, part_o, group_rows, width, gain_step, chunk).

    `full`: threads * vectors fill the row. blockIdx.y is the group, blockIdx.x a chunk of `chunk` of its
    rows, block / threads at a time; the loads of the next rows are under way while the sums of these are
    made. With `columns` (then block = threads) the block keeps the column sums of dy * xhat and dy in
    registers and writes them as float32 rows of part_g and part_o, (groups * chunks, width). `carry` adds
    the gradient that reached the residual sum directly.
    """
    load_x, load_y, load_w, load_f32 = LOAD_RAW[x], LOAD_RAW[y], LOAD_VECTOR[w], LOAD_SCALAR["f32"]
    load_c = LOAD_VECTOR[x]
    expand_x, expand_y = EXPAND[x], EXPAND[y]
    store_x, store_part = STORE_VECTOR[x], STORE_VECTOR["f32"]
    words_x, words_y = RAW_WORDS[x], RAW_WORDS[y]
    size, held_x, held_y = 8 * vectors, words_x * vectors, words_y * vectors
    per_block = block // threads
    wide, warps = threads > 32, max(1, threads // 32)
    half = 2 * (block // 32)
    slots = 2 * half
    modulate, scaled = gain == "modulate", gain != "none"

    def kernel(px, pd, pg, pm, ps, pc, po, part_g, part_o, group_rows, width, gain_step, chunk):
        lane = int64(cuda.threadIdx.x % threads)
        sub = int64(cuda.threadIdx.x // threads)
        count = int64(threads * vectors) if full else width >> 3
        group = int64(cuda.blockIdx.y)
        first = group * group_rows
        begin = int64(cuda.blockIdx.x) * chunk
        end = min(begin + chunk, group_rows)
        row = begin + sub
        g = cuda.local.array(size, float32)
        sum_g = cuda.local.array(size, float32)
        sum_o = cuda.local.array(size, float32)
        h = cuda.local.array(size, float32)
        d = cuda.local.array(size, float32)
        t = cuda.local.array(8, float32)
        raw_x = cuda.local.array(held_x, uint32)
        raw_y = cuda.local.array(held_y, uint32)
        scratch = cuda.shared.array(slots, float32)
        for j in range(held_x):
            raw_x[j] = uint32(0)
        for j in range(held_y):
            raw_y[j] = uint32(0)
        next_mean = float32(0.0)
        next_rstd = float32(0.0)
        if row < end:
            if layer:
                next_mean = load_f32(pm, first + row)
            next_rstd = load_f32(ps, first + row)
        for j in range(vectors):
            for k in range(8):
                g[8 * j + k] = float32(1.0)
                sum_g[8 * j + k] = float32(0.0)
                sum_o[8 * j + k] = float32(0.0)
            c = lane + j * threads
            if full or c < count:
                if row < end:
                    load_x(px, (first + row) * count + c, raw_x, words_x * j)
                    load_y(pd, (first + row) * count + c, raw_y, words_y * j)
                if scaled:
                    load_w(pg, group * gain_step + c, g, 8 * j)
                    if modulate:
                        for k in range(8):
                            g[8 * j + k] += float32(1.0)
        scale = reciprocal(float32(width))
        turn = 0
        while row - sub < end:
            live = row < end
            base = (first + row) * count
            mean = next_mean
            rstd = next_rstd
            for j in range(vectors):
                expand_x(raw_x, words_x * j, h, 8 * j)
                expand_y(raw_y, words_y * j, d, 8 * j)
            if row + per_block < end:
                if layer:
                    next_mean = load_f32(pm, first + row + per_block)
                next_rstd = load_f32(ps, first + row + per_block)
                for j in range(vectors):
                    c = lane + j * threads
                    if full or c < count:
                        load_x(px, base + per_block * count + c, raw_x, words_x * j)
                        load_y(pd, base + per_block * count + c, raw_y, words_y * j)
            s1 = float32(0.0)
            s2 = float32(0.0)
            for j in range(vectors):
                for k in range(8):
                    at = 8 * j + k
                    # Lanes past the end of the row hold dy = 0, so what they hold for x does not matter.
                    h[at] = (h[at] - mean) * rstd
                    if columns:
                        sum_g[at] += d[at] * h[at]
                        if offset:
                            sum_o[at] += d[at]
                    d[at] *= g[at]
                    s1 += d[at]
                    s2 += d[at] * h[at]
            if layer:
                s1 = narrow_sum(s1, min(threads, 32))
            s2 = narrow_sum(s2, min(threads, 32))
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
                        for k in range(8):
                            at = 8 * j + k
                            d[at] = (d[at] - m1 - h[at] * m2) * rstd
                        if carry:
                            load_c(pc, base + c, t, 0)
                            for k in range(8):
                                d[8 * j + k] += t[k]
                        store_x(po, base + c, d, 8 * j)
            row += per_block
        if columns:
            line = group * int64(cuda.gridDim.x) + int64(cuda.blockIdx.x)
            for j in range(vectors):
                c = lane + j * threads
                if full or c < count:
                    store_part(part_g, line * count + c, sum_g, 8 * j)
                    if offset:
                        store_part(part_o, line * count + c, sum_o, 8 * j)

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
