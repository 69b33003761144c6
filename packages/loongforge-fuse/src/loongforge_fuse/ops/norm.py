"""The norm operator: LayerNorm or RMSNorm of rows, residual add, weights or modulation; and its backward."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import CODES, Context, define, fell_back, plain, register_derivative, resolve
from loongforge_fuse.ops.norm_plan import (
    RowPlan,
    backward_plan,
    backward_spec,
    chunking,
    column_spec,
    forward_plan,
    forward_spec,
)

_MAX_GROUPS = 65535  # the grid's second dimension
_forward_calls: dict[Hashable, Function] = {}
_backward_calls: dict[Hashable, Function] = {}
_column_calls: dict[Hashable, Function] = {}
# Plans by width; the benchmark puts candidates here.
forward_plans: dict[int, RowPlan | None] = {}
backward_plans: dict[tuple[int, bool], RowPlan | None] = {}


@cache
def blocks_wanted(device: int) -> int:
    """Return how many blocks the backward pass with column sums aims at: a few for each multiprocessor."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def _forward(width: int) -> RowPlan | None:
    if width not in forward_plans:
        forward_plans[width] = forward_plan(width)
    return forward_plans[width]


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


def _groups(table: Tensor | None) -> int:
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
    device, width, x, r, g, o, layer, modulate, y, _ = key
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
) -> tuple[Tensor, Tensor | None, Tensor, Tensor] | None:
    """Launch the forward kernel on contiguous tensors of any leading shape.

    Returns:
        y and total in the shape of x, total None without residual; mean (empty for RMSNorm) and rstd, float32
        (rows,). None, and counted, when no kernel fits.
    """
    width = x.shape[-1]
    pointer, total_at, gain_at, offset_at, residual_at = x.data_ptr(), 0, 0, 0, 0
    total = r = g = o = None
    if residual is not None:
        r, residual_at = residual.dtype, residual.data_ptr()
    if gain is not None:
        g, gain_at = gain.dtype, gain.data_ptr()
    if offset is not None:
        o, offset_at = offset.dtype, offset.data_ptr()
    if (pointer | residual_at | gain_at | offset_at) & 15 or _unreadable(gain, offset):
        fell_back("norm", "a tensor cannot be read in 16-byte vectors")
        return None
    plan = _forward(width)
    key = (x.get_device(), width, x.dtype, r, g, o, layer, modulate, dtype, plan)
    groups = _groups(offset if gain is None else gain)
    call = _forward_calls.get(key) or _forward_call(key, groups, plan)
    if call is None or plan is None or groups > _MAX_GROUPS:
        return None
    y = torch.empty_like(x, dtype=dtype)
    if residual is not None:
        total = torch.empty_like(x)
        total_at = total.data_ptr()
    rows = x.numel() // width
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(rstd) if layer else _nothing(x)
    if rows:
        group_rows = rows // groups
        blocks = -(-group_rows // (plan.block // plan.threads))
        if plan.ahead:
            blocks = min(blocks, -(-blocks_wanted(key[0]) * 512 // (plan.block * groups)))
        sizes = (group_rows, width, _step(gain) >> 3, _step(offset) >> 3, eps)
        outputs = (y.data_ptr(), total_at, mean.data_ptr(), rstd.data_ptr())
        call.run(blocks, groups, (pointer, residual_at, gain_at, offset_at, *outputs, *sizes))
    return y, total, mean, rstd


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


def _backward_call(key: tuple, groups: int, plan: RowPlan | None) -> Function | None:
    device, width, x, y, g, layer, modulate, columns, offset, carry, _ = key
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

    The last two are float32 (groups, width), or None where they were not asked for.
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
        plan,
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
        return dx, None if zeros is None else zeros[0], None if zeros is None or not offset else zeros[1]
    per_block = plan.block // plan.threads
    group_rows = rows // groups
    wanted = blocks_wanted(device) * (1 if columns else 8)
    chunk, chunks = chunking(group_rows, groups, wanted, per_block)
    part = None
    part_at, second_at, lines = 0, 0, groups * chunks
    if columns:
        part = total.new_empty((2 if offset else 1, lines, width), dtype=torch.float32)
        part_at = part.data_ptr()
        second_at = part_at + 4 * lines * width
    call.run(
        chunks,
        groups,
        (
            total.data_ptr(),
            grad.data_ptr(),
            gain_at,
            mean.data_ptr(),
            rstd.data_ptr(),
            carry_at,
            dx.data_ptr(),
            part_at,
            second_at,
            group_rows,
            width,
            _step(gain) >> 3,
            chunk,
        ),
    )
    if part is None:
        return dx, None, None
    sums = _column_sums(part, groups, chunks, width, device)
    return dx, sums[0], sums[1] if offset else None


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Run ``loongforge::norm_backward`` on CUDA rows; see :func:`reference.norm_backward`."""
    dx, dgain, doffset = run_norm_backward(
        grad, carry, total, gain, mean, rstd, layer, modulate, group_rows, columns, offset, groups
    )
    empty = total.new_empty(0, dtype=torch.float32)
    return dx, empty if dgain is None else dgain, empty.clone() if doffset is None else doffset


def _column_sums(part: Tensor, groups: int, chunks: int, width: int, device: int) -> tuple[Tensor, ...]:
    """Add the chunks of each group: (kinds, groups * chunks, width) to one (groups, width) for each kind."""
    if chunks == 1:
        return part.unbind(0) if part.shape[0] == 1 else (part[0], part[1].clone())
    call = _column_calls.get(device) or resolve("norm_backward", _column_calls, device, column_spec(), device)
    if call is None:
        return tuple(part.view(part.shape[0], groups, chunks, width).sum(2))
    outs = [part.new_empty((groups, width)) for _ in range(part.shape[0])]
    blocks = -(-width // 32)
    step = 4 * groups * chunks * width
    for kind, out in enumerate(outs):
        call.run(blocks, groups, (part.data_ptr() + kind * step, out.data_ptr(), width, chunks))
    return tuple(outs)


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
) -> tuple[Tensor, Tensor, Tensor]:
    sums = torch.float64 if total.dtype == torch.float64 else torch.float32
    shape = (groups, total.shape[-1])
    return (
        total.new_empty(total.shape),
        total.new_empty(shape if columns else 0, dtype=sums),
        total.new_empty(shape if columns and offset else 0, dtype=sums),
    )


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
    " -> (Tensor, Tensor, Tensor)",
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
        dx, dgain, doffset = norm_backward_cuda(*arguments, *counts)
    else:
        dx, dgain, doffset = torch.ops.loongforge.norm_backward(*arguments, *counts)
    return (
        dx,
        None if ctx.residual is None else dx.to(ctx.residual),
        dgain.to(ctx.gain) if ctx.needs_input_grad[2] and ctx.gain is not None else None,
        doffset.to(ctx.offset) if ctx.needs_input_grad[3] and ctx.offset is not None else None,
        *([None] * 5),
    )


register_derivative(_NORM, setup_context=_setup, backward=_grad)


class NormFunction(torch.autograd.Function):
    """The same derivative for the eager fast path: fewer steps, tensors of any leading shape."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        residual: Tensor | None,
        gain: Tensor | None,
        offset: Tensor | None,
        settings: tuple[bool, bool, float, torch.dtype],
    ) -> tuple[Tensor, Tensor | None]:
        """Run the kernel, or the reference when no kernel fits; keep what backward needs."""
        layer, modulate, eps, dtype = settings
        done = run_norm(x, residual, gain, offset, layer, modulate, eps, dtype)
        groups = _groups(offset if gain is None else gain)
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
    settings: tuple[bool, bool, float, torch.dtype],
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
