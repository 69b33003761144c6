# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Elementwise kernels: GELU (tanh form), gated SiLU, dropout, casts; each one pass over memory.

One thread handles one vector of 8 elements; the last `count % 8` elements get a thread each. The
`vector=False` variant handles everything element by element: it serves addresses that are not multiples of
16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32

from loongforge_fuse.kernels.source.intrinsics import (
    LOAD_QUAD,
    LOAD_SCALAR,
    LOAD_VECTOR,
    STORE_QUAD,
    STORE_SCALAR,
    STORE_VECTOR,
    atomic_add_i32,
    exp2,
    global_thread,
    load_i64,
    philox_round,
    reciprocal,
    sigmoid,
)

Kernel = Callable[..., None]


@cuda.jit(device=True, inline="always")
def gelu(x):
    """X * sigmoid(2 u) with u = sqrt(2/pi) (x + 0.044715 x^3), which equals 0.5 x (1 + tanh u)."""
    # 2^(-2 u / ln 2), with the constants multiplied out.
    power = exp2(x * (float32(-2.302208198144325) + float32(-0.1029432395800235) * (x * x)))
    return x * reciprocal(float32(1.0) + power)


@cuda.jit(device=True, inline="always")
def gelu_slope(x):
    """Derivative of :func:`gelu`: s + x s (1 - s) 2 u'."""
    square = x * x
    s = reciprocal(
        float32(1.0) + exp2(x * (float32(-2.302208198144325) + float32(-0.1029432395800235) * square))
    )
    inner = float32(1.5957691216057308) + float32(0.21406444881780076) * square
    flank = s * (float32(1.0) - s)
    # Far out the flank is exactly 0 and the polynomial may be infinite: their product is 0, not NaN.
    return s + x * flank * inner if flank != float32(0.0) else s


@cuda.jit(device=True, inline="always")
def draw(key, vector, words):
    """Fill words[0:4] with 8 random 16-bit values of vector `vector`; key holds (seed, offset) as int64.

    Philox-4x32 with 7 rounds, the smallest number that passes BigCrush (Salmon et al., SC 2011).
    """
    seed = load_i64(key, 0)
    offset = load_i64(key, 1)
    k0 = uint32(seed)
    k1 = uint32(seed >> 32)
    c0 = uint32(vector)
    c1 = uint32(vector >> 32)
    c2 = uint32(offset)
    c3 = uint32(offset >> 32)
    for _ in range(7):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, k0, k1)
        k0 = uint32(k0 + uint32(0x9E3779B9))
        k1 = uint32(k1 + uint32(0xBB67AE85))
    words[0] = c0
    words[1] = c1
    words[2] = c2
    words[3] = c3


@cuda.jit(device=True, inline="always")
def keeps(words, lane, threshold):
    """Whether element `lane` of the vector is kept: its 16 bits reach `threshold`, which is shifted up by
    16.
    """
    # The lower half is moved up, the upper one compared with the lower one still below it: no mask needed.
    word = words[lane >> 1]
    bits = word if lane & 1 else uint32(word << uint32(16))
    return bits >= threshold


def gelu_forward(*, x: str, y: str, vector: bool, dropout: bool) -> Kernel:
    """Kernel (x, y, key, count, threshold, scale): y = dropout(gelu(x))."""
    load, store, load1, store1 = LOAD_VECTOR[x], STORE_VECTOR[y], LOAD_SCALAR[x], STORE_SCALAR[y]

    def kernel(px, py, key, count, threshold, scale):
        i = global_thread()
        limit = uint32(threshold) << uint32(16)
        full = count >> 3 if vector else int64(0)
        a = cuda.local.array(8, float32)
        words = cuda.local.array(4, uint32)
        if i < full:
            load(px, i, a, 0)
            if dropout:
                draw(key, i, words)
            for k in range(8):
                a[k] = gelu(a[k])
                if dropout:
                    a[k] = a[k] * scale if keeps(words, k, limit) else float32(0.0)
            store(py, i, a, 0)
        else:
            e = i + full * 7
            if e < count:
                value = gelu(load1(px, e))
                if dropout:
                    draw(key, e >> 3, words)
                    value = value * scale if keeps(words, e & 7, limit) else float32(0.0)
                store1(py, e, value)

    return kernel


def gelu_backward(*, x: str, g: str, vector: bool, dropout: bool) -> Kernel:
    """Kernel (x, dy, dx, key, count, threshold, scale): dx = mask * dy * gelu'(x); dx has the type of x."""
    load_x, load_g, store = LOAD_VECTOR[x], LOAD_VECTOR[g], STORE_VECTOR[x]
    load1_x, load1_g, store1 = LOAD_SCALAR[x], LOAD_SCALAR[g], STORE_SCALAR[x]

    def kernel(px, pg, pd, key, count, threshold, scale):
        i = global_thread()
        limit = uint32(threshold) << uint32(16)
        full = count >> 3 if vector else int64(0)
        a = cuda.local.array(8, float32)
        b = cuda.local.array(8, float32)
        words = cuda.local.array(4, uint32)
        if i < full:
            load_x(px, i, a, 0)
            load_g(pg, i, b, 0)
            if dropout:
                draw(key, i, words)
            for k in range(8):
                a[k] = gelu_slope(a[k]) * b[k]
                if dropout:
                    a[k] = a[k] * scale if keeps(words, k, limit) else float32(0.0)
            store(pd, i, a, 0)
        else:
            e = i + full * 7
            if e < count:
                value = gelu_slope(load1_x(px, e)) * load1_g(pg, e)
                if dropout:
                    draw(key, e >> 3, words)
                    value = value * scale if keeps(words, e & 7, limit) else float32(0.0)
                store1(pd, e, value)

    return kernel


def silu_mul_forward(*, x: str, vector: bool) -> Kernel:
    """Kernel (gate, up, y, count): y = gate * sigmoid(gate) * up."""
    load, store, load1, store1 = LOAD_VECTOR[x], STORE_VECTOR[x], LOAD_SCALAR[x], STORE_SCALAR[x]

    def kernel(pg, pu, py, count):
        i = global_thread()
        full = count >> 3 if vector else int64(0)
        a = cuda.local.array(8, float32)
        b = cuda.local.array(8, float32)
        if i < full:
            load(pg, i, a, 0)
            load(pu, i, b, 0)
            for k in range(8):
                a[k] = a[k] * sigmoid(a[k]) * b[k]
            store(py, i, a, 0)
        else:
            e = i + full * 7
            if e < count:
                value = load1(pg, e)
                store1(py, e, value * sigmoid(value) * load1(pu, e))

    return kernel


def silu_mul_backward(*, x: str, vector: bool) -> Kernel:
    """Kernel (gate, up, dy, dgate, dup, count)."""
    load, store, load1, store1 = LOAD_VECTOR[x], STORE_VECTOR[x], LOAD_SCALAR[x], STORE_SCALAR[x]

    def kernel(pg, pu, pd, pdg, pdu, count):
        i = global_thread()
        full = count >> 3 if vector else int64(0)
        a = cuda.local.array(8, float32)
        b = cuda.local.array(8, float32)
        d = cuda.local.array(8, float32)
        if i < full:
            load(pg, i, a, 0)
            load(pu, i, b, 0)
            load(pd, i, d, 0)
            for k in range(8):
                s = sigmoid(a[k])
                gated = a[k] * s
                b[k] = d[k] * b[k] * (s + gated * (float32(1.0) - s))
                a[k] = d[k] * gated
            store(pdg, i, b, 0)
            store(pdu, i, a, 0)
        else:
            e = i + full * 7
            if e < count:
                gate = load1(pg, e)
                grad = load1(pd, e)
                s = sigmoid(gate)
                gated = gate * s
                store1(pdg, e, grad * load1(pu, e) * (s + gated * (float32(1.0) - s)))
                store1(pdu, e, grad * gated)

    return kernel


def dropout_forward(*, x: str, r: str, vector: bool, residual: bool) -> Kernel:
    """Kernel (x, residual, y, key, count, threshold, scale): y = residual + mask * x / keep, in the type
    of r.

    Without `residual` it is the backward pass too: the same mask times the gradient, from type x to type r.
    """
    load, store, load1, store1 = LOAD_VECTOR[x], STORE_VECTOR[r], LOAD_SCALAR[x], STORE_SCALAR[r]
    load_r, load1_r = LOAD_VECTOR[r], LOAD_SCALAR[r]

    def kernel(px, pr, py, key, count, threshold, scale):
        i = global_thread()
        limit = uint32(threshold) << uint32(16)
        full = count >> 3 if vector else int64(0)
        a = cuda.local.array(8, float32)
        b = cuda.local.array(8, float32)
        words = cuda.local.array(4, uint32)
        if i < full:
            load(px, i, a, 0)
            if residual:
                load_r(pr, i, b, 0)
            draw(key, i, words)
            for k in range(8):
                # Selecting, not multiplying by 0: a dropped infinity must not become a NaN.
                a[k] = a[k] * scale if keeps(words, k, limit) else float32(0.0)
                if residual:
                    a[k] += b[k]
            store(py, i, a, 0)
        else:
            e = i + full * 7
            if e < count:
                draw(key, e >> 3, words)
                value = load1(px, e) * scale if keeps(words, e & 7, limit) else float32(0.0)
                if residual:
                    value += load1_r(pr, e)
                store1(py, e, value)

    return kernel


def cast_scale(*, x: str, y: str, vector: bool, count_bad: bool, device_scale: bool) -> Kernel:
    """Kernel (x, y, scale_address, bad, count, factor): y = cast(x * factor [* scale]), bad += not-finite
    values.

    A value counts as bad when the *stored* result is an infinity or a NaN, so overflow of the narrow type
    shows. Float32 is written four elements a thread, see ``STORE_QUAD``.
    """
    each = 4 if y == "f32" else 8
    shift = 2 if y == "f32" else 3
    load, store = (LOAD_QUAD[x], STORE_QUAD[y]) if each == 4 else (LOAD_VECTOR[x], STORE_VECTOR[y])
    load1, store1 = LOAD_SCALAR[x], STORE_SCALAR[y]
    load_scale = LOAD_SCALAR["f32"]
    # The first value that rounds to infinity; for f32 no finite value does.
    limit = {"f16": 65520.0, "bf16": 3.3961775292304957e38, "f32": 3.4028234663852886e38}[y]
    closed = y == "f32"

    def kernel(px, py, ps, pbad, count, factor):
        i = global_thread()
        full = count >> shift if vector else int64(0)
        a = cuda.local.array(each, float32)
        scale = factor
        if device_scale:
            scale = factor * load_scale(ps, 0)
        bad = int32(0)
        if i < full:
            load(px, i, a, 0)
            for k in range(each):
                a[k] *= scale
                if count_bad:
                    size = abs(a[k])
                    fine = size <= float32(limit) if closed else size < float32(limit)
                    if not fine:
                        bad += int32(1)
            store(py, i, a, 0)
        else:
            e = i + full * (each - 1)
            if e < count:
                value = load1(px, e) * scale
                if count_bad:
                    size = abs(value)
                    fine = size <= float32(limit) if closed else size < float32(limit)
                    if not fine:
                        bad += int32(1)
                store1(py, e, value)
        if count_bad and bad > int32(0):
            atomic_add_i32(pbad, 0, bad)

    return kernel
