"""Elementwise operators: GELU (tanh) with dropout, gated SiLU.

The functions that reach the GPU are written for few Python steps: a cache lookup by device, types and
alignment, one allocation, one launch. Anything unusual leaves that path early.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.kernels.specs import KernelSpec
from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import (
    CODES,
    Context,
    define,
    differentiable,
    fell_back,
    load_first,
    plain,
    resolve,
    vector_blocks,
    wants_grad,
)
from loongforge_fuse.ops.variants import forget_on_change, in_turn

_ARGUMENTS = {
    "gelu_forward": "PPq",
    "gelu_dropout_forward": "PPPqif",
    "gelu_backward": "PPPPqif",
    "silu_mul_forward": "PPPq",
    "silu_mul_backward": "PPPPPq",
    "dropout_forward": "PPPPqif",
    "cast_scale": "PPPPqf",
}
Cache = dict[Hashable, Function]
_gelu_calls: Cache = {}
_gelu_dropout_calls: dict[Hashable, tuple[Function, int]] = {}
_gelu_backward_calls: Cache = {}
_silu_calls: Cache = {}
_silu_backward_calls: Cache = {}


forget_on_change(_gelu_dropout_calls.clear)


def elementwise_spec(maker: str, **options: str | int | bool) -> KernelSpec:
    """Return the specification of an elementwise kernel variant."""
    return KernelSpec(
        module="elementwise",
        maker=maker,
        options=options,
        arguments=_ARGUMENTS[maker],
        # Converting half to float32 reads 8 bytes a thread.
        vector=bool(options["vector"]) and (maker != "cast_scale" or options["x"] == "f32"),
    )


# Vectors that one thread makes; several share the keys of the random rounds. "min": blocks that must fit on a
# multiprocessor: the rounds are one long chain, so many warps beside each other count.
GELU_DROPOUT_WAYS = ("2 min 6", "2", "1", "1 min 8", "4 min 4")


def gelu_dropout_spec(x: str, *, vector: bool, way: str) -> KernelSpec:
    """Return the specification of GELU followed by dropout; `way` is one of `GELU_DROPOUT_WAYS`."""
    each, _, limit = way.partition(" min ")
    spec = elementwise_spec("gelu_dropout_forward", x=x, y=x, vector=vector, each=int(each))
    return replace(spec, min_blocks=int(limit)) if limit and x == "bf16" else spec


def unsupported(*dtypes: torch.dtype) -> str | None:
    """Return the first type no kernel takes, as a reason, or None."""
    for dtype in dtypes:
        if dtype not in CODES:
            return f"dtype {dtype}"
    return None


def _gelu_call(key: tuple[int, torch.dtype, int]) -> Function | None:
    device, dtype, misaligned = key
    reason = unsupported(dtype)
    if reason:
        fell_back("gelu_tanh", reason)
        return None
    code = CODES[dtype]
    spec = elementwise_spec("gelu_forward", x=code, y=code, vector=not misaligned)
    return resolve("gelu_tanh", _gelu_calls, key, spec, device)


def _gelu_dropout_call(key: tuple[int, torch.dtype, int]) -> tuple[Function, int] | None:
    """Return the kernel, and how many vectors one of its threads makes."""
    found = _gelu_dropout_calls.get(key)
    if found is not None:
        return found
    device, dtype, misaligned = key
    reason = unsupported(dtype)
    if reason:
        fell_back("gelu_tanh", reason)
        return None
    ways = in_turn("gelu_dropout", GELU_DROPOUT_WAYS) if not misaligned else ("1",)
    specs = [gelu_dropout_spec(CODES[dtype], vector=not misaligned, way=way) for way in ways]
    loaded = load_first("gelu_tanh", specs, device)
    if loaded is None:
        return None
    found = _gelu_dropout_calls[key] = loaded[0], int(specs[loaded[1]].options["each"])
    return found


def _gelu_cuda(x: Tensor, p: float, key: Tensor | None) -> Tensor:
    if not x.is_contiguous():
        x = x.contiguous()
    if key is not None:
        return _gelu_dropout_cuda(x, p, key)
    at = x.data_ptr()
    spot = (x.get_device(), x.dtype, at & 15)
    call = _gelu_calls.get(spot) or _gelu_call(spot)
    if call is None:
        return reference.gelu_tanh(x, p, key)
    y = torch.empty_like(x)
    count = x.numel()
    if count:
        call.run(vector_blocks(count, at & 15), 1, (at, y.data_ptr(), count))
    return y


def _gelu_dropout_cuda(x: Tensor, p: float, key: Tensor) -> Tensor:
    at = x.data_ptr()
    found = _gelu_dropout_call((x.get_device(), x.dtype, at & 15))
    if found is None or reference.drops_all(p):
        return reference.gelu_tanh(x, p, key)
    call, each = found
    y = torch.empty_like(x)
    count = x.numel()
    if count:
        blocks = -(-vector_blocks(count, at & 15) // each)
        limit, share = reference.threshold_of(p), 1.0 / reference.keep_scale(p)
        call.run(blocks, 1, (at, y.data_ptr(), key.data_ptr(), count, limit, share))
    return y


def _gelu_backward_call(key: tuple[int, torch.dtype, torch.dtype, bool, int]) -> Function | None:
    device, x, g, undropped, misaligned = key
    reason = unsupported(x, g)
    if reason:
        fell_back("gelu_tanh_backward", reason)
        return None
    spec = elementwise_spec(
        "gelu_backward", x=CODES[x], g=CODES[g], vector=not misaligned, dropout=not undropped
    )
    return resolve("gelu_tanh_backward", _gelu_backward_calls, key, spec, device)


def _gelu_backward_cuda(grad: Tensor, x: Tensor, p: float, key: Tensor | None) -> Tensor:
    grad, x = grad.contiguous(), x.contiguous()
    at, slope = x.data_ptr(), grad.data_ptr()
    odd = (at | slope) & 15
    spot = (x.get_device(), x.dtype, grad.dtype, key is None, odd)
    call = _gelu_backward_calls.get(spot) or _gelu_backward_call(spot)
    if call is None or reference.drops_all(p):
        return reference.gelu_tanh_backward(grad, x, p, key)
    dx = torch.empty_like(x)
    count = x.numel()
    if count:
        limit, scale = (0, 1.0) if key is None else (reference.threshold_of(p), reference.keep_scale(p))
        bits = 0 if key is None else key.data_ptr()
        call.run(vector_blocks(count, odd), 1, (at, slope, dx.data_ptr(), bits, count, limit, scale))
    return dx


def contiguous_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty contiguous tensor of the shape of x: what every operator returns."""
    return torch.empty_like(x, dtype=dtype or x.dtype, memory_format=torch.contiguous_format)


_GELU = define(
    "gelu_tanh(Tensor x, float p, Tensor? key) -> Tensor",
    cpu=reference.gelu_tanh,
    cuda=_gelu_cuda,
    fake=lambda x, p, key: contiguous_like(x),
)
define(
    "gelu_tanh_backward(Tensor grad, Tensor x, float p, Tensor? key) -> Tensor",
    cpu=reference.gelu_tanh_backward,
    cuda=_gelu_backward_cuda,
    fake=lambda grad, x, p, key: contiguous_like(x),
)


def _gelu_setup(ctx: Context, inputs: tuple, output: Tensor) -> None:
    x, p, key = inputs
    ctx.save_for_backward(x, key)
    ctx.p = p


def _gelu_grad(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
    x, key = ctx.saved_tensors
    if plain(grad, x):
        return _gelu_backward_cuda(grad, x, ctx.p, key), None, None
    return torch.ops.loongforge.gelu_tanh_backward(grad, x, ctx.p, key), None, None


_gelu_fast = differentiable(_GELU, cuda=_gelu_cuda, setup_context=_gelu_setup, backward=_gelu_grad)


def gelu_tanh(x: Tensor, *, p: float = 0.0, key: Tensor | None = None) -> Tensor:
    """GELU in its tanh form, followed by dropout when `p` > 0, in one pass.

    Args:
        x: any shape; bf16, f16 or f32 on a GPU (float64 too, as plain torch operators).
        p: probability to drop an element, 0 to 1, rounded to a multiple of 2^-16.
        key: int64 tensor (seed, offset) from :func:`philox_next`; needed when p > 0.

    Returns:
        A contiguous tensor of the shape and type of x.

    Raises:
        ValueError: p is out of range, or p > 0 without a key.
    """
    key = None if p == 0.0 else checked_key("gelu_tanh", p, key)
    if plain(x):
        return _gelu_fast(x, p, key) if wants_grad(x) else _gelu_cuda(x, p, key)
    return torch.ops.loongforge.gelu_tanh(x, p, key)


def checked_key(name: str, p: float, key: Tensor | None) -> Tensor | None:
    """Return the key to use: None when nothing is dropped.

    Raises:
        ValueError: p is out of range, or p > 0 without a key.
    """
    if not 0.0 <= p <= 1.0:
        message = f"{name}: p must be between 0 and 1, got {p}"
        raise ValueError(message)
    if p == 0.0:
        return None
    if key is None:
        message = f"{name}: p = {p} needs a key; draw one with philox_next(counter)"
        raise ValueError(message)
    return key


def _silu_call(key: tuple[int, torch.dtype, torch.dtype, int]) -> Function | None:
    device, gate, up, misaligned = key
    reason = unsupported(gate) or (f"dtypes {gate}, {up}" if gate != up else None)
    if reason:
        fell_back("silu_mul", reason)
        return None
    spec = elementwise_spec("silu_mul_forward", x=CODES[gate], vector=not misaligned)
    return resolve("silu_mul", _silu_calls, key, spec, device)


def _silu_mul_cuda(gate: Tensor, up: Tensor) -> Tensor:
    if not (gate.is_contiguous() and up.is_contiguous()):
        gate, up = gate.contiguous(), up.contiguous()
    a, b = gate.data_ptr(), up.data_ptr()
    odd = (a | b) & 15
    spot = (gate.get_device(), gate.dtype, up.dtype, odd)
    call = _silu_calls.get(spot) or _silu_call(spot)
    if call is None:
        return reference.silu_mul(gate, up)
    y = torch.empty_like(gate)
    count = gate.numel()
    if count:
        call.run(vector_blocks(count, odd), 1, (a, b, y.data_ptr(), count))
    return y


def _silu_backward_call(key: tuple[int, torch.dtype, torch.dtype, torch.dtype, int]) -> Function | None:
    device, grad, gate, up, misaligned = key
    reason = unsupported(gate) or (None if gate == up == grad else f"dtypes {grad}, {gate}, {up}")
    if reason:
        fell_back("silu_mul_backward", reason)
        return None
    spec = elementwise_spec("silu_mul_backward", x=CODES[gate], vector=not misaligned)
    return resolve("silu_mul_backward", _silu_backward_calls, key, spec, device)


def _silu_mul_backward_cuda(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    a, b, d = gate.data_ptr(), up.data_ptr(), grad.data_ptr()
    odd = (a | b | d) & 15
    spot = (gate.get_device(), grad.dtype, gate.dtype, up.dtype, odd)
    call = _silu_backward_calls.get(spot) or _silu_backward_call(spot)
    if call is None:
        return reference.silu_mul_backward(grad, gate, up)
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    count = gate.numel()
    if count:
        call.run(vector_blocks(count, odd), 1, (a, b, d, dgate.data_ptr(), dup.data_ptr(), count))
    return dgate, dup


_SILU_MUL = define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    cpu=reference.silu_mul,
    cuda=_silu_mul_cuda,
    fake=lambda gate, up: contiguous_like(gate),
)
define(
    "silu_mul_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    cpu=reference.silu_mul_backward,
    cuda=_silu_mul_backward_cuda,
    fake=lambda grad, gate, up: (contiguous_like(gate), contiguous_like(up)),
)


def _silu_mul_setup(ctx: Context, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _silu_mul_grad(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    if plain(grad, gate, up):
        return _silu_mul_backward_cuda(grad, gate, up)
    return torch.ops.loongforge.silu_mul_backward(grad, gate, up)


_silu_mul_fast = differentiable(
    _SILU_MUL, cuda=_silu_mul_cuda, setup_context=_silu_mul_setup, backward=_silu_mul_grad
)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in one pass, for two tensors of one shape and type.

    Raises:
        ValueError: the shapes differ.
    """
    if gate.shape != up.shape:
        message = f"silu_mul: shapes must be equal, got {tuple(gate.shape)} and {tuple(up.shape)}"
        raise ValueError(message)
    if plain(gate, up):
        return _silu_mul_fast(gate, up) if wants_grad(gate, up) else _silu_mul_cuda(gate, up)
    return torch.ops.loongforge.silu_mul(gate, up)
