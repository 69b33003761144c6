# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""AdamW over all parameters at once: squared norm, step preparation, update. Three launches for any model
size.

The work is cut into chunks; `chunks` holds (tensor, chunk of that tensor) as int32 pairs, one block each.
A row of `tensors` is (param, grad, exp_avg, exp_avg_sq, master, count, group, aligned) as int64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from numba import cuda, float32, int64

from loongforge_fuse.kernels.source.common import is_finite, narrow_sum
from loongforge_fuse.kernels.source.intrinsics import (
    LOAD,
    LOAD_SCALAR,
    STORE,
    STORE_SCALAR,
    address_at,
    load_i32,
    load_i64,
    square_root,
)

Kernel = Callable[..., None]
COLUMNS = 8


@cuda.jit(device=True, inline="always")
def chunk_bounds(chunks, tensors, chunk):
    """Return (row of the tensor, first element, element after the last, whether 16-byte access works)."""
    block = int64(cuda.blockIdx.x)
    row = int64(load_i32(chunks, 2 * block)) * 8
    begin = int64(load_i32(chunks, 2 * block + 1)) * chunk
    count = load_i64(tensors, row + 5)
    return row, begin, min(begin + chunk, count), load_i64(tensors, row + 7) != 0


def gradient_norm(*, g: str, chunk: int) -> Kernel:
    """Kernel (tensors, chunks, partial): partial[block] = sum of squares of the chunk's gradient."""
    load, load1, store = LOAD[g, 8], LOAD_SCALAR[g], STORE_SCALAR["f32"]

    def kernel(tensors, chunks, partial):
        row, begin, end, wide = chunk_bounds(chunks, tensors, chunk)
        grad = address_at(load_i64(tensors, row + 1))
        scratch = cuda.shared.array(8, float32)
        a = cuda.local.array(8, float32)
        total = float32(0.0)
        tail = begin
        if wide:
            tail = end & ~int64(7)
            i = (begin >> 3) + int64(cuda.threadIdx.x)
            while i < end >> 3:
                load(grad, i, a, 0)
                for k in range(8):
                    total += a[k] * a[k]
                i += int64(cuda.blockDim.x)
        e = tail + int64(cuda.threadIdx.x)
        while e < end:
            value = load1(grad, e)
            total += value * value
            e += int64(cuda.blockDim.x)
        total = narrow_sum(total, 32)
        if cuda.threadIdx.x & 31 == 0:
            scratch[cuda.threadIdx.x >> 5] = total
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            for w in range(1, 8):
                total += scratch[w]
            store(partial, int64(cuda.blockIdx.x), total)

    return kernel


def prepare_step() -> Kernel:
    """Kernel (partial, count, step, grad_scale, found_inf, scalars, norm, has, ln_beta1, ln_beta2, max_norm).

    One block of 1024. Writes scalars = (gradient factor, 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t), skip flag)
    and the unscaled, unclipped gradient norm; advances `step` unless an infinity or NaN was found. `has`:
    bit 0 grad_scale is given, bit 1 found_inf is given. max_norm 0: no clipping; count 0: no norm was
    computed.
    """
    load, store = LOAD_SCALAR["f32"], STORE_SCALAR["f32"]

    def kernel(partial, count, step, grad_scale, found_inf, scalars, norm, has, ln_beta1, ln_beta2, max_norm):
        scratch = cuda.shared.array(32, float32)
        total = float32(0.0)
        i = int64(cuda.threadIdx.x)
        while i < count:
            total += load(partial, i)
            i += 1024
        total = narrow_sum(total, 32)
        if cuda.threadIdx.x & 31 == 0:
            scratch[cuda.threadIdx.x >> 5] = total
        cuda.syncthreads()
        if cuda.threadIdx.x < 32:
            total = narrow_sum(scratch[cuda.threadIdx.x], 32)
        if cuda.threadIdx.x == 0:
            factor = float32(1.0)
            if has & 1:
                factor = float32(1.0) / load(grad_scale, 0)
            skip = False
            if has & 2:
                skip = load(found_inf, 0) != float32(0.0)
            size = square_root(total) * factor
            if count > 0:
                skip = skip or not is_finite(size)
                store(norm, 0, size)
                if max_norm > float32(0.0):
                    limit = max_norm / (size + float32(1e-6))
                    if limit < float32(1.0):
                        factor *= limit
            t = load(step, 0)
            if not skip:
                t += float32(1.0)
                store(step, 0, t)
            # expm1 keeps 1 - beta^t exact to the last bits while t is small.
            store(scalars, 0, factor)
            store(scalars, 1, float32(1.0) / -math.expm1(t * ln_beta1))
            store(scalars, 2, float32(1.0) / square_root(-math.expm1(t * ln_beta2)))
            store(scalars, 3, float32(1.0) if skip else float32(0.0))

    return kernel


@cuda.jit(device=True, inline="always")
def adamw_value(p, g, m, v, lr, decay, size, correction, eps, beta1, beta2, rest1, rest2):
    """Return the new parameter and moments of one element."""
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p = p * decay - size * m / (square_root(v) * correction + eps)
    return p, m, v


def adamw_update(*, p: str, g: str, s: str, master: bool, chunk: int) -> Kernel:
    """Kernel (tensors, chunks, scalars, lr, decay, eps, beta1, beta2, rest1, rest2).

    `lr` and `decay` hold one float32 for each parameter group. With `master` the float32 master is the
    parameter and `p` receives its rounded copy. Nothing is written when the skip flag is set.
    """
    # Float32 is accessed four elements a thread, see ``STORE``; all-half states eight.
    each, shift = (8, 3) if "f32" not in (p, g, s) and not master else (4, 2)
    load_p, load_g, load_s, load_f = LOAD[p, each], LOAD[g, each], LOAD[s, each], LOAD["f32", each]
    store_p, store_s, store_f = STORE[p, each], STORE[s, each], STORE["f32", each]
    load1_p, load1_g, load1_s, load1_f = LOAD_SCALAR[p], LOAD_SCALAR[g], LOAD_SCALAR[s], LOAD_SCALAR["f32"]
    store1_p, store1_s, store1_f = STORE_SCALAR[p], STORE_SCALAR[s], STORE_SCALAR["f32"]

    def kernel(tensors, chunks, scalars, rates, decays, eps, beta1, beta2, rest1, rest2):
        row, begin, end, wide = chunk_bounds(chunks, tensors, chunk)
        if load1_f(scalars, 3) == float32(0.0):
            pp = address_at(load_i64(tensors, row))
            pg = address_at(load_i64(tensors, row + 1))
            pm = address_at(load_i64(tensors, row + 2))
            pv = address_at(load_i64(tensors, row + 3))
            pf = address_at(load_i64(tensors, row + 4))
            group = load_i64(tensors, row + 6)
            factor = load1_f(scalars, 0)
            lr = load1_f(rates, group)
            decay = float32(1.0) - lr * load1_f(decays, group)
            size = lr * load1_f(scalars, 1)
            fix = load1_f(scalars, 2)
            a = cuda.local.array(each, float32)
            b = cuda.local.array(each, float32)
            c = cuda.local.array(each, float32)
            d = cuda.local.array(each, float32)
            tail = begin
            if wide:
                tail = end & ~int64(each - 1)
                i = (begin >> shift) + int64(cuda.threadIdx.x)
                while i < end >> shift:
                    if master:
                        load_f(pf, i, a, 0)
                    else:
                        load_p(pp, i, a, 0)
                    load_g(pg, i, b, 0)
                    load_s(pm, i, c, 0)
                    load_s(pv, i, d, 0)
                    for k in range(each):
                        a[k], c[k], d[k] = adamw_value(
                            a[k],
                            b[k] * factor,
                            c[k],
                            d[k],
                            lr,
                            decay,
                            size,
                            fix,
                            eps,
                            beta1,
                            beta2,
                            rest1,
                            rest2,
                        )
                    if master:
                        store_f(pf, i, a, 0)
                    store_p(pp, i, a, 0)
                    store_s(pm, i, c, 0)
                    store_s(pv, i, d, 0)
                    i += int64(cuda.blockDim.x)
            e = tail + int64(cuda.threadIdx.x)
            while e < end:
                value = load1_f(pf, e) if master else load1_p(pp, e)
                value, m, v = adamw_value(
                    value,
                    load1_g(pg, e) * factor,
                    load1_s(pm, e),
                    load1_s(pv, e),
                    lr,
                    decay,
                    size,
                    fix,
                    eps,
                    beta1,
                    beta2,
                    rest1,
                    rest2,
                )
                if master:
                    store1_f(pf, e, value)
                store1_p(pp, e, value)
                store1_s(pm, e, m)
                store1_s(pv, e, v)
                e += int64(cuda.blockDim.x)

    return kernel
