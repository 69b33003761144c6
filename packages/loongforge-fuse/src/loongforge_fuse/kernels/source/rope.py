# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
"""Per-head RMSNorm followed by rotary position embedding (half-split), forward and backward in one pass each.

A head of `width` elements is held by width / 8 neighbouring lanes, one vector each; the partner of a lane in
the rotation is half the group away, so it is one shuffle per value. `width` is a power of two, 16 to 256.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int64, uint32

from loongforge_fuse.kernels.source.barriers import begin_next
from loongforge_fuse.kernels.source.common import FULL_WARP, narrow_sum
from loongforge_fuse.kernels.source.intrinsics import (
    EXPAND,
    LOAD,
    LOAD_RAW,
    STORE,
    STORE_SCALAR,
    inverse_root,
)

Kernel = Callable[..., None]


def head_norm_rope_forward(*, x: str, w: str, c: str, width: int, heads_each: int, block: int) -> Kernel:
    """Kernel (x, weight, cos, sin, y, rows, heads, positions, eps); rows < 2^31.

    Row i is head i % heads of token i // heads; the token uses row (i // heads) % positions of cos and sin. A
    group of lanes takes `heads_each` heads of one token, which divides `heads`: their loads are in flight
    together and share cos and sin.
    """
    load_x, load_w, load_c, store = LOAD_RAW[x, 8], LOAD[w, 8], LOAD[c, 8], STORE[x, 8]
    expand = EXPAND[x, 8]
    words = 8 if x == "f32" else 4
    held = words * heads_each
    lanes = width // 8
    half = lanes // 2
    per_block = block // lanes

    def kernel(px, pw, pc, ps, py, rows, heads, positions, eps):
        lane = int64(cuda.threadIdx.x % lanes)
        unit = int64(cuda.blockIdx.x) * per_block + int64(cuda.threadIdx.x // lanes)
        first = unit * heads_each
        live = first < rows
        raw = cuda.local.array(held, uint32)
        g = cuda.local.array(8, float32)
        v = cuda.local.array(8, float32)
        t = cuda.local.array(8, float32)
        s = cuda.local.array(8, float32)
        for j in range(held):
            raw[j] = uint32(0)
        for k in range(8):
            t[k] = float32(0.0)
            s[k] = float32(0.0)
        if live:
            for j in range(heads_each):
                load_x(px, (first + j) * lanes + lane, raw, words * j)
            token = uint32(uint32(first) // uint32(heads))
            at = int64(uint32(token) % uint32(positions)) * lanes + lane
            load_c(pc, at, t, 0)
            load_c(ps, at, s, 0)
        load_w(pw, lane, g, 0)
        if lane < half:
            for k in range(8):
                s[k] = -s[k]
        for j in range(heads_each):
            expand(raw, words * j, v, 0)
            q = float32(0.0)
            for k in range(8):
                q += v[k] * v[k]
            rstd = inverse_root(narrow_sum(q, lanes) * float32(1.0 / width) + eps)
            for k in range(8):
                v[k] *= rstd * g[k]
                v[k] = v[k] * t[k] + cuda.shfl_xor_sync(FULL_WARP, v[k], half) * s[k]
            if live:
                store(py, (first + j) * lanes + lane, v, 0)

    return kernel


def head_norm_rope_backward(
    *, x: str, w: str, c: str, columns: bool, width: int, heads_each: int, early: bool, block: int
) -> Kernel:
    """Kernel (x, weight, cos, sin, dy, dx, part, rows, heads, positions, eps); rows < 2^31.

    Groups of lanes walk the tokens by the width of the grid, `heads_each` heads at a time; part receives
    the sums of each block for the weight gradient, float32, (blocks, width). `early`: the kernel that adds
    the partial sums may start before this one ends.
    """
    load_x, load_w, load_c, store = LOAD_RAW[x, 8], LOAD[w, 8], LOAD[c, 8], STORE[x, 8]
    expand = EXPAND[x, 8]
    store_part = STORE_SCALAR["f32"]
    words = 8 if x == "f32" else 4
    held = words * heads_each
    lanes = width // 8
    half = lanes // 2
    per_block = block // lanes
    warps = block // 32
    slots = warps * width if columns else 32

    def kernel(px, pw, pc, ps, pd, po, part, rows, heads, positions, eps):
        lane = int64(cuda.threadIdx.x % lanes)
        sub = int64(cuda.threadIdx.x // lanes)
        unit = int64(cuda.blockIdx.x) * per_block + sub
        stride = int64(cuda.gridDim.x) * per_block
        raw = cuda.local.array(held, uint32)
        raw_d = cuda.local.array(held, uint32)
        g = cuda.local.array(8, float32)
        v = cuda.local.array(8, float32)
        d = cuda.local.array(8, float32)
        t = cuda.local.array(8, float32)
        s = cuda.local.array(8, float32)
        total = cuda.local.array(8, float32)
        if early:
            begin_next()
        load_w(pw, lane, g, 0)
        for k in range(8):
            total[k] = float32(0.0)
        while (unit - sub) * heads_each < rows:
            first = unit * heads_each
            live = first < rows
            for j in range(held):
                raw[j] = uint32(0)
                raw_d[j] = uint32(0)
            for k in range(8):
                t[k] = float32(0.0)
                s[k] = float32(0.0)
            if live:
                for j in range(heads_each):
                    load_x(px, (first + j) * lanes + lane, raw, words * j)
                    load_x(pd, (first + j) * lanes + lane, raw_d, words * j)
                token = uint32(uint32(first) // uint32(heads))
                at = int64(uint32(token) % uint32(positions)) * lanes + lane
                load_c(pc, at, t, 0)
                load_c(ps, at, s, 0)
            for j in range(heads_each):
                expand(raw, words * j, v, 0)
                expand(raw_d, words * j, d, 0)
                q = float32(0.0)
                for k in range(8):
                    q += v[k] * v[k]
                rstd = inverse_root(narrow_sum(q, lanes) * float32(1.0 / width) + eps)
                m = float32(0.0)
                for k in range(8):
                    # The transposed rotation: the partner sends dy times its own sine.
                    turned = cuda.shfl_xor_sync(FULL_WARP, d[k] * s[k], half)
                    d[k] = d[k] * t[k] + (turned if lane < half else -turned)
                    v[k] *= rstd
                    if columns:
                        total[k] += d[k] * v[k]
                    d[k] *= g[k]
                    m += d[k] * v[k]
                m = narrow_sum(m, lanes) * float32(1.0 / width)
                if live:
                    for k in range(8):
                        d[k] = (d[k] - v[k] * m) * rstd
                    store(po, (first + j) * lanes + lane, d, 0)
            unit += stride
        if columns:
            # First the groups of a warp, then the warps of the block: one row of sums leaves the block.
            scratch = cuda.shared.array(slots, float32)
            step = lanes
            while step < 32:
                for k in range(8):
                    total[k] += cuda.shfl_xor_sync(FULL_WARP, total[k], step)
                step *= 2
            if cuda.threadIdx.x & 31 < lanes:
                for k in range(8):
                    scratch[(cuda.threadIdx.x >> 5) * width + 8 * lane + k] = total[k]
            cuda.syncthreads()
            if cuda.threadIdx.x < width:
                value = float32(0.0)
                for u in range(warps):
                    value += scratch[u * width + cuda.threadIdx.x]
                store_part(part, int64(cuda.blockIdx.x) * width + cuda.threadIdx.x, value)

    return kernel
