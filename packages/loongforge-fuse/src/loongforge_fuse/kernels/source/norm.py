# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Row normalisation (LayerNorm and RMSNorm) with optional residual add and optional per-group modulation.

A row of `width` elements is held in registers by `threads` threads, `vectors` vectors each, so memory is read
once. Up to 32 threads per row the sums run through warp shuffles alone; above, through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int64

from loongforge_fuse.kernels.source.intrinsics import (
    LOAD_SCALAR,
    LOAD_VECTOR,
    ROUNDED,
    STORE_SCALAR,
    STORE_VECTOR,
    inverse_root,
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


def _make_wide_sum(threads: int) -> Callable[..., object]:
    warps = threads // 32

    @cuda.jit(device=True, inline="always")
    def wide_sum(value, scratch, base):
        """Sum over `threads` threads through scratch[base : base + warps]; the caller alternates `base`."""
        value = narrow_sum(value, 32)
        if cuda.threadIdx.x & 31 == 0:
            scratch[base + (cuda.threadIdx.x >> 5)] = value
        cuda.syncthreads()
        total = float32(0.0)
        first = ((cuda.threadIdx.x >> 5) // warps) * warps
        for w in range(warps):
            total += scratch[base + first + w]
        return total

    return wide_sum


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
    block: int,
) -> Kernel:
    """Kernel (x, residual, gain, offset, y, total, mean, rstd, rows, width, group_rows, gain_step,
    offset_step, eps).

    total = x + residual in the type of x (only with `residual`); y = norm(total) * g + offset, where
    g is gain ("scale"), 1 + gain ("modulate") or 1 ("none"). Row i uses row i // group_rows of gain and
    offset, which are `*_step` vectors apart. `mean` (LayerNorm) and `rstd` receive one float32 per row;
    rstd 0
    means: skip.
    """
    load_x, load_r, load_w = LOAD_VECTOR[x], LOAD_VECTOR[r], LOAD_VECTOR[w]
    store_y, store_x, store_f32 = STORE_VECTOR[y], STORE_VECTOR[x], STORE_SCALAR["f32"]
    rounded = ROUNDED[x]
    size = 8 * vectors
    per_block = block // threads
    wide = threads > 32
    sum_wide = _make_wide_sum(threads if wide else 32)
    slots = 2 * (block // 32)
    half = block // 32
    modulate, scaled = gain == "modulate", gain != "none"

    def kernel(px, pr, pg, po, py, pt, pm, ps, rows, width, group_rows, gain_step, offset_step, eps):
        lane = cuda.threadIdx.x % threads
        row = int64(cuda.blockIdx.x) * per_block + cuda.threadIdx.x // threads
        live = row < rows
        count = width >> 3
        base = row * count
        v = cuda.local.array(size, float32)
        t = cuda.local.array(8, float32)
        scratch = cuda.shared.array(slots, float32)
        for j in range(vectors):
            c = lane + j * threads
            if live and c < count:
                load_x(px, base + c, v, 8 * j)
            else:
                for k in range(8):
                    v[8 * j + k] = float32(0.0)
        if residual:
            for j in range(vectors):
                c = lane + j * threads
                if live and c < count:
                    load_r(pr, base + c, t, 0)
                    for k in range(8):
                        v[8 * j + k] = rounded(v[8 * j + k] + t[k])
                    store_x(pt, base + c, v, 8 * j)
        scale = float32(1.0) / float32(width)
        mean = float32(0.0)
        if layer:
            s = float32(0.0)
            for j in range(size):
                s += v[j]
            if wide:
                s = sum_wide(s, scratch, 0)
            else:
                s = narrow_sum(s, threads)
            mean = s * scale
        q = float32(0.0)
        for j in range(vectors):
            if lane + j * threads < count:
                for k in range(8):
                    d = v[8 * j + k] - mean
                    q += d * d
        if wide:
            q = sum_wide(q, scratch, half)
        else:
            q = narrow_sum(q, threads)
        rstd = inverse_root(q * scale + eps)
        if live:
            if lane == 0:
                if layer:
                    store_f32(pm, row, mean)
                store_f32(ps, row, rstd)
            group = row // group_rows
            for j in range(vectors):
                c = lane + j * threads
                if c < count:
                    for k in range(8):
                        v[8 * j + k] = (v[8 * j + k] - mean) * rstd
                    if scaled:
                        load_w(pg, group * gain_step + c, t, 0)
                        for k in range(8):
                            v[8 * j + k] *= t[k] + float32(1.0) if modulate else t[k]
                    if offset:
                        load_w(po, group * offset_step + c, t, 0)
                        for k in range(8):
                            v[8 * j + k] += t[k]
                    store_y(py, base + c, v, 8 * j)

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
    pace: int,
) -> Kernel:
    """Kernel (x, dy, gain, mean, rstd, dtotal, dx, part_g, part_o, rows, width, group_rows, chunk, chunks,
    gain_step).

    One block walks `chunk` rows of one group, `pace` rows at a time (their loads are in flight together), and
    keeps the column sums of dy * xhat and dy in registers; part_g and part_o receive them as float32,
    (groups * chunks, width). `carry` adds the gradient that reached the residual sum directly.
    """
    load_x, load_y, load_w, load_f32 = LOAD_VECTOR[x], LOAD_VECTOR[y], LOAD_VECTOR[w], LOAD_SCALAR["f32"]
    store_x, store_part = STORE_VECTOR[x], STORE_VECTOR["f32"]
    size = 8 * vectors
    held = size * pace
    warps = threads // 32
    slots = 2 * 2 * warps * pace
    stage = 2 * warps * pace
    modulate, scaled = gain == "modulate", gain != "none"

    def kernel(px, pd, pg, pm, ps, pc, po, part_g, part_o, rows, width, group_rows, chunk, chunks, gain_step):
        lane = cuda.threadIdx.x
        count = width >> 3
        block = int64(cuda.blockIdx.x)
        group = block // chunks
        begin = group * group_rows + (block - group * chunks) * chunk
        end = min(begin + chunk, (group + 1) * group_rows)
        g = cuda.local.array(size, float32)
        sum_g = cuda.local.array(size, float32)
        sum_o = cuda.local.array(size, float32)
        h = cuda.local.array(held, float32)
        d = cuda.local.array(held, float32)
        a1 = cuda.local.array(pace, float32)
        a2 = cuda.local.array(pace, float32)
        mean = cuda.local.array(pace, float32)
        rstd = cuda.local.array(pace, float32)
        t = cuda.local.array(8, float32)
        scratch = cuda.shared.array(slots, float32)
        for j in range(size):
            g[j] = float32(1.0)
            sum_g[j] = float32(0.0)
            sum_o[j] = float32(0.0)
        if scaled:
            for j in range(vectors):
                c = lane + j * threads
                if c < count:
                    load_w(pg, group * gain_step + c, g, 8 * j)
                    if modulate:
                        for k in range(8):
                            g[8 * j + k] += float32(1.0)
        scale = float32(1.0) / float32(width)
        turn = 0
        row = begin
        while row < end:
            for p in range(pace):
                live = row + p < end
                mean[p] = float32(0.0)
                rstd[p] = float32(0.0)
                if live:
                    if layer:
                        mean[p] = load_f32(pm, row + p)
                    rstd[p] = load_f32(ps, row + p)
                for j in range(vectors):
                    c = lane + j * threads
                    at = p * size + 8 * j
                    if live and c < count:
                        load_x(px, (row + p) * count + c, h, at)
                        load_y(pd, (row + p) * count + c, d, at)
                    else:
                        for k in range(8):
                            h[at + k] = float32(0.0)
                            d[at + k] = float32(0.0)
            for p in range(pace):
                s1 = float32(0.0)
                s2 = float32(0.0)
                for j in range(vectors):
                    inside = lane + j * threads < count
                    for k in range(8):
                        at = p * size + 8 * j + k
                        xhat = (h[at] - mean[p]) * rstd[p] if inside else float32(0.0)
                        h[at] = xhat
                        if columns:
                            sum_g[8 * j + k] += d[at] * xhat
                            if offset:
                                sum_o[8 * j + k] += d[at]
                        d[at] *= g[8 * j + k]
                        s1 += d[at]
                        s2 += d[at] * xhat
                a1[p] = narrow_sum(s1, 32) if layer else float32(0.0)
                a2[p] = narrow_sum(s2, 32)
            if warps > 1:
                if lane & 31 == 0:
                    for p in range(pace):
                        scratch[turn + (2 * p) * warps + (lane >> 5)] = a1[p]
                        scratch[turn + (2 * p + 1) * warps + (lane >> 5)] = a2[p]
                cuda.syncthreads()
                for p in range(pace):
                    a1[p] = float32(0.0)
                    a2[p] = float32(0.0)
                    for u in range(warps):
                        a1[p] += scratch[turn + (2 * p) * warps + u]
                        a2[p] += scratch[turn + (2 * p + 1) * warps + u]
                # The next round writes the other half, so one barrier a round is enough.
                turn = stage - turn
            for p in range(pace):
                if row + p < end:
                    m1 = a1[p] * scale
                    m2 = a2[p] * scale
                    for j in range(vectors):
                        c = lane + j * threads
                        at = p * size + 8 * j
                        if c < count:
                            for k in range(8):
                                d[at + k] = (d[at + k] - m1 - h[at + k] * m2) * rstd[p]
                            if carry:
                                load_x(pc, (row + p) * count + c, t, 0)
                                for k in range(8):
                                    d[at + k] += t[k]
                            store_x(po, (row + p) * count + c, d, at)
            row += pace
        if columns:
            for j in range(vectors):
                c = lane + j * threads
                if c < count:
                    store_part(part_g, block * count + c, sum_g, 8 * j)
                    if offset:
                        store_part(part_o, block * count + c, sum_o, 8 * j)

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
