# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
"""Column sums of a matrix of activations, i.e. the gradient of a bias."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int64

from loongforge_fuse.kernels.source.intrinsics import LOAD_VECTOR, STORE_SCALAR
from loongforge_fuse.kernels.source.norm import FULL_WARP

Kernel = Callable[..., None]


def bias_sums(*, x: str, y: str) -> Kernel:
    """Kernel (x, out, rows, width): out[c] = sum over rows of x[row, c]; width is a multiple of 8.

    A block of 1024 threads takes 64 columns: 8 lanes of one vector each, 128 rows at a time.
    """
    load, store = LOAD_VECTOR[x], STORE_SCALAR[y]

    def kernel(px, out, rows, width):
        scratch = cuda.shared.array(2048, float32)
        lane = int64(cuda.threadIdx.x & 7)
        line = int64(cuda.threadIdx.x >> 3)
        column = int64(cuda.blockIdx.x) * 8 + lane
        v = cuda.local.array(8, float32)
        total = cuda.local.array(8, float32)
        for k in range(8):
            total[k] = float32(0.0)
        if column < width >> 3:
            row = line
            while row < rows:
                load(px, row * (width >> 3) + column, v, 0)
                for k in range(8):
                    total[k] += v[k]
                row += 128
        for k in range(8):
            total[k] += cuda.shfl_xor_sync(FULL_WARP, total[k], 8)
            total[k] += cuda.shfl_xor_sync(FULL_WARP, total[k], 16)
        if cuda.threadIdx.x & 31 < 8:
            for k in range(8):
                scratch[(cuda.threadIdx.x >> 5) * 64 + 8 * lane + k] = total[k]
        cuda.syncthreads()
        mine = int64(cuda.blockIdx.x) * 64 + int64(cuda.threadIdx.x)
        if cuda.threadIdx.x < 64 and mine < width:
            value = float32(0.0)
            for w in range(32):
                value += scratch[w * 64 + cuda.threadIdx.x]
            store(out, mine, value)

    return kernel
