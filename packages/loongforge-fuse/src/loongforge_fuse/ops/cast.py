"""Cast with scale and a count of what is not finite, in one pass."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import (
    CODES,
    Context,
    define,
    differentiable,
    fell_back,
    plain,
    resolve,
    vector_blocks,
    wants_grad,
)
from loongforge_fuse.ops.elementwise import contiguous_like, elementwise_spec, unsupported

_cast_calls: dict[Hashable, Function] = {}


def _cast_call(key: tuple[int, torch.dtype, torch.dtype, torch.dtype | None, int]) -> Function | None:
    device, source, target, scale, misaligned = key
    reason = unsupported(source, target)
    if reason is None and scale not in (None, torch.float32):
        reason = f"scale of dtype {scale}"
    if reason:
        fell_back("cast_scale", reason)
        return None
    spec = elementwise_spec(
        "cast_scale",
        x=CODES[source],
        y=CODES[target],
        vector=not misaligned,
        count_bad=True,
        device_scale=scale is not None,
    )
    return resolve("cast_scale", _cast_calls, key, spec, device)


def _cast_scale_cuda(
    x: Tensor, dtype: torch.dtype, factor: float, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    at = x.data_ptr()
    odd = at & 15
    spot = (x.get_device(), x.dtype, dtype, None if scale is None else scale.dtype, odd)
    call = _cast_calls.get(spot) or _cast_call(spot)
    if call is None:
        return reference.cast_scale(x, dtype, factor, scale)
    y = torch.empty_like(x, dtype=dtype)
    bad = torch.zeros(1, dtype=torch.int32, device=x.device)
    count = x.numel()
    if count:
        if odd or dtype != torch.float32:
            blocks = vector_blocks(count, odd)
        else:  # float32 is written four elements a thread
            blocks = ((count >> 2) + (count & 3) + 255) >> 8
        where = 0 if scale is None else scale.data_ptr()
        call.run(blocks, 1, (at, y.data_ptr(), where, bad.data_ptr(), count, factor))
    return y, bad


_CAST_SCALE = define(
    "cast_scale(Tensor x, ScalarType dtype, float factor, Tensor? scale) -> (Tensor, Tensor)",
    cpu=reference.cast_scale,
    cuda=_cast_scale_cuda,
    fake=lambda x, dtype, factor, scale: (contiguous_like(x, dtype), x.new_empty(1, dtype=torch.int32)),
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
