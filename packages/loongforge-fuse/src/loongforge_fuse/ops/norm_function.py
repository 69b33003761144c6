"""The derivative of the norm for the eager fast path: fewer steps than through the dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor

from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import Context, direct_apply
from loongforge_fuse.ops.norm_launch import groups_of, run_norm, run_norm_backward

Settings = tuple[bool, bool, float, torch.dtype]  # layer, modulate, eps, dtype
_NOTHING = (None, None, None)


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
        # One attribute: each costs as much as a look into five tables.
        ctx.form = (
            layer,
            modulate,
            groups,
            None if residual is None else residual.dtype,
            None if gain is None else (gain.dtype, gain.shape),
            None if offset is None else (offset.dtype, offset.shape),
        )
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor | None, carry: Tensor | None) -> tuple:
        """Return the gradients of x, residual, gain and offset."""
        total, gain, mean, rstd = ctx.saved_tensors
        layer, modulate, groups, residual, gain_form, offset_form = ctx.form
        if grad is None:  # only the residual sum was used
            return carry, None if residual is None or carry is None else carry.to(residual), *_NOTHING
        needs = ctx.needs_input_grad
        columns = needs[2] or needs[3]
        offset = columns and offset_form is not None
        group_rows = total.numel() // max(1, total.shape[-1] * groups)
        dx, sums = run_norm_backward(
            grad, carry, total, gain, mean, rstd, layer, modulate, group_rows, columns, offset, groups
        )
        back = None if residual is None or not needs[1] else dx.to(residual)
        if sums is None:
            return dx, back, *_NOTHING
        dgain = doffset = None
        if needs[2] and gain_form is not None:
            dgain = sums[:, 0].to(gain_form[0]).view(gain_form[1])
        if needs[3] and offset_form is not None:
            doffset = sums[:, 1].to(offset_form[0]).view(offset_form[1])
        return dx, back, dgain, doffset, None


class TableNormFunction(torch.autograd.Function):
    """Like :class:`NormFunction`, modulated by one table of scale and shift side by side.

    The table's gradient leaves the kernel as one tensor: nothing is split in the forward pass, and nothing
    joined in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, residual: Tensor | None, table: Tensor, settings: Settings
    ) -> tuple[Tensor, Tensor | None]:
        """Run the kernel, or the reference when no kernel fits; keep what backward needs."""
        layer, modulate, eps, dtype = settings
        width = x.shape[-1]
        gain, offset = table[:, :width], table[:, width:]
        done = run_norm(x, residual, gain, offset, layer, modulate, eps, dtype)
        if done is None:
            y, total, mean, rstd = norm_reference(x, residual, gain, offset, table.shape[0], settings)
        else:
            y, total, mean, rstd = done
        ctx.save_for_backward(x if total is None else total, table, mean, rstd)
        ctx.form = layer, modulate, None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor | None, carry: Tensor | None) -> tuple:
        """Return the gradients of x, residual and table."""
        total, table, mean, rstd = ctx.saved_tensors
        layer, modulate, residual = ctx.form
        if grad is None:
            return carry, None if residual is None or carry is None else carry.to(residual), None, None
        needs, width, groups = ctx.needs_input_grad, total.shape[-1], table.shape[0]
        columns = needs[2]
        dx, sums = run_norm_backward(
            grad,
            carry,
            total,
            table[:, :width],
            mean,
            rstd,
            layer,
            modulate,
            total.numel() // max(1, width * groups),
            columns,
            columns,
            groups,
        )
        back = None if residual is None or not needs[1] else dx.to(residual)
        return dx, back, None if sums is None else sums.to(table.dtype).view(table.shape), None


apply_norm, apply_table_norm = direct_apply(NormFunction), direct_apply(TableNormFunction)


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
