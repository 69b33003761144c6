# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
"""Rows to e4m3 with one scale a row, after an activation where one is asked for; one pass over memory.

A row is held in registers as it was read, or as the activation would have been stored: rounded to its type.
So the numbers are those of an activation of its own followed by a quantisation.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int64, uint32

from loongforge_fuse.kernels.source.common import FULL_WARP
from loongforge_fuse.kernels.source.elementwise import gated, gelu
from loongforge_fuse.kernels.source.intrinsics import (
    EXPAND,
    LARGER_WORDS,
    LOAD_RAW,
    PACK,
    STORE,
    STORE_SCALAR,
    larger_magnitude,
    quotient,
    raw_words,
)
from loongforge_fuse.kernels.source.norm_forward import place_in_row

Kernel = Callable[..., None]
E4M3_MAX = 448.0
INFINITY = float("inf")
SMALLEST = 1e-12  # largest magnitude that a row of zeros is taken to have


def quantise_rows(*, x: str, activation: str, threads: int, vectors: int, sure: int, block: int) -> Kernel:
    """Kernel (x, up, y, scale, rows, width): y = e4m3(a * (448 / m)), scale = m * (1 / 448).

    a is x ("none"), gelu(x) ("gelu_tanh") or silu(x) * up ("silu_mul"), rounded to the type of x; m is the
    largest magnitude of a row of it, at least `SMALLEST`. A row with a NaN becomes NaN; one with an
    infinity becomes zeros and NaN, and its scale infinite: both multiply back to NaN only.

    `threads` hold a row, `vectors` vectors of 8 elements each, the first `sure` of them inside every row.
    """
    load, expand, pack, store = LOAD_RAW[x, 8], EXPAND[x, 8], PACK[x, 8], STORE["e4m3", 8]
    store_scale, larger_words = STORE_SCALAR["f32"], LARGER_WORDS[x]
    words = raw_words(x, 8)
    two, changes, full = activation == "silu_mul", activation != "none", sure == vectors
    held = words * vectors
    held_up = held if two else 1
    per_block, warps, lanes = block // threads, max(1, threads // 32), min(threads, 32)
    slots = max(1, block // 32)
    # A block of one row has a row: the grid has no more blocks than there are rows.
    single, wide = per_block == 1, threads > 32

    def kernel(px, pu, py, ps, rows, width):
        lane, sub = place_in_row(single, threads)
        count = int64(threads * vectors) if full else width >> 3
        row = int64(cuda.blockIdx.x) * per_block + sub
        live = single or row < rows
        base = row * count
        raw = cuda.local.array(held, uint32)
        raw_up = cuda.local.array(held_up, uint32)
        a = cuda.local.array(8, float32)
        b = cuda.local.array(8, float32)
        top = cuda.local.array(words, uint32)
        scratch = cuda.shared.array(slots, float32)
        for j in range(held):
            raw[j] = uint32(0)
        for j in range(held_up):
            raw_up[j] = uint32(0)
        for j in range(vectors):
            if live and (j < sure or lane + j * threads < count):
                load(px, base + lane + j * threads, raw, words * j)
                if two:
                    load(pu, base + lane + j * threads, raw_up, words * j)
        for k in range(words):
            top[k] = uint32(0)
        for j in range(vectors):
            if changes:
                expand(raw, words * j, a, 0)
                if two:
                    expand(raw_up, words * j, b, 0)
                for k in range(8):
                    a[k] = gated(a[k], b[k]) if two else gelu(a[k])
                pack(a, 0, raw, words * j)
            for k in range(words):
                top[k] = larger_words(top[k], raw[words * j + k])
        expand(top, 0, a, 0)
        most = float32(SMALLEST)
        for k in range(8):
            most = larger_magnitude(most, a[k])
        half = lanes // 2
        while half > 0:
            most = larger_magnitude(most, cuda.shfl_xor_sync(FULL_WARP, most, half))
            half //= 2
        if wide:
            if lane & 31 == 0:
                scratch[cuda.threadIdx.x >> 5] = most
            cuda.syncthreads()
            for u in range(warps):
                most = larger_magnitude(most, scratch[warps * sub + u])
        # One division a row: what is left for an element is a product.
        factor = float32(0.0) if most == float32(INFINITY) else quotient(float32(E4M3_MAX), most)
        if live:
            if lane == 0:
                store_scale(ps, row, most * float32(1.0 / E4M3_MAX))
            for j in range(vectors):
                if j < sure or lane + j * threads < count:
                    expand(raw, words * j, a, 0)
                    for k in range(8):
                        a[k] *= factor
                    store(py, base + lane + j * threads, a, 0)

    return kernel
