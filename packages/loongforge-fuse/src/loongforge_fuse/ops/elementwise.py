"""Elementwise operators: GELU (tanh) with dropout, gated SiLU, dropout with residual, cast with scale."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.kernels.launcher import KernelUnavailableError
from loongforge_fuse.kernels.specs import KernelSpec
from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import (
    CODES,
    Context,
    aligned,
    define,
    differentiable,
    fell_back,
    kernel,
    launch,
    plain,
    vector_grid,
    wants_grad,
)

_ARGUMENTS = {
    "gelu_forward": "PPPqif",
    "gelu_backward": "PPPPqif",
    "silu_mul_forward": "PPPq",
    "silu_mul_backward": "PPPPPq",
    "dropout_forward": "PPPPqif",
    "cast_scale": "PPPPqf",
}


def elementwise_spec(maker: str, **options: str | int | bool) -> KernelSpec:
    """Return the specification of an elementwise kernel variant."""
    return KernelSpec(
        module="elementwise",
        maker=maker,
        options=options,
        arguments=_ARGUMENTS[maker],
        vector=bool(options["vector"]),
    )


@cache
def _function(device: int, maker: str, *options: tuple[str, str | int | bool]) -> Function:
    return kernel(elementwise_spec(maker, **dict(options)), device)


def _refusal(*tensors: Tensor | None) -> str | None:
    """Return why the kernels cannot take these tensors, or None."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in CODES:
            return f"dtype {tensor.dtype}"
    return None


def _gelu_cuda(x: Tensor, p: float, key: Tensor | None) -> Tensor:
    if reason := _refusal(x):
        fell_back("gelu_tanh", reason)
        return reference.gelu_tanh(x, p, key)
    x = x.contiguous()
    y = torch.empty_like(x)
    count = x.numel()
    if count:
        vector = aligned(x)
        code, device = CODES[x.dtype], x.get_device()
        try:
            call = _function(
                device,
                "gelu_forward",
                ("x", code),
                ("y", code),
                ("vector", vector),
                ("dropout", key is not None),
            )
        except KernelUnavailableError as error:
            fell_back("gelu_tanh", str(error))
            return reference.gelu_tanh(x, p, key)
        bits = 0 if key is None else key.data_ptr()
        grid = vector_grid(count, vector)
        at = (x.data_ptr(), y.data_ptr(), bits, count)
        if key is None:
            launch("gelu_tanh", call, device, grid, *at, 0, 1.0)
        else:
            launch("gelu_tanh", call, device, grid, *at, reference.threshold_of(p), reference.keep_scale(p))
    return y


def _gelu_backward_cuda(grad: Tensor, x: Tensor, p: float, key: Tensor | None) -> Tensor:
    if reason := _refusal(grad, x):
        fell_back("gelu_tanh_backward", reason)
        return reference.gelu_tanh_backward(grad, x, p, key)
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    count = x.numel()
    if count:
        vector, device = aligned(x, grad), x.get_device()
        try:
            call = _function(
                device,
                "gelu_backward",
                ("x", CODES[x.dtype]),
                ("g", CODES[grad.dtype]),
                ("vector", vector),
                ("dropout", key is not None),
            )
        except KernelUnavailableError as error:
            fell_back("gelu_tanh_backward", str(error))
            return reference.gelu_tanh_backward(grad, x, p, key)
        bits = 0 if key is None else key.data_ptr()
        chance = (0, 1.0) if key is None else (reference.threshold_of(p), reference.keep_scale(p))
        pointers = (x.data_ptr(), grad.data_ptr(), dx.data_ptr(), bits)
        launch("gelu_tanh_backward", call, device, vector_grid(count, vector), *pointers, count, *chance)
    return dx


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype or x.dtype, memory_format=torch.contiguous_format)


_GELU = define(
    "gelu_tanh(Tensor x, float p, Tensor? key) -> Tensor",
    cpu=reference.gelu_tanh,
    cuda=_gelu_cuda,
    fake=lambda x, p, key: _like(x),
)
define(
    "gelu_tanh_backward(Tensor grad, Tensor x, float p, Tensor? key) -> Tensor",
    cpu=reference.gelu_tanh_backward,
    cuda=_gelu_backward_cuda,
    fake=lambda grad, x, p, key: _like(x),
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
    key = _checked_key("gelu_tanh", p, key)
    if plain(x):
        return _gelu_fast(x, p, key) if wants_grad(x) else _gelu_cuda(x, p, key)
    return torch.ops.loongforge.gelu_tanh(x, p, key)


def _checked_key(name: str, p: float, key: Tensor | None) -> Tensor | None:
    """Return the key to use: None when nothing is dropped."""
    if not 0.0 <= p <= 1.0:
        message = f"{name}: p must be between 0 and 1, got {p}"
        raise ValueError(message)
    if p == 0.0:
        return None
    if key is None:
        message = f"{name}: p = {p} needs a key; draw one with philox_next(counter)"
        raise ValueError(message)
    return key


def _silu_mul_cuda(gate: Tensor, up: Tensor) -> Tensor:
    reason = _refusal(gate, up) or (f"dtypes {gate.dtype}, {up.dtype}" if gate.dtype != up.dtype else None)
    if reason:
        fell_back("silu_mul", reason)
        return reference.silu_mul(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    count = gate.numel()
    if count:
        vector, device = aligned(gate, up), gate.get_device()
        try:
            call = _function(device, "silu_mul_forward", ("x", CODES[gate.dtype]), ("vector", vector))
        except KernelUnavailableError as error:
            fell_back("silu_mul", str(error))
            return reference.silu_mul(gate, up)
        pointers = (gate.data_ptr(), up.data_ptr(), y.data_ptr())
        launch("silu_mul", call, device, vector_grid(count, vector), *pointers, count)
    return y


def _silu_mul_backward_cuda(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    same = gate.dtype == up.dtype == grad.dtype
    reason = _refusal(gate) or (None if same else f"dtypes {grad.dtype}, {gate.dtype}, {up.dtype}")
    if reason:
        fell_back("silu_mul_backward", reason)
        return reference.silu_mul_backward(grad, gate, up)
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    count = gate.numel()
    if count:
        vector, device = aligned(gate, up, grad), gate.get_device()
        try:
            call = _function(device, "silu_mul_backward", ("x", CODES[gate.dtype]), ("vector", vector))
        except KernelUnavailableError as error:
            fell_back("silu_mul_backward", str(error))
            return reference.silu_mul_backward(grad, gate, up)
        pointers = (gate.data_ptr(), up.data_ptr(), grad.data_ptr(), dgate.data_ptr(), dup.data_ptr())
        launch("silu_mul_backward", call, device, vector_grid(count, vector), *pointers, count)
    return dgate, dup


_SILU_MUL = define(
    "silu_mul(Tensor gate, Tensor up) -> Tensor",
    cpu=reference.silu_mul,
    cuda=_silu_mul_cuda,
    fake=lambda gate, up: _like(gate),
)
define(
    "silu_mul_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    cpu=reference.silu_mul_backward,
    cuda=_silu_mul_backward_cuda,
    fake=lambda grad, gate, up: (_like(gate), _like(up)),
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


def _cast_scale_cuda(
    x: Tensor, dtype: torch.dtype, factor: float, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    reason = _refusal(x) or (None if dtype in CODES else f"dtype {dtype}")
    if reason is None and scale is not None and scale.dtype != torch.float32:
        reason = f"scale of dtype {scale.dtype}"
    if reason:
        fell_back("cast_scale", reason)
        return reference.cast_scale(x, dtype, factor, scale)
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    bad = torch.zeros(1, dtype=torch.int32, device=x.device)
    count = x.numel()
    if count:
        vector, device = aligned(x), x.get_device()
        try:
            call = _function(
                device,
                "cast_scale",
                ("x", CODES[x.dtype]),
                ("y", CODES[dtype]),
                ("vector", vector),
                ("count_bad", True),
                ("device_scale", scale is not None),
            )
        except KernelUnavailableError as error:
            fell_back("cast_scale", str(error))
            return reference.cast_scale(x, dtype, factor, scale)
        factor_at = 0 if scale is None else scale.data_ptr()
        pointers = (x.data_ptr(), y.data_ptr(), factor_at, bad.data_ptr())
        launch("cast_scale", call, device, vector_grid(count, vector), *pointers, count, factor)
    return y, bad


_CAST_SCALE = define(
    "cast_scale(Tensor x, ScalarType dtype, float factor, Tensor? scale) -> (Tensor, Tensor)",
    cpu=reference.cast_scale,
    cuda=_cast_scale_cuda,
    fake=lambda x, dtype, factor, scale: (_like(x, dtype), x.new_empty(1, dtype=torch.int32)),
)


def _cast_scale_setup(ctx: Context, inputs: tuple, output: tuple) -> None:
    x, _, factor, scale = inputs
    ctx.save_for_backward(scale)
    ctx.factor, ctx.dtype = factor, x.dtype
    ctx.mark_non_differentiable(output[1])


def _cast_scale_grad(ctx: Context, grad: Tensor, _: Tensor) -> tuple:
    (scale,) = ctx.saved_tensors
    dx, _ = torch.ops.loongforge.cast_scale(grad, ctx.dtype, ctx.factor, scale)
    return dx, None, None, None


_cast_scale_fast = differentiable(
    _CAST_SCALE, cuda=_cast_scale_cuda, setup_context=_cast_scale_setup, backward=_cast_scale_grad
)


def cast_scale(
    x: Tensor, dtype: torch.dtype, *, factor: float = 1.0, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Multiply, convert and check in one pass: y = (x * factor * scale) in `dtype`.

    Args:
        x: any shape.
        dtype: torch.bfloat16, torch.float16 or torch.float32.
        factor: factor known on the host; frozen into a CUDA graph.
        scale: float32 tensor of one element on the device of x, read when the kernel runs.

    Returns:
        The converted tensor, and the number of its elements that are infinite or NaN as an int32 tensor of
        shape (1,), on the same device, so that no synchronisation is needed.
    """
    if plain(x, scale):
        if wants_grad(x):
            return _cast_scale_fast(x, dtype, factor, scale)
        return _cast_scale_cuda(x, dtype, factor, scale)
    return torch.ops.loongforge.cast_scale(x, dtype, factor, scale)
