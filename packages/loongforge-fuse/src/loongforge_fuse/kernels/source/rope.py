# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
"""Per-head RMSNorm followed by rotary position embedding (half-split), forward and backward in one pass each.

A head of `width` elements is held by width / 8 neighbouring lanes, one vector each; the partner of a lane in
the rotation is half the group away, so it is one shuffle per value. `width` is a power of two, 16 to 256.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int64

from loongforge_fuse.kernels.source.intrinsics import LOAD_VECTOR, STORE_VECTOR, inverse_root
from loongforge_fuse.kernels.source.norm import FULL_WARP, narrow_sum

Kernel = Callable[..., None]


def head_norm_rope_forward(*, x: str, w: str, c: str, width: int, block: int) -> Kernel:
    """Kernel (x, weight, cos, sin, y, rows, heads, positions, eps).

    Row i is head i % heads of token i // heads; the token uses row (i // heads) % positions of cos and sin.
    """
    load_x, load_w, load_c, store = LOAD_VECTOR[x], LOAD_VECTOR[w], LOAD_VECTOR[c], STORE_VECTOR[x]
    lanes = width // 8
    half = lanes // 2
    per_block = block // lanes

    def kernel(px, pw, pc, ps, py, rows, heads, positions, eps):
        lane = cuda.threadIdx.x % lanes
        row = int64(cuda.blockIdx.x) * per_block + cuda.threadIdx.x // lanes
        live = row < rows
        v = cuda.local.array(8, float32)
        o = cuda.local.array(8, float32)
        t = cuda.local.array(8, float32)
        s = cuda.local.array(8, float32)
        for k in range(8):
            v[k] = float32(0.0)
        if live:
            load_x(px, row * lanes + lane, v, 0)
        q = float32(0.0)
        for k in range(8):
            q += v[k] * v[k]
        rstd = inverse_root(narrow_sum(q, lanes) / float32(width) + eps)
        load_w(pw, int64(lane), t, 0)
        for k in range(8):
            v[k] *= rstd * t[k]
        for k in range(8):
            o[k] = cuda.shfl_xor_sync(FULL_WARP, v[k], half)
        if live:
            at = ((row // heads) % positions) * lanes + lane
            load_c(pc, at, t, 0)
            load_c(ps, at, s, 0)
            for k in range(8):
                turned = -o[k] if lane < half else o[k]
                v[k] = v[k] * t[k] + turned * s[k]
            store(py, row * lanes + lane, v, 0)

    return kernel


def head_norm_rope_backward(*, x: str, w: str, c: str, columns: bool, width: int, block: int) -> Kernel:
    """Kernel (x, weight, cos, sin, dy, dx, part, rows, heads, positions, chunk, eps).

    Each group of lanes walks `chunk` rows; part receives its sums of the weight gradient, float32,
    (blocks * groups per block, width).
    """
    load_x, load_w, load_c, store = LOAD_VECTOR[x], LOAD_VECTOR[w], LOAD_VECTOR[c], STORE_VECTOR[x]
    store_part = STORE_VECTOR["f32"]
    lanes = width // 8
    half = lanes // 2
    per_block = block // lanes

    def kernel(px, pw, pc, ps, pd, po, part, rows, heads, positions, chunk, eps):
        lane = cuda.threadIdx.x % lanes
        line = int64(cuda.blockIdx.x) * per_block + cuda.threadIdx.x // lanes
        first = int64(cuda.blockIdx.x) * per_block * chunk + cuda.threadIdx.x // lanes
        g = cuda.local.array(8, float32)
        v = cuda.local.array(8, float32)
        d = cuda.local.array(8, float32)
        t = cuda.local.array(8, float32)
        s = cuda.local.array(8, float32)
        total = cuda.local.array(8, float32)
        load_w(pw, int64(lane), g, 0)
        for k in range(8):
            total[k] = float32(0.0)
        scale = float32(1.0) / float32(width)
        for i in range(chunk):
            row = first + i * per_block
            live = row < rows
            for k in range(8):
                v[k] = float32(0.0)
                d[k] = float32(0.0)
                t[k] = float32(0.0)
                s[k] = float32(0.0)
            if live:
                at = ((row // heads) % positions) * lanes + lane
                load_x(px, row * lanes + lane, v, 0)
                load_x(pd, row * lanes + lane, d, 0)
                load_c(pc, at, t, 0)
                load_c(ps, at, s, 0)
            q = float32(0.0)
            for k in range(8):
                q += v[k] * v[k]
            rstd = inverse_root(narrow_sum(q, lanes) * scale + eps)
            for k in range(8):
                # The transposed rotation: the partner sends dy times its own sine.
                turned = cuda.shfl_xor_sync(FULL_WARP, d[k] * s[k], half)
                d[k] = d[k] * t[k] + (turned if lane < half else -turned)
            m = float32(0.0)
            for k in range(8):
                v[k] *= rstd
                if columns:
                    total[k] += d[k] * v[k]
                d[k] *= g[k]
                m += d[k] * v[k]
            m = narrow_sum(m, lanes) * scale
            if live:
                for k in range(8):
                    d[k] = (d[k] - v[k] * m) * rstd
                store(po, row * lanes + lane, d, 0)
        if columns:
            store_part(part, line * lanes + lane, total, 0)

    return kernel
