"""LayerNorm and RMSNorm with residual add, affine weights or per-batch-item modulation, one pass each."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

import loongforge_fuse.ops.norm  # noqa: F401 - registers the operator
from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import plain, wants_grad
from loongforge_fuse.ops.norm_function import apply_norm, apply_table_norm, norm_reference
from loongforge_fuse.ops.norm_launch import run_norm


def _run(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    offset: Tensor | None,
    settings: tuple[bool, bool, float, torch.dtype],
) -> Tensor | tuple[Tensor, Tensor]:
    if plain(x, residual, gain, offset):
        if not x.is_contiguous():
            x = x.contiguous()
        if residual is not None and not residual.is_contiguous():
            residual = residual.contiguous()
        if wants_grad(x, residual, gain, offset):
            y, total = apply_norm(x, residual, gain, offset, settings)
        else:
            done = run_norm(x, residual, gain, offset, *settings, False)
            if done is None:
                groups = 1 if gain is None and offset is None else _rows_of(gain, offset)
                y, total, _, _ = norm_reference(x, residual, gain, offset, groups, settings)
            else:
                y, total, _, _ = done
        return y if total is None else (y, total)
    return _dispatched(x, residual, gain, offset, settings)


def _rows_of(gain: Tensor | None, offset: Tensor | None) -> int:
    table = offset if gain is None else gain
    return 1 if table is None or table.dim() == 1 else table.shape[0]


def _dispatched(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    offset: Tensor | None,
    settings: tuple[bool, bool, float, torch.dtype],
) -> Tensor | tuple[Tensor, Tensor]:
    """Go through torch's dispatcher, with rows and tables as matrices."""
    layer, modulate, eps, dtype = settings
    shape, width = x.shape, x.shape[-1]
    rows = x.reshape(-1, width)
    added = None if residual is None else residual.reshape(-1, width)
    wide_gain = gain.unsqueeze(0) if gain is not None and gain.dim() == 1 else gain
    wide_offset = offset.unsqueeze(0) if offset is not None and offset.dim() == 1 else offset
    group_rows = max(1, rows.shape[0] // _rows_of(gain, offset))
    y, total, _, _ = torch.ops.loongforge.norm(
        rows, added, wide_gain, wide_offset, layer, modulate, group_rows, eps, dtype
    )
    return y.view(shape) if residual is None else (y.view(shape), total.view(shape))


def _table(name: str, what: str, value: Tensor, x: Tensor) -> Tensor:
    """Check a weight (D,) or a modulation (B, D) or (B, 1, D), and return it with one or two dimensions."""
    width = x.shape[-1]
    if value.dim() == 1 and value.shape[0] == width:
        return value
    if value.dim() == 3 and value.shape[1] == 1:
        value = value.squeeze(1)
    if value.dim() == 2 and value.shape == (x.shape[0], width):
        return value
    message = (
        f"{name}: {what} must have shape ({width},), or (B, {width}) or (B, 1, {width}) with"
        f" B = {x.shape[0]}, got {tuple(value.shape)}"
    )
    raise ValueError(message)


def _check_shapes(name: str, x: Tensor, residual: Tensor | None) -> None:
    if x.dim() < 2:
        message = f"{name}: x must have at least 2 dimensions, got shape {tuple(x.shape)}"
        raise ValueError(message)
    if residual is not None and residual.shape != x.shape:
        message = f"{name}: residual must have the shape of x {tuple(x.shape)}, got {tuple(residual.shape)}"
        raise ValueError(message)


@overload
def layer_norm_modulate(
    x: Tensor,
    *,
    residual: None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    table: Tensor | None = None,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor: ...


@overload
def layer_norm_modulate(
    x: Tensor,
    *,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    table: Tensor | None = None,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...


def layer_norm_modulate(
    x: Tensor,
    *,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    table: Tensor | None = None,
    eps: float = 1e-5,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """(LayerNorm(x + residual) * weight + bias) * (1 + scale) + shift in one pass.

    Args:
        x: (B, ..., D).
        residual: added to x first, in the type of x; then the sum is returned as well.
        weight: (D,), as in LayerNorm.
        bias: (D,).
        scale: (B, D) or (B, 1, D), one row for each batch item (views of a wider projection are fine).
        shift: like `scale`.
        table: (B, 2 D) or (B, 1, 2 D), scale and shift side by side, as one projection gives them, in place
            of all four others. Its gradient needs no pass of its own.
        eps: added to the variance.
        dtype: type of the result; default: the type of x.

    Returns:
        The normalised tensor, or (normalised, x + residual) when a residual is given.

    Raises:
        ValueError: a shape does not fit; the message says which.
    """
    name = "layer_norm_modulate"
    _check_shapes(name, x, residual)
    if table is not None:
        if not (weight is bias is scale is shift is None):
            message = f"{name}: table stands alone, without weight, bias, scale and shift"
            raise ValueError(message)
        return _run_table(x, residual, _joined_table(name, table, x), (True, True, eps, dtype or x.dtype))
    affine = None if weight is None else _table(name, "weight", weight, x)
    add = None if bias is None else _table(name, "bias", bias, x)
    factor = None if scale is None else _table(name, "scale", scale, x)
    move = None if shift is None else _table(name, "shift", shift, x)
    if factor is None and move is None:
        gain, offset, modulate = affine, add, False
    elif affine is None and add is None:
        gain, offset, modulate = factor, move, True
        if gain is None:
            modulate = False
    else:
        # Both: fold the small tables first; they have one row per batch item, not per token.
        one = None if factor is None else 1.0 + reference.wide(factor)
        gain = _product(one, None if affine is None else reference.wide(affine))
        offset = None if add is None else _product(one, reference.wide(add))
        if move is not None:
            offset = reference.wide(move) if offset is None else offset + reference.wide(move)
        modulate = False
    gain, offset = _same_groups(gain, offset)
    return _run(x, residual, gain, offset, (True, modulate, eps, dtype or x.dtype))


def _joined_table(name: str, table: Tensor, x: Tensor) -> Tensor:
    """Check a table (B, 2 D) or (B, 1, 2 D) and return it with two dimensions."""
    if table.dim() == 3 and table.shape[1] == 1:
        table = table.squeeze(1)
    wanted = (x.shape[0], 2 * x.shape[-1])
    if tuple(table.shape) != wanted:
        message = f"{name}: table must have shape {wanted}, got {tuple(table.shape)}"
        raise ValueError(message)
    return table


def _run_table(
    x: Tensor, residual: Tensor | None, table: Tensor, settings: tuple[bool, bool, float, torch.dtype]
) -> Tensor | tuple[Tensor, Tensor]:
    if plain(x, residual, table) and wants_grad(x, residual, table):
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        y, total = apply_table_norm(x, residual, table, settings)
        return y if total is None else (y, total)
    scale, shift = table.chunk(2, dim=-1)
    return _run(x, residual, scale, shift, settings)


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a * b


def _same_groups(gain: Tensor | None, offset: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if gain is not None and offset is not None and gain.shape != offset.shape:
        groups = max(_rows_of(gain, None), _rows_of(offset, None))
        gain, offset = gain.expand(groups, -1), offset.expand(groups, -1)
    return gain, offset


@overload
def rms_norm(
    x: Tensor,
    *,
    residual: None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    *,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    *,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm(x + residual) * weight in one pass; arguments and result as in :func:`layer_norm_modulate`."""
    _check_shapes("rms_norm", x, residual)
    gain = None if weight is None else _table("rms_norm", "weight", weight, x)
    return _run(x, residual, gain, None, (False, False, eps, dtype or x.dtype))
