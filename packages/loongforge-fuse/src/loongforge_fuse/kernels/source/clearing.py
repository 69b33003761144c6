# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
"""Zeros for a buffer that another kernel writes from its start right after."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, int64, uint32

from loongforge_fuse.kernels.source.intrinsics import STORE_WORDS, store_u16

Kernel = Callable[..., None]


def clear_down(*, each: int, block: int) -> Kernel:
    """Kernel (out, vectors, rest): clear `vectors` times 16 bytes and `rest` pairs of bytes after them.

    A thread clears `each` vectors. The first blocks take the end of the buffer, so that its start is what the
    cache still holds at the end: the kernel that writes there next spares those zeros their way to memory.
    """
    store = STORE_WORDS[4]

    def kernel(out, vectors, rest):
        zero = cuda.local.array(4, uint32)
        for k in range(4):
            zero[k] = uint32(0)
        place = int64(cuda.gridDim.x) - 1 - int64(cuda.blockIdx.x)
        first = place * (block * each) + int64(cuda.threadIdx.x)
        for j in range(each):
            if first + j * block < vectors:
                store(out, first + j * block, zero, 0)
        if first < rest:
            store_u16(out, 8 * vectors + first, uint32(0))

    return kernel
