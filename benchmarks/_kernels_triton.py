"""Plain Triton kernels of the same blocks, the rivals of ``kernels_gpu.py``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n).to(tl.float32)
    u = 1.5957691216057308 * (v + 0.044715 * v * v * v)
    tl.store(y + i, (v * tl.sigmoid(u)).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def silu_mul(a, b, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(a + i, mask=i < n).to(tl.float32)
    u = tl.load(b + i, mask=i < n).to(tl.float32)
    tl.store(y + i, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), mask=i < n)


@triton.jit
def norm(x, r, w, b, y, total, width, group, step, eps, one, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < width
    v = tl.load(x + row * width + i, mask=inside, other=0.0).to(tl.float32)
    v += tl.load(r + row * width + i, mask=inside, other=0.0).to(tl.float32)
    s = v.to(total.dtype.element_ty)
    tl.store(total + row * width + i, s, mask=inside)
    v = s.to(tl.float32)
    if LAYER:
        v = tl.where(inside, v - tl.sum(v) / width, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(v * v) / width + eps)
    g = tl.load(w + (row // group) * step + i, mask=inside, other=0.0).to(tl.float32) + one
    v = v * rstd * g
    if LAYER:
        v += tl.load(b + (row // group) * step + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + i, v.to(y.dtype.element_ty), mask=inside)


@triton.jit
def quantise(x, up, y, scale, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    v = tl.load(x + row * width + i, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu_tanh":
        u = 1.5957691216057308 * (v + 0.044715 * v * v * v)
        v = (v * tl.sigmoid(u)).to(x.dtype.element_ty).to(tl.float32)
    if ACTIVATION == "silu_mul":
        u = tl.load(up + row * width + i, mask=inside, other=0.0).to(tl.float32)
        v = (v * tl.sigmoid(v) * u).to(x.dtype.element_ty).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(v)), 1e-12)
    tl.store(scale + row, most * (1.0 / 448.0))
    tl.store(y + row * width + i, (v * (448.0 / most)).to(y.dtype.element_ty), mask=inside)


KERNELS = {"gelu": gelu, "silu_mul": silu_mul, "norm": norm, "quantise": quantise}
