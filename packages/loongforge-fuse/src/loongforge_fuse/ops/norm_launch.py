"""Launching the norm kernels: plans and loaded kernels by key, grids, outputs. No dispatcher, no autograd."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import CODES, capturing, fell_back, load_first, processors
from loongforge_fuse.ops.columns import add_partials
from loongforge_fuse.ops.norm_plan import (
    RowPlan,
    backward_spec,
    backward_ways,
    elsewhere,
    fitted,
    forward_spec,
    forward_ways,
)
from loongforge_fuse.ops.variants import forget_on_change, in_turn

_MAX_GROUPS = 32767  # gain and offset of all groups are one dimension of a grid
# Elements from which on a tensor counts as large: its rows are chosen for bandwidth, others for latency.
LARGE = 2**24
Loaded = tuple[Function, RowPlan]
_forward_calls: dict[Hashable, Loaded] = {}
_backward_calls: dict[Hashable, Loaded] = {}
forget_on_change(_forward_calls.clear)
forget_on_change(_backward_calls.clear)


def _kind(*, layer: bool, modulate: bool) -> str:
    return "modulated_norm" if modulate else ("layer_norm" if layer else "rms_norm")


def forward_job(width: int, *, layer: bool, residual: bool, large: bool, modulate: bool = False) -> str:
    """Name the choice between forward plans."""
    kind = _kind(layer=layer, modulate=modulate)
    return f"{kind} {width}{' residual' if residual else ''} {'large' if large else 'small'}"


def backward_job(width: int, *, layer: bool, columns: bool, large: bool, modulate: bool = False) -> str:
    """Name the choice between backward plans."""
    kind = _kind(layer=layer, modulate=modulate)
    return f"{kind} backward {width}{' columns' if columns else ''} {'large' if large else 'small'}"


def _plans(job: str, ways: dict[str, RowPlan]) -> list[RowPlan]:
    return [ways[way] for way in in_turn(job, tuple(ways))] if ways else []


_empties: dict[torch.device, Tensor] = {}
_UNREAD_ROWS = 2**16
_unread: dict[int, Tensor] = {}


def _nothing(x: Tensor) -> Tensor:
    """Return an empty float32 tensor on the device of x, always the same one."""
    found = _empties.get(x.device)
    if found is None:
        found = _empties[x.device] = torch.empty(0, dtype=torch.float32, device=x.device)
    return found


def _statistics(x: Tensor, rows: int) -> Tensor:
    """Return float32 values for at least `rows` rows that kernels write and nobody reads.

    Up to 65,536 rows share one buffer of 256 KiB a device, whatever the stream: an allocation costs the host
    as much as the launch. The first one is never freed or replaced, so a captured graph may keep its address.
    """
    device = x.get_device()
    found = _unread.get(device)
    if found is None and not capturing():
        # Another thread may have made it by now.
        fresh = torch.empty(_UNREAD_ROWS, dtype=torch.float32, device=x.device)
        found = _unread.setdefault(device, fresh)
    if found is None or rows > _UNREAD_ROWS:
        return torch.empty(rows, dtype=torch.float32, device=x.device)
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


def _unfit(width: int, plans: list[RowPlan], groups: int, *dtypes: torch.dtype | None) -> str | None:
    """Return why no kernel fits, or None."""
    if not plans:
        return f"width {width} is not a multiple of 8 in range"
    for dtype in dtypes:
        if dtype is not None and dtype not in CODES:
            return f"dtype {dtype}"
    return f"{groups} groups" if groups > _MAX_GROUPS else None


def _form(gain: torch.dtype | None, modulate: bool) -> str:  # noqa: FBT001 - part of a cache key
    if gain is None:
        return "none"
    return "modulate" if modulate else "scale"


def _forward_call(key: tuple, groups: int) -> Loaded | None:
    device, width, x, r, g, o, layer, modulate, y, large = key
    residual = r is not None
    job = forward_job(width, layer=layer, residual=residual, large=large, modulate=modulate)
    ways = forward_ways(width, residual=residual, large=large, layer=layer, modulate=modulate)
    plans = _plans(job, ways)
    reason = _unfit(width, plans, groups, x, r, g, o, y)
    if reason is None and g is not None and o is not None and g != o:
        reason = f"gain {g} and offset {o}"
    if reason:
        fell_back("norm", reason)
        return None
    specs = [
        forward_spec(
            plan,
            width,
            layer=layer,
            x=CODES[x],
            r=CODES[r or x],
            w=CODES[g or o or x],
            y=CODES[y],
            gain=_form(g, modulate),
            offset=o is not None,
            residual=residual,
        )
        for plan in plans
    ]
    loaded = load_first("norm", specs, device)
    if loaded is None:
        return None
    found = _forward_calls[key] = loaded[0], plans[loaded[1]]
    return found


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
        (rows,), which must not be used unless `keep`. None, and counted, when no kernel fits.
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
    count = x.numel()
    key = (x.get_device(), width, x.dtype, r, g, o, layer, modulate, dtype, count >= LARGE)
    found = _forward_calls.get(key) or _forward_call(key, groups)
    if found is None or groups > _MAX_GROUPS:
        return None
    y = torch.empty_like(x, dtype=dtype) if dtype != x.dtype else torch.empty_like(x)
    if residual is not None:
        total = torch.empty_like(x)
        total_at = total.data_ptr()
    rows = count // width
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if keep else _statistics(x, rows)
    mean = (torch.empty_like(rstd) if keep else rstd) if layer else _nothing(x)
    if rows:
        call, plan = found
        group_rows = rows // groups
        blocks = -(-group_rows // (plan.block // plan.threads))
        if plan.ahead:
            blocks = min(blocks, -(-plan.waves * processors(key[0]) // groups))
        outputs = (y.data_ptr(), total_at, mean.data_ptr(), rstd.data_ptr())
        sizes = (group_rows, width, gain_step, offset_step, eps)
        call.run(blocks, groups, (pointer, residual_at, gain_at, offset_at, *outputs, *sizes))
    return y, total, mean, rstd


def _backward_call(key: tuple, groups: int) -> Loaded | None:
    device, width, x, y, g, layer, modulate, columns, offset, carry, large = key
    job = backward_job(width, layer=layer, columns=columns, large=large, modulate=modulate)
    ways = backward_ways(width, columns=columns, modulate=modulate, large=large, layer=layer)
    codes = {"x": CODES.get(x, ""), "w": CODES.get(g or x, ""), "y": CODES.get(y, "")}
    plans = [fitted(plan, width, **codes) for plan in _plans(job, ways)]
    plans += [elsewhere(plan, width) for plan in plans[-1:] if plan.early]
    reason = _unfit(width, plans, groups, x, y, g)
    if reason:
        fell_back("norm_backward", reason)
        return None
    specs = [
        backward_spec(
            plan,
            width,
            layer=layer,
            **codes,
            gain=_form(g, modulate),
            columns=columns,
            offset=offset,
            carry=carry,
        )
        for plan in plans
    ]
    loaded = load_first("norm_backward", specs, device)
    if loaded is None:
        return None
    found = _backward_calls[key] = loaded[0], plans[loaded[1]]
    return found


def backward_blocks(plan: RowPlan, group_rows: int, groups: int, device: int, *, columns: bool) -> int:
    """Return the blocks for each group of rows.

    With column sums a block costs a row of partial sums, so it should have a few rows of its own; and no more
    blocks than fit at once, or a second wave doubles the time.
    """
    each = plan.min_blocks or max(2, 512 // plan.block) if columns else plan.waves
    rows_each = (plan.block // plan.threads) * (plan.rows_each if columns else 1)
    return min(-(-group_rows // rows_each), max(1, each * processors(device) // groups))


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
    sum_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of total, and with `columns` those of gain and offset.

    The second result is (groups, 2, width), or (groups, 1, width) without `offset`, of `sum_dtype` (None: of
    the gain's type); None when it was not asked for. `grad` and `total` may have any leading shape.
    """
    width, count = total.shape[-1], total.numel()
    grad, total = grad.contiguous(), total.contiguous()
    carried = None if carry is None else carry.to(total.dtype).contiguous()
    carry_at = 0 if carried is None else carried.data_ptr()
    gain_at = 0 if gain is None else gain.data_ptr()
    grad_at, total_at = grad.data_ptr(), total.data_ptr()
    g = None if gain is None else gain.dtype
    device = total.get_device()
    form = (layer, modulate, columns, offset, carried is not None, count >= LARGE)
    key = (device, width, total.dtype, grad.dtype, g, *form)
    found = None
    if (grad_at | total_at | carry_at | gain_at) & 15 or _unreadable(gain):
        fell_back("norm_backward", "a tensor cannot be read in 16-byte vectors")
    else:
        found = _backward_calls.get(key) or _backward_call(key, groups)
    if found is None or groups > _MAX_GROUPS:
        settings = (layer, modulate, group_rows, columns, offset, groups)
        return _backward_reference(grad, carried, total, gain, mean, rstd, settings)
    dx = torch.empty_like(total)
    if not count:
        shape = (groups, 2 if offset else 1, width)
        return dx, total.new_zeros(shape, dtype=torch.float32) if columns else None
    call, plan = found
    group_rows = count // (width * groups)
    blocks = backward_blocks(plan, group_rows, groups, device, columns=columns)
    part, part_at, second_at = None, 0, 0
    if columns:
        kinds = 2 if offset else 1
        part = total.new_empty((groups * kinds, blocks, width), dtype=torch.float32)
        part_at = part.data_ptr()
        second_at = part_at + 4 * blocks * width
    inputs = (total_at, grad_at, gain_at, mean.data_ptr(), rstd.data_ptr(), carry_at)
    call.run(blocks, groups, (*inputs, dx.data_ptr(), part_at, second_at, group_rows, width, _step(gain)))
    if part is None:
        return dx, None
    # A launch that may start early takes the host longer. That pays where the device is waited for, or where
    # a graph is replayed.
    follows = plan.early and (count >= LARGE or capturing())
    sums = add_partials(part, sum_dtype or g or torch.float32, "norm_backward", follows=follows)
    return dx, sums.view(groups, -1, width)


def _backward_reference(
    grad: Tensor,
    carry: Tensor | None,
    total: Tensor,
    gain: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    settings: tuple[bool, bool, int, bool, bool, int],
) -> tuple[Tensor, Tensor | None]:
    """Run the plain torch form on contiguous tensors of any leading shape."""
    flat = (-1, total.shape[-1])
    dx, sums = reference.norm_backward(
        grad.view(flat),
        None if carry is None else carry.view(flat),
        total.view(flat),
        None if gain is None else gain.reshape(flat),
        mean,
        rstd,
        *settings,
    )
    columns = settings[3]
    return dx.view(total.shape), sums if columns else None
