# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
"""The random counter on the device."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda

from loongforge_fuse.kernels.source.intrinsics import load_i64, store_i64


def philox_tick() -> Callable[..., None]:
    """Kernel (counter, key, steps): key = counter; counter offset += steps. One thread."""

    def kernel(counter, key, steps):
        if cuda.threadIdx.x == 0:
            offset = load_i64(counter, 1)
            store_i64(key, 0, load_i64(counter, 0))
            store_i64(key, 1, offset)
            store_i64(counter, 1, offset + steps)

    return kernel
