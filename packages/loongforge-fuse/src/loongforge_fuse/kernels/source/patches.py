# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Patches of mixed-size images to matrix rows and back, for any order and type: one element after the other.

``patch_bytes`` and ``patch_tiles`` hold the faster forms for runs of memory. A table row is (origin,
row_step, pixel_step, channel_step) in elements of the pixel buffer.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int64, uint32

from loongforge_fuse.kernels.source.indexing import next_element, patch_element
from loongforge_fuse.kernels.source.intrinsics import (
    LOAD_SCALAR,
    STORE,
    STORE_SCALAR,
    load_i64,
    load_u8,
)

Kernel = Callable[..., None]


@cuda.jit(device=True, inline="always")
def patch_origin(table, mask, row, masked):
    """Return where a patch begins in the pixel buffer, -1 when it is left out."""
    origin = load_i64(table, 4 * row)
    if masked and load_u8(mask, row) == 0:
        origin = int64(-1)
    return origin


def patch_rows(
    *, x: str, y: str, patch: int, channels: int, last: bool, planar: bool, masked: bool
) -> Kernel:
    """Kernel (pixels, table, mask, out, patches, a0, a1, a2, b0, b1, b2): gather patches into matrix rows.

    `x` is "u8" (normalised by a and b) or a float type (copied); `planar` says which of the table's steps is
    1. Rows have patch * patch * channels elements, padded with zeros to a multiple of 8; a row whose origin
    is negative or whose mask byte is 0 is all zeros and reads nothing. One thread makes one vector.
    """
    load = load_u8 if x == "u8" else LOAD_SCALAR[x]
    store = STORE[y, 8]
    length = patch * patch * channels
    per_row = -(-length // 8)
    full = length % 8 == 0
    normalise = x == "u8"

    def kernel(pin, table, mask, pout, patches, a0, a1, a2, b0, b1, b2):
        i = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        row = int64(uint32(i) // uint32(per_row))
        v = cuda.local.array(8, float32)
        if row < patches:
            k0 = (int64(i) - row * per_row) * 8
            origin = patch_origin(table, mask, row, masked)
            for e in range(8):
                v[e] = float32(0.0)
            if origin >= 0:
                row_step = load_i64(table, 4 * row + 1)
                channel_step = load_i64(table, 4 * row + 3) if planar else int64(1)
                py, px, c = patch_element(k0, patch, channels, last)
                for e in range(8):
                    if full or k0 + e < length:
                        at = origin + py * row_step + (px if planar else px * channels) + c * channel_step
                        value = float32(load(pin, at))
                        if normalise:
                            a = a0 if c == 0 else (a1 if c == 1 else a2)
                            b = b0 if c == 0 else (b1 if c == 1 else b2)
                            value = value * a + b
                        v[e] = value
                    py, px, c = next_element(py, px, c, patch, channels, last)
            store(pout, int64(i), v, 0)

    return kernel


def patch_rows_backward(
    *, g: str, y: str, patch: int, channels: int, last: bool, planar: bool, masked: bool, fill: bool
) -> Kernel:
    """Kernel (grad_rows, table, mask, grad_pixels, patches): the gradient of :func:`patch_rows`.

    Patches do not overlap, so every pixel has one writer. The caller cleared the buffer, or with `fill` the
    kernel writes zeros for masked patches. One warp writes one patch, its lanes neighbouring elements.
    """
    load, store = LOAD_SCALAR[g], STORE_SCALAR[y]
    length = patch * patch * channels
    padded = -(-length // 8) * 8
    rounds = -(-length // 32)
    hidden = masked and not fill

    def kernel(pg, table, mask, pout, patches):
        row = int64(cuda.blockIdx.x) * int64(cuda.blockDim.x >> 5) + int64(cuda.threadIdx.x >> 5)
        lane = int64(cuda.threadIdx.x & 31)
        if row < patches:
            origin = patch_origin(table, mask, row, hidden)
            if origin >= 0:
                kept = True
                if masked:
                    kept = load_u8(mask, row) != 0
                row_step = load_i64(table, 4 * row + 1)
                channel_step = load_i64(table, 4 * row + 3) if planar else int64(1)
                for r in range(rounds):
                    k = lane + 32 * r
                    if k < length:
                        py, px, c = patch_element(k, patch, channels, last)
                        at = origin + py * row_step + (px if planar else px * channels) + c * channel_step
                        value = float32(0.0)
                        if kept:
                            value = load(pg, row * padded + k)
                        store(pout, at, value)

    return kernel
