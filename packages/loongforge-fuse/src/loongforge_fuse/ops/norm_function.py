"""The derivative of the norm for the eager fast path: fewer steps than through the dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor

from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import Context
from loongforge_fuse.ops.norm_launch import groups_of, run_norm, run_norm_backward

Settings = tuple[bool, bool, float, torch.dtype]  # layer, modulate, eps, dtype


class NormFunction(torch.autograd.Function):
    """Forward kernel and its backward, without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        residual: Tensor | None,
        gain: Tensor | None,
        offset: Tensor | None,
        settings: Settings,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the kernel, or the reference when no kernel fits; keep what backward needs."""
        layer, modulate, eps, dtype = settings
        done = run_norm(x, residual, gain, offset, layer, modulate, eps, dtype)
        groups = groups_of(offset if gain is None else gain)
        if done is None:
            y, total, mean, rstd = norm_reference(x, residual, gain, offset, groups, settings)
        else:
            y, total, mean, rstd = done
        ctx.save_for_backward(x if total is None else total, gain, mean, rstd)
        ctx.settings = layer, modulate, groups
        ctx.kinds = tuple(None if t is None else t.dtype for t in (residual, gain, offset))
        ctx.shapes = tuple(None if t is None else t.shape for t in (gain, offset))
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor | None, carry: Tensor | None) -> tuple:
        """Return the gradients of x, residual, gain and offset."""
        total, gain, mean, rstd = ctx.saved_tensors
        layer, modulate, groups = ctx.settings
        residual, gain_kind, offset_kind = ctx.kinds
        if grad is None:  # only the residual sum was used
            return carry, None if residual is None or carry is None else carry.to(residual), None, None, None
        needs = ctx.needs_input_grad
        columns = needs[2] or needs[3]
        offset = columns and offset_kind is not None
        group_rows = total.numel() // max(1, total.shape[-1] * groups)
        dx, dgain, doffset = run_norm_backward(
            grad, carry, total, gain, mean, rstd, layer, modulate, group_rows, columns, offset, groups
        )
        return (
            dx,
            None if residual is None or not needs[1] else dx.to(residual),
            None if dgain is None or not needs[2] else dgain.to(gain_kind).view(ctx.shapes[0]),
            None if doffset is None or not needs[3] else doffset.to(offset_kind).view(ctx.shapes[1]),
            None,
        )


def norm_reference(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    offset: Tensor | None,
    groups: int,
    settings: Settings,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Run the plain torch form on tensors of any leading shape: y, total or None, mean and rstd."""
    layer, modulate, eps, dtype = settings
    width = x.shape[-1]
    tables = [None if t is None else t.reshape(-1, width) for t in (gain, offset)]
    rows = x.reshape(-1, width)
    added = None if residual is None else residual.reshape(-1, width)
    y, total, mean, rstd = reference.norm(
        rows, added, tables[0], tables[1], layer, modulate, max(1, rows.shape[0] // groups), eps, dtype
    )
    return y.view(x.shape), None if residual is None else total.view(x.shape), mean, rstd
