"""Launching the norm kernels: plans and loaded kernels by key, grids, outputs. No dispatcher, no autograd."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import CODES, fell_back, resolve
from loongforge_fuse.ops.norm_plan import (
    RowPlan,
    backward_plan,
    backward_spec,
    column_spec,
    forward_plan,
    forward_spec,
)

_MAX_GROUPS = 32767  # gain and offset of all groups are one dimension of a grid
_forward_calls: dict[Hashable, Function] = {}
_backward_calls: dict[Hashable, Function] = {}
_column_calls: dict[Hashable, Function] = {}
# Plans by width; the benchmark puts candidates here.
forward_plans: dict[tuple[int, bool], RowPlan | None] = {}
backward_plans: dict[tuple[int, bool], RowPlan | None] = {}


@cache
def processors(device: int) -> int:
    """Return the number of multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# Blocks on each multiprocessor where a fixed grid walks the rows, when the plan does not say; the
# benchmark tries others.
waves = {"forward": 8, "backward": 24}


def _forward(width: int, residual: bool) -> RowPlan | None:  # noqa: FBT001 - a cache key
    if (width, residual) not in forward_plans:
        forward_plans[width, residual] = forward_plan(width, residual=residual)
    return forward_plans[width, residual]


def _backward(width: int, columns: bool) -> RowPlan | None:  # noqa: FBT001 - a cache key
    if (width, columns) not in backward_plans:
        backward_plans[width, columns] = backward_plan(width, columns=columns)
    return backward_plans[width, columns]


_empties: dict[torch.device, Tensor] = {}


def _nothing(x: Tensor) -> Tensor:
    """Return an empty float32 tensor on the device of x, always the same one."""
    found = _empties.get(x.device)
    if found is None:
        found = _empties[x.device] = torch.empty(0, dtype=torch.float32, device=x.device)
    return found


def groups_of(table: Tensor | None) -> int:
    """Number of row groups: rows of a two-dimensional table, 1 for a plain weight."""
    return 1 if table is None or table.dim() == 1 else table.shape[0]


def _step(table: Tensor | None) -> int:
    """Return the distance of two table rows in elements."""
    return 0 if table is None or table.dim() == 1 or table.shape[0] == 1 else table.stride(0)


def _unreadable(*tables: Tensor | None) -> bool:
    """Tell whether some table cannot be read in 16-byte vectors."""
    return any(t is not None and (t.stride(-1) != 1 or _step(t) % 8 != 0) for t in tables)


def _unfit(width: int, plan: RowPlan | None, groups: int, *dtypes: torch.dtype | None) -> str | None:
    """Return why no kernel fits, or None."""
    if plan is None:
        return f"width {width} is not a multiple of 8 in range"
    for dtype in dtypes:
        if dtype is not None and dtype not in CODES:
            return f"dtype {dtype}"
    return f"{groups} groups" if groups > _MAX_GROUPS else None


def _form(gain: torch.dtype | None, modulate: bool) -> str:  # noqa: FBT001 - part of a cache key
    if gain is None:
        return "none"
    return "modulate" if modulate else "scale"


def _forward_call(key: tuple, groups: int, plan: RowPlan | None) -> Function | None:
    device, width, x, r, g, o, layer, modulate, y = key
    reason = _unfit(width, plan, groups, x, r, g, o, y)
    if reason is None and g is not None and o is not None and g != o:
        reason = f"gain {g} and offset {o}"
    if reason or plan is None:
        fell_back("norm", reason or "no plan")
        return None
    table = g or o or x
    spec = forward_spec(
        plan,
        width,
        layer=layer,
        x=CODES[x],
        r=CODES[r or x],
        w=CODES[table],
        y=CODES[y],
        gain=_form(g, modulate),
        offset=o is not None,
        residual=r is not None,
    )
    return resolve("norm", _forward_calls, key, spec, device)


def run_norm(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    offset: Tensor | None,
    layer: bool,  # noqa: FBT001 - the schema's order
    modulate: bool,  # noqa: FBT001
    eps: float,
    dtype: torch.dtype,
    keep: bool = True,  # noqa: FBT001
) -> tuple[Tensor, Tensor | None, Tensor, Tensor] | None:
    """Launch the forward kernel on contiguous tensors of any leading shape.

    Returns:
        y and total in the shape of x, total None without residual; mean (empty for RMSNorm) and rstd, float32
        (rows,), which share memory and must not be used unless `keep`. None, and counted, when no kernel
        fits.
    """
    width = x.shape[-1]
    pointer, total_at, gain_at, offset_at, residual_at = x.data_ptr(), 0, 0, 0, 0
    gain_step, offset_step, groups = 0, 0, 1
    total = r = g = o = None
    fits = True
    if residual is not None:
        r, residual_at = residual.dtype, residual.data_ptr()
    if gain is not None:
        g, gain_at = gain.dtype, gain.data_ptr()
        if gain.dim() == 2:
            groups, gain_step = gain.shape[0], _step(gain)
        fits = gain.stride(-1) == 1
    if offset is not None:
        o, offset_at = offset.dtype, offset.data_ptr()
        if offset.dim() == 2:
            groups, offset_step = offset.shape[0], _step(offset)
        fits = fits and offset.stride(-1) == 1
    if not fits or (pointer | residual_at | gain_at | offset_at) & 15 or (gain_step | offset_step) & 7:
        fell_back("norm", "a tensor cannot be read in 16-byte vectors")
        return None
    key = (x.get_device(), width, x.dtype, r, g, o, layer, modulate, dtype)
    call = _forward_calls.get(key) or _forward_call(key, groups, _forward(width, r is not None))
    plan = forward_plans.get((width, r is not None))
    if call is None or plan is None or groups > _MAX_GROUPS:
        return None
    y = torch.empty_like(x, dtype=dtype) if dtype != x.dtype else torch.empty_like(x)
    if residual is not None:
        total = torch.empty_like(x)
        total_at = total.data_ptr()
    rows = x.numel() // width
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = (torch.empty_like(rstd) if keep else rstd) if layer else _nothing(x)
    if rows:
        group_rows = rows // groups
        blocks = -(-group_rows // (plan.block // plan.threads))
        if plan.ahead:
            blocks = min(blocks, -(-waves["forward"] * processors(key[0]) // groups))
        outputs = (y.data_ptr(), total_at, mean.data_ptr(), rstd.data_ptr())
        sizes = (group_rows, width, gain_step, offset_step, eps)
        call.run(blocks, groups, (pointer, residual_at, gain_at, offset_at, *outputs, *sizes))
    return y, total, mean, rstd


def _backward_call(key: tuple, groups: int, plan: RowPlan | None) -> Function | None:
    device, width, x, y, g, layer, modulate, columns, offset, carry = key
    reason = _unfit(width, plan, groups, x, y, g)
    if reason or plan is None:
        fell_back("norm_backward", reason or "no plan")
        return None
    spec = backward_spec(
        plan,
        width,
        layer=layer,
        x=CODES[x],
        w=CODES[g or x],
        y=CODES[y],
        gain=_form(g, modulate),
        columns=columns,
        offset=offset,
        carry=carry,
    )
    return resolve("norm_backward", _backward_calls, key, spec, device)


def run_norm_backward(
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
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of total, gain and offset; `grad` and `total` may have any leading shape.

    The last two are (groups, width) in the type of the gain, or None where they were not asked for.
    """
    width = total.shape[-1]
    grad, total = grad.contiguous(), total.contiguous()
    carried = None if carry is None else carry.to(total.dtype).contiguous()
    carry_at = 0 if carried is None else carried.data_ptr()
    gain_at = 0 if gain is None else gain.data_ptr()
    plan = _backward(width, columns)
    g = None if gain is None else gain.dtype
    device = total.get_device()
    key = (
        device,
        width,
        total.dtype,
        grad.dtype,
        g,
        layer,
        modulate,
        columns,
        offset,
        carried is not None,
    )
    call = None
    if (grad.data_ptr() | total.data_ptr() | carry_at | gain_at) & 15 or _unreadable(gain):
        fell_back("norm_backward", "a tensor cannot be read in 16-byte vectors")
    else:
        call = _backward_calls.get(key) or _backward_call(key, groups, plan)
    if call is None or plan is None or groups > _MAX_GROUPS:
        flat = (-1, width)
        dx, dgain, doffset = reference.norm_backward(
            grad.view(flat),
            None if carried is None else carried.view(flat),
            total.view(flat),
            None if gain is None else gain.view(-1, width),
            mean,
            rstd,
            layer,
            modulate,
            group_rows,
            columns,
            offset,
            groups,
        )
        return dx.view(total.shape), dgain if columns else None, doffset if offset else None
    dx = torch.empty_like(total)
    rows = total.numel() // width
    if not rows:
        zeros = total.new_zeros((2, groups, width), dtype=torch.float32) if columns else None
        if zeros is None:
            return dx, None, None
        return dx, zeros[0], zeros[1] if offset else None
    per_block = plan.block // plan.threads
    group_rows = rows // groups
    each = plan.min_blocks or max(2, 512 // plan.block) if columns else waves["backward"]
    # With column sums a block costs a row of partial sums, so it should have a few rows of its own; and no
    # more blocks than fit at once, or a second wave doubles the time.
    rows_each = per_block * (4 if columns else 1)
    blocks = min(-(-group_rows // rows_each), max(1, each * processors(device) // groups))
    part = None
    part_at, second_at, lines = 0, 0, groups * blocks
    if columns:
        part = total.new_empty((2 if offset else 1, lines, width), dtype=torch.float32)
        part_at = part.data_ptr()
        second_at = part_at + 4 * lines * width
    inputs = (total.data_ptr(), grad.data_ptr(), gain_at, mean.data_ptr(), rstd.data_ptr(), carry_at)
    outputs = (dx.data_ptr(), part_at, second_at)
    call.run(blocks, groups, (*inputs, *outputs, group_rows, width, _step(gain)))
    if part is None:
        return dx, None, None
    sums = _column_sums(part, groups, blocks, device, torch.float32 if gain is None else gain.dtype)
    return dx, sums[0], sums[1] if offset else None


def _column_sums(
    part: Tensor, groups: int, chunks: int, device: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Add the chunks of each group: (kinds, groups * chunks, width) to one (groups, width) for each kind.

    The kinds count as more groups, so that one launch serves both; the sums are rounded to `dtype` once.
    """
    kinds, _, width = part.shape
    key = (device, dtype)
    call = _column_calls.get(key)
    if call is None and dtype in CODES:
        call = resolve("norm_backward", _column_calls, key, column_spec(CODES[dtype]), device)
    if call is None:
        return tuple(part.view(kinds, groups, chunks, width).sum(2).to(dtype))
    out = torch.empty((kinds, groups, width), dtype=dtype, device=part.device)
    call.run(-(-width // 32), kinds * groups, (part.data_ptr(), out.data_ptr(), width, chunks))
    return out.unbind(0)
