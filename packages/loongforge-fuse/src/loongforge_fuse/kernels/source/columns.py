# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors
"""Sums over rows: of a matrix of activations (the gradient of a bias), and of float32 partial sums.

A thread adds several rows at once: their loads are in flight together, which is what a sum waits for.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int64, uint32

from loongforge_fuse.kernels.source.barriers import await_last
from loongforge_fuse.kernels.source.common import FULL_WARP
from loongforge_fuse.kernels.source.intrinsics import EXPAND, LOAD, LOAD_RAW, STORE_SCALAR, raw_words

Kernel = Callable[..., None]


def bias_sums(*, x: str, y: str, ahead: int) -> Kernel:
    """Kernel (x, out, rows, width): out[c] = sum over rows of x[row, c]; width is a multiple of 8.

    A block of 1024 threads takes 64 columns: 8 lanes of one vector each, 128 rows at a time, `ahead` of them
    in flight for each thread.
    """
    load, expand, store = LOAD_RAW[x, 8], EXPAND[x, 8], STORE_SCALAR[y]
    words = raw_words(x, 8)
    held = words * ahead

    def kernel(px, out, rows, width):
        scratch = cuda.shared.array(2048, float32)
        lane = int64(cuda.threadIdx.x & 7)
        column = int64(cuda.blockIdx.x) * 8 + lane
        raw = cuda.local.array(held, uint32)
        v = cuda.local.array(8, float32)
        total = cuda.local.array(8, float32)
        for k in range(8):
            total[k] = float32(0.0)
        if column < width >> 3:
            row = int64(cuda.threadIdx.x >> 3)
            while row < rows:
                for j in range(held):
                    raw[j] = uint32(0)
                for j in range(ahead):
                    if row + 128 * j < rows:
                        load(px, (row + 128 * j) * (width >> 3) + column, raw, words * j)
                for j in range(ahead):
                    expand(raw, words * j, v, 0)
                    for k in range(8):
                        total[k] += v[k]
                row += 128 * ahead
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


def column_sums(*, y: str, lines: int, ahead: int, follows: bool, block: int) -> Kernel:
    """Kernel (part, out, width, chunks): out[group, c] = sum over i of part[group * chunks + i, c], float32.

    blockIdx.y is the group; width is a multiple of 4. A block is `lines` lines of threads with four columns
    each: many lines for many chunks, few lines and many columns for few chunks. `follows`: it may be
    launched before the kernel that made the partial sums has ended.
    """
    load, store = LOAD["f32", 4], STORE_SCALAR[y]
    quads = block // lines
    columns = 4 * quads
    joined = max(1, 32 // quads)  # lines of one warp
    slices = lines // joined
    slots = slices * columns
    held = 4 * ahead

    def kernel(part, out, width, chunks):
        scratch = cuda.shared.array(slots, float32)
        quad = int64(cuda.threadIdx.x % quads)
        line = int64(cuda.threadIdx.x // quads)
        column = int64(cuda.blockIdx.x) * quads + quad
        first = int64(cuda.blockIdx.y) * chunks
        v = cuda.local.array(held, float32)
        total = cuda.local.array(4, float32)
        for k in range(4):
            total[k] = float32(0.0)
        if follows:
            await_last()
        if column < width >> 2:
            i = line
            while i < chunks:
                for j in range(held):
                    v[j] = float32(0.0)
                for j in range(ahead):
                    if i + lines * j < chunks:
                        load(part, (first + i + lines * j) * (width >> 2) + column, v, 4 * j)
                for j in range(ahead):
                    for k in range(4):
                        total[k] += v[4 * j + k]
                i += lines * ahead
        step = quads
        while step < 32:
            for k in range(4):
                total[k] += cuda.shfl_xor_sync(FULL_WARP, total[k], step)
            step *= 2
        if line % joined == 0:
            for k in range(4):
                scratch[(line // joined) * columns + 4 * quad + k] = total[k]
        cuda.syncthreads()
        mine = int64(cuda.blockIdx.x) * columns + int64(cuda.threadIdx.x)
        if cuda.threadIdx.x < columns and mine < width:
            value = float32(0.0)
            for s in range(slices):
                value += scratch[s * columns + cuda.threadIdx.x]
            store(out, int64(cuda.blockIdx.y) * width + mine, value)

    return kernel
