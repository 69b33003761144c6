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

from loongforge_fuse.kernels.source.common import draw, global_thread, keeps, schedule, sigmoid
from loongforge_fuse.kernels.source.intrinsics import (
    EXPAND,
    LOAD,
    LOAD_RAW,
    LOAD_SCALAR,
    STORE,
    STORE_SCALAR,
    atomic_add_i32,
    exp2,
    raw_words,
    reciprocal,
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
def scaled_gelu(x, share):
    """gelu(x) / share: the division is part of the reciprocal that GELU takes anyway."""
    power = exp2(x * (float32(-2.302208198144325) + float32(-0.1029432395800235) * (x * x)))
    return x * reciprocal(share + share * power)


@cuda.jit(device=True, inline="always")
def gated(gate, up):
    """silu(gate) * up."""
    return gate * sigmoid(gate) * up


def gelu_forward(*, x: str, y: str, vector: bool) -> Kernel:
    """Kernel (x, y, count): y = gelu(x)."""
    load, store, load1, store1 = LOAD[x, 8], STORE[y, 8], LOAD_SCALAR[x], STORE_SCALAR[y]

    def kernel(px, py, count):
        i = global_thread()
        full = count >> 3 if vector else int64(0)
        a = cuda.local.array(8, float32)
        if i < full:
            load(px, i, a, 0)
            for k in range(8):
                a[k] = gelu(a[k])
            store(py, i, a, 0)
        else:
            e = i + full * 7
            if e < count:
                store1(py, e, gelu(load1(px, e)))

    return kernel


def gelu_dropout_forward(*, x: str, y: str, vector: bool, each: int, block: int) -> Kernel:
    """Kernel (x, y, key, count, threshold, share): y = dropout(gelu(x)), `share` of the elements is kept.

    A thread makes `each` vectors, a block apart: what they have in common, such as the keys of the random
    rounds, is made once, and their loads are under way together.
    """
    load, expand, store = LOAD_RAW[x, 8], EXPAND[x, 8], STORE[y, 8]
    load1, store1 = LOAD_SCALAR[x], STORE_SCALAR[y]
    words = raw_words(x, 8)
    held = words * each

    def kernel(px, py, key, count, threshold, share):
        first = int64(cuda.blockIdx.x) * (block * each) + int64(cuda.threadIdx.x)
        limit = uint32(uint32(threshold) << uint32(16))
        keys = cuda.local.array(16, uint32)
        schedule(key, keys)
        full = count >> 3 if vector else int64(0)
        raw = cuda.local.array(held, uint32)
        bits = cuda.local.array(4, uint32)
        a = cuda.local.array(8, float32)
        for u in range(each):
            if first + u * block < full:
                load(px, first + u * block, raw, words * u)
        for u in range(each):
            i = first + u * block
            if i < full:
                draw(keys, i, bits)
                expand(raw, words * u, a, 0)
                for k in range(8):
                    # First the value, then the choice: the other way round each element is a branch.
                    value = scaled_gelu(a[k], share)
                    a[k] = value if keeps(bits, k, limit) else float32(0.0)
                store(py, i, a, 0)
            else:
                e = i + full * 7
                if e < count:
                    draw(keys, e >> 3, bits)
                    value = scaled_gelu(load1(px, e), share)
                    store1(py, e, value if keeps(bits, e & 7, limit) else float32(0.0))

    return kernel


def gelu_backward(*, x: str, g: str, vector: bool, dropout: bool) -> Kernel:
    """Kernel (x, dy, dx, key, count, threshold, scale): dx = mask * dy * gelu'(x); dx has the type of x."""
    load_x, load_g, store = LOAD[x, 8], LOAD[g, 8], STORE[x, 8]
    load1_x, load1_g, store1 = LOAD_SCALAR[x], LOAD_SCALAR[g], STORE_SCALAR[x]

    def kernel(px, pg, pd, key, count, threshold, scale):
        i = global_thread()
        limit = uint32(uint32(threshold) << uint32(16))
        keys = cuda.local.array(16, uint32)
        if dropout:
            schedule(key, keys)
        full = count >> 3 if vector else int64(0)
        a = cuda.local.array(8, float32)
        b = cuda.local.array(8, float32)
        words = cuda.local.array(4, uint32)
        if i < full:
            load_x(px, i, a, 0)
            load_g(pg, i, b, 0)
            if dropout:
                draw(keys, i, words)
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
                    draw(keys, e >> 3, words)
                    value = value * scale if keeps(words, e & 7, limit) else float32(0.0)
                store1(pd, e, value)

    return kernel


def silu_mul_forward(*, x: str, vector: bool) -> Kernel:
    """Kernel (gate, up, y, count): y = gate * sigmoid(gate) * up."""
    load, store, load1, store1 = LOAD[x, 8], STORE[x, 8], LOAD_SCALAR[x], STORE_SCALAR[x]

    def kernel(pg, pu, py, count):
        i = global_thread()
        full = count >> 3 if vector else int64(0)
        a = cuda.local.array(8, float32)
        b = cuda.local.array(8, float32)
        if i < full:
            load(pg, i, a, 0)
            load(pu, i, b, 0)
            for k in range(8):
                a[k] = gated(a[k], b[k])
            store(py, i, a, 0)
        else:
            e = i + full * 7
            if e < count:
                store1(py, e, gated(load1(pg, e), load1(pu, e)))

    return kernel


def silu_mul_backward(*, x: str, vector: bool) -> Kernel:
    """Kernel (gate, up, dy, dgate, dup, count)."""
    load, store, load1, store1 = LOAD[x, 8], STORE[x, 8], LOAD_SCALAR[x], STORE_SCALAR[x]

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
    load, store, load1, store1 = LOAD[x, 8], STORE[r, 8], LOAD_SCALAR[x], STORE_SCALAR[r]
    load_r, load1_r = LOAD[r, 8], LOAD_SCALAR[r]

    def kernel(px, pr, py, key, count, threshold, scale):
        i = global_thread()
        limit = uint32(uint32(threshold) << uint32(16))
        keys = cuda.local.array(16, uint32)
        schedule(key, keys)
        full = count >> 3 if vector else int64(0)
        a = cuda.local.array(8, float32)
        b = cuda.local.array(8, float32)
        words = cuda.local.array(4, uint32)
        if i < full:
            load(px, i, a, 0)
            if residual:
                load_r(pr, i, b, 0)
            draw(keys, i, words)
            for k in range(8):
                # Selecting, not multiplying by 0: a dropped infinity must not become a NaN.
                a[k] = a[k] * scale if keeps(words, k, limit) else float32(0.0)
                if residual:
                    a[k] += b[k]
            store(py, i, a, 0)
        else:
            e = i + full * 7
            if e < count:
                draw(keys, e >> 3, words)
                value = load1(px, e) * scale if keeps(words, e & 7, limit) else float32(0.0)
                if residual:
                    value += load1_r(pr, e)
                store1(py, e, value)

    return kernel


def cast_scale(*, x: str, y: str, vector: bool, count_bad: bool, device_scale: bool) -> Kernel:
    """Kernel (x, y, scale_address, bad, count, factor): y = cast(x * factor [* scale]), bad += not-finite
    values.

    A value counts as bad when the *stored* result is an infinity or a NaN, so overflow of the narrow type
    shows. Float32 is written four elements a thread, see ``STORE``.
    """
    each = 4 if y == "f32" else 8
    shift = 2 if y == "f32" else 3
    load, store = LOAD[x, each], STORE[y, each]
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
