"""The norm operator of torch: schema, CUDA implementation, shapes and derivative."""

from __future__ import annotations

import torch
from torch import Tensor

from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import Context, define, plain, register_derivative
from loongforge_fuse.ops.norm_launch import run_norm, run_norm_backward


def norm_cuda(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    offset: Tensor | None,
    layer: bool,  # noqa: FBT001 - the schema's order
    modulate: bool,  # noqa: FBT001
    group_rows: int,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the operator ``loongforge::norm`` on CUDA rows; see :func:`reference.norm` for the meaning."""
    x = x.contiguous()
    added = None if residual is None else residual.contiguous()
    done = run_norm(x, added, gain, offset, layer, modulate, eps, dtype)
    if done is None:
        return reference.norm(x, residual, gain, offset, layer, modulate, group_rows, eps, dtype)
    y, total, mean, rstd = done
    return y, x.new_empty(0) if total is None else total, mean if layer else mean.clone(), rstd


def norm_backward_cuda(
    grad: Tensor,
    carry: Tensor | None,
    total: Tensor,
    gain: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    layer: bool,  # noqa: FBT001 - the schema's order
    modulate: bool,  # noqa: FBT001
    group_rows: int,
    columns: bool,  # noqa: FBT001
    offset: bool,  # noqa: FBT001
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Run ``loongforge::norm_backward`` on CUDA rows; see :func:`reference.norm_backward`."""
    dx, sums = run_norm_backward(
        grad, carry, total, gain, mean, rstd, layer, modulate, group_rows, columns, offset, groups,
        torch.float32,
    )  # fmt: skip
    return dx, total.new_empty(0, dtype=torch.float32) if sums is None else sums


def _fake_norm(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    offset: Tensor | None,
    layer: bool,  # noqa: FBT001
    modulate: bool,  # noqa: FBT001
    group_rows: int,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    statistics = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(0 if residual is None else x.shape),
        x.new_empty(x.shape[0] if layer else 0, dtype=statistics),
        x.new_empty(x.shape[0], dtype=statistics),
    )


def _fake_backward(
    grad: Tensor,
    carry: Tensor | None,
    total: Tensor,
    gain: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    layer: bool,  # noqa: FBT001
    modulate: bool,  # noqa: FBT001
    group_rows: int,
    columns: bool,  # noqa: FBT001
    offset: bool,  # noqa: FBT001
    groups: int,
) -> tuple[Tensor, Tensor]:
    sums = torch.float64 if total.dtype == torch.float64 else torch.float32
    shape = (groups, 2 if offset else 1, total.shape[-1])
    return total.new_empty(total.shape), total.new_empty(shape if columns else 0, dtype=sums)


_NORM = define(
    "norm(Tensor x, Tensor? residual, Tensor? gain, Tensor? offset, bool layer, bool modulate,"
    " int group_rows, float eps, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=reference.norm,
    cuda=norm_cuda,
    fake=_fake_norm,
)
define(
    "norm_backward(Tensor grad, Tensor? carry, Tensor total, Tensor? gain, Tensor mean, Tensor rstd, bool"
    " layer, bool modulate, int group_rows, bool columns, bool offset, int groups)"
    " -> (Tensor, Tensor)",
    cpu=reference.norm_backward,
    cuda=norm_backward_cuda,
    fake=_fake_backward,
)


def _setup(ctx: Context, inputs: tuple, output: tuple) -> None:
    x, residual, gain, offset, layer, modulate, group_rows, _, _ = inputs
    _, total, mean, rstd = output
    ctx.save_for_backward(x if residual is None else total, gain, mean, rstd)
    ctx.layer, ctx.modulate, ctx.group_rows = layer, modulate, group_rows
    ctx.residual = None if residual is None else residual.dtype
    ctx.groups = 1 if gain is None and offset is None else (gain if gain is not None else offset).shape[0]
    ctx.gain = None if gain is None else gain.dtype
    ctx.offset = None if offset is None else offset.dtype
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _grad(ctx: Context, grad: Tensor | None, carry: Tensor | None, *_: Tensor | None) -> tuple:
    total, gain, mean, rstd = ctx.saved_tensors
    if ctx.residual is None or (carry is not None and carry.numel() == 0):
        carry = None
    if grad is None:  # only the residual sum was used
        back = None if ctx.residual is None or carry is None else carry.to(ctx.residual)
        return carry, back, *([None] * 7)
    columns = any(ctx.needs_input_grad[2:4])
    arguments = (grad, carry, total, gain, mean, rstd, ctx.layer, ctx.modulate, ctx.group_rows)
    counts = (columns, ctx.offset is not None and columns, ctx.groups)
    if plain(grad, total):
        dx, sums = norm_backward_cuda(*arguments, *counts)
    else:
        dx, sums = torch.ops.loongforge.norm_backward(*arguments, *counts)
    return (
        dx,
        None if ctx.residual is None else dx.to(ctx.residual),
        sums[:, 0].to(ctx.gain) if ctx.needs_input_grad[2] and ctx.gain is not None else None,
        sums[:, 1].to(ctx.offset) if ctx.needs_input_grad[3] and ctx.offset is not None else None,
        *([None] * 5),
    )


register_derivative(_NORM, setup_context=_setup, backward=_grad)
