# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201
# mypy: ignore-errors
"""Device functions that several kernels share: indices, sums over lanes, activations, random numbers."""

from __future__ import annotations

from numba import cuda, float32, int64, uint32, uint64

from loongforge_fuse.kernels.source.intrinsics import bits_of, exp2, load_i64, product, reciprocal

FULL_WARP = 0xFFFFFFFF


@cuda.jit(device=True, inline="always")
def global_thread():
    """Index of the thread in the grid, 64 bits wide: a grid may cover more than 2^31 elements."""
    return int64(cuda.blockIdx.x) * int64(cuda.blockDim.x) + int64(cuda.threadIdx.x)


@cuda.jit(device=True, inline="always")
def narrow_sum(value, threads):
    """Sum over an aligned group of `threads` <= 32 lanes; every lane gets the result."""
    step = threads // 2
    while step > 0:
        value += cuda.shfl_xor_sync(FULL_WARP, value, step)
        step //= 2
    return value


@cuda.jit(device=True, inline="always")
def exponential(x):
    """exp(x) by one ex2."""
    return exp2(x * float32(1.4426950408889634))


@cuda.jit(device=True, inline="always")
def sigmoid(x):
    """1 / (1 + exp(-x)); exact limits at both ends because rcp(inf) is 0."""
    return reciprocal(float32(1.0) + exponential(-x))


@cuda.jit(device=True, inline="always")
def is_finite(x):
    """True unless x is an infinity or a NaN."""
    return (bits_of(x) & uint32(0x7F800000)) != uint32(0x7F800000)


@cuda.jit(device=True, inline="always")
def philox_round(c0, c1, c2, c3, k0, k1):
    """One round of Philox-4x32 (Salmon et al., SC 2011)."""
    a = product(c0, uint32(0xD2511F53))
    b = product(c2, uint32(0xCD9E8D57))
    n0 = uint32(b >> uint64(32)) ^ c1 ^ k0
    n2 = uint32(a >> uint64(32)) ^ c3 ^ k1
    return n0, uint32(b), n2, uint32(a)


@cuda.jit(device=True, inline="always")
def schedule(key, keys):
    """Fill keys[0:16]: the two words of the offset, then the key words of 7 rounds.

    `key` holds (seed, offset) as int64. All vectors of a thread share this.
    """
    seed = load_i64(key, 0)
    offset = load_i64(key, 1)
    keys[0] = uint32(offset)
    keys[1] = uint32(offset >> 32)
    k0 = uint32(seed)
    k1 = uint32(seed >> 32)
    for r in range(7):
        keys[2 + 2 * r] = k0
        keys[3 + 2 * r] = k1
        k0 = uint32(k0 + uint32(0x9E3779B9))
        k1 = uint32(k1 + uint32(0xBB67AE85))


@cuda.jit(device=True, inline="always")
def draw(keys, vector, words):
    """Fill words[0:4] with 8 random 16-bit values of vector `vector`.

    Philox-4x32 with 7 rounds, the smallest number that passes BigCrush (Salmon et al., SC 2011).
    """
    c0 = uint32(vector)
    c1 = uint32(vector >> 32)
    c2 = keys[0]
    c3 = keys[1]
    for r in range(7):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, keys[2 + 2 * r], keys[3 + 2 * r])
    words[0] = c0
    words[1] = c1
    words[2] = c2
    words[3] = c3


@cuda.jit(device=True, inline="always")
def keeps(words, lane, threshold):
    """Whether element `lane` is kept: its 16 bits reach `threshold`, which is shifted up by 16."""
    # The lower half is moved up, the upper one compared with the lower one still below it: no mask needed.
    word = words[lane >> 1]
    bits = word if lane & 1 else uint32(word << uint32(16))
    return bits >= threshold
