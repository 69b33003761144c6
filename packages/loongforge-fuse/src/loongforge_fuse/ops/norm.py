"""LayerNorm and RMSNorm with residual add, affine weights or per-group modulation, as one operator pair."""

from __future__ import annotations

from dataclasses import dataclass
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
    define,
    differentiable,
    fell_back,
    kernel,
    launch,
    plain,
    wants_grad,
)


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """How a row is spread over threads.

    Attributes:
        threads: threads per row.
        vectors: vectors of 8 elements each thread holds; threads * vectors covers the row.
        block: threads per block; a multiple of `threads`.
        pace: rows whose loads are in flight together (backward only).
    """

    threads: int
    vectors: int
    block: int
    pace: int = 1


def forward_plan(width: int) -> RowPlan | None:
    """Return the plan for rows of `width` elements, or None when no kernel takes such a row."""
    count = width // 8
    if width % 8 or not count or count > 2048:
        return None
    if count <= 32:
        threads = 4
        while threads < count:
            threads *= 2
        return RowPlan(threads=threads, vectors=1, block=256)
    if count <= 256:
        return RowPlan(threads=32, vectors=-(-count // 32), block=256)
    if count <= 1024:
        return RowPlan(threads=128, vectors=-(-count // 128), block=256)
    return RowPlan(threads=256, vectors=8, block=256)


def backward_plan(width: int) -> RowPlan | None:
    """Return the plan of the backward kernel for rows of `width` elements; one block per row."""
    count = width // 8
    if width % 8 or not count or count > 1024:
        return None
    vectors = 1 if count <= 256 else 2
    threads = -(-count // (32 * vectors)) * 32
    return RowPlan(threads=threads, vectors=vectors, block=threads, pace=1)


def forward_spec(
    plan: RowPlan, *, layer: bool, x: str, r: str, w: str, y: str, gain: str, offset: bool, residual: bool
) -> KernelSpec:
    """Return the specification of a forward variant; `r` and `w` matter only with a residual or a gain."""
    return KernelSpec(
        module="norm",
        maker="norm_forward",
        options={
            "layer": layer,
            "x": x,
            "r": r if residual else x,
            "w": w if gain != "none" or offset else x,
            "y": y,
            "gain": gain,
            "offset": offset,
            "residual": residual,
            "threads": plan.threads,
            "vectors": plan.vectors,
        },
        arguments="PPPPPPPPqqqqqf",
        block=plan.block,
    )


def backward_spec(
    plan: RowPlan, *, layer: bool, x: str, w: str, y: str, gain: str, columns: bool, offset: bool, carry: bool
) -> KernelSpec:
    """Return the specification of a backward variant."""
    return KernelSpec(
        module="norm",
        maker="norm_backward",
        options={
            "layer": layer,
            "x": x,
            "w": w if gain != "none" else x,
            "y": y,
            "gain": gain,
            "columns": columns,
            "offset": offset and columns,
            "carry": carry,
            "threads": plan.threads,
            "vectors": plan.vectors,
            "pace": plan.pace,
        },
        arguments="PPPPPPPPPqqqqqq",
        block=plan.block,
    )


def column_spec() -> KernelSpec:
    """Return the specification of the kernel that adds the partial column sums."""
    return KernelSpec(
        module="norm", maker="column_sums", options={"y": "f32"}, arguments="PPqq", block=1024, vector=False
    )


@cache
def _forward_function(device: int, plan: RowPlan, **options: str | bool) -> Function:
    return kernel(forward_spec(plan, **options), device)  # type: ignore[arg-type]


@cache
def _backward_function(device: int, plan: RowPlan, **options: str | bool) -> Function:
    return kernel(backward_spec(plan, **options), device)  # type: ignore[arg-type]


@cache
def _blocks_wanted(device: int) -> int:
    """Return how many blocks the backward pass with column sums aims at: a few for each multiprocessor."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def chunking(rows: int, groups: int, wanted: int, pace: int) -> tuple[int, int]:
    """Return (rows per chunk, chunks per group) so that about `wanted` blocks share the rows."""
    group_rows = rows // groups
    per_group = max(1, min(group_rows, -(-wanted // groups)))
    chunk = -(-group_rows // per_group)
    chunk = -(-chunk // pace) * pace
    return chunk, -(-group_rows // chunk)


def _step(table: Tensor | None) -> int | None:
    """Return the distance of two rows in vectors, or None when the table cannot be read 16 bytes at a
    time.
    """
    if table is None:
        return 0
    if table.stride(-1) != 1 or table.data_ptr() & 15:
        return None
    step = table.stride(0) if table.shape[0] > 1 else 0
    return None if step % 8 else step // 8


def _refusal(width: int, dtype: torch.dtype, plan: RowPlan | None, *tensors: Tensor | None) -> str | None:
    if plan is None:
        return f"width {width} is not a multiple of 8 in range"
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in CODES:
            return f"dtype {tensor.dtype}"
        if tensor.data_ptr() & 15:
            return "address is not a multiple of 16 bytes"
    return None if dtype in CODES else f"dtype {dtype}"


def _norm_cuda(
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
    rows, width = x.shape
    plan = forward_plan(width)
    x = x.contiguous()
    added = None if residual is None else residual.contiguous()
    gain_step, offset_step = _step(gain), _step(offset)
    reason = _refusal(width, dtype, plan, x, added)
    if reason is None and (gain_step is None or offset_step is None):
        reason = "gain or offset cannot be read in 16-byte vectors"
    if reason is None and gain is not None and offset is not None and gain.dtype != offset.dtype:
        reason = f"gain {gain.dtype} and offset {offset.dtype}"
    if reason is None:
        reason = _refusal(width, dtype, plan, gain, offset)
    call = None
    if reason is None and plan is not None:
        table = gain if gain is not None else offset
        code = CODES[x.dtype]
        try:
            call = _forward_function(
                x.get_device(),
                plan,
                layer=layer,
                x=code,
                r=code if added is None else CODES[added.dtype],
                w=code if table is None else CODES[table.dtype],
                y=CODES[dtype],
                gain="none" if gain is None else ("modulate" if modulate else "scale"),
                offset=offset is not None,
                residual=added is not None,
            )
        except KernelUnavailableError as error:
            reason = str(error)
    if call is None or plan is None:
        fell_back("norm", reason or "no kernel")
        return reference.norm(x, residual, gain, offset, layer, modulate, group_rows, eps, dtype)
    y = torch.empty_like(x, dtype=dtype)
    total = torch.empty_like(x) if added is not None else x.new_empty(0)
    mean = x.new_empty(rows if layer else 0, dtype=torch.float32)
    rstd = x.new_empty(rows, dtype=torch.float32)
    if rows:
        per_block = plan.block // plan.threads
        launch(
            "norm",
            call,
            x.get_device(),
            (-(-rows // per_block), 1),
            x.data_ptr(),
            0 if added is None else added.data_ptr(),
            0 if gain is None else gain.data_ptr(),
            0 if offset is None else offset.data_ptr(),
            y.data_ptr(),
            total.data_ptr(),
            mean.data_ptr(),
            rstd.data_ptr(),
            rows,
            width,
            group_rows,
            gain_step or 0,
            offset_step or 0,
            eps,
        )
    return y, total, mean, rstd


def _norm_backward_cuda(
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
    rows, width = total.shape
    plan = backward_plan(width)
    grad, total = grad.contiguous(), total.contiguous()
    carried = None if carry is None else carry.to(total.dtype).contiguous()
    gain_step = _step(gain)
    reason = _refusal(width, total.dtype, plan, grad, carried, total, gain)
    if reason is None and gain_step is None:
        reason = "gain cannot be read in 16-byte vectors"
    call = None
    device = total.get_device()
    if reason is None and plan is not None:
        code = CODES[total.dtype]
        try:
            call = _backward_function(
                device,
                plan,
                layer=layer,
                x=code,
                w=code if gain is None else CODES[gain.dtype],
                y=CODES[grad.dtype],
                gain="none" if gain is None else ("modulate" if modulate else "scale"),
                columns=columns,
                offset=offset,
                carry=carried is not None,
            )
        except KernelUnavailableError as error:
            reason = str(error)
    if call is None or plan is None:
        fell_back("norm_backward", reason or "no kernel")
        return reference.norm_backward(
            grad, carry, total, gain, mean, rstd, layer, modulate, group_rows, columns, offset, groups
        )
    dx = torch.empty_like(total)
    wanted = _blocks_wanted(device) if columns else max(rows, 1)
    chunk, chunks = chunking(rows, groups, wanted, plan.pace) if rows else (1, 0)
    lines = groups * chunks
    part_g = total.new_empty((lines, width) if columns else 0, dtype=torch.float32)
    part_o = total.new_empty((lines, width) if columns and offset else 0, dtype=torch.float32)
    if rows:
        launch(
            "norm_backward",
            call,
            device,
            (lines, 1),
            total.data_ptr(),
            grad.data_ptr(),
            0 if gain is None else gain.data_ptr(),
            mean.data_ptr(),
            rstd.data_ptr(),
            0 if carried is None else carried.data_ptr(),
            dx.data_ptr(),
            part_g.data_ptr(),
            part_o.data_ptr(),
            rows,
            width,
            rows // groups,
            chunk,
            chunks,
            gain_step or 0,
        )
    dgain = _column_sums(part_g, groups, chunks, width) if columns else part_g
    doffset = _column_sums(part_o, groups, chunks, width) if columns and offset else part_o
    return dx, dgain, doffset


def _column_sums(part: Tensor, groups: int, chunks: int, width: int) -> Tensor:
    if chunks == 1:
        return part
    if chunks == 0:
        return part.new_zeros((groups, width))
    out = part.new_empty((groups, width))
    device = part.get_device()
    call = kernel(column_spec(), device)
    launch(
        "column_sums", call, device, (-(-width // 32), groups), part.data_ptr(), out.data_ptr(), width, chunks
    )
    return out


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
    cuda=_norm_cuda,
    fake=_fake_norm,
)
define(
    "norm_backward(Tensor grad, Tensor? carry, Tensor total, Tensor? gain, Tensor mean, Tensor rstd, bool"
    " layer, bool modulate, int group_rows, bool columns, bool offset, int groups)"
    " -> (Tensor, Tensor, Tensor)",
    cpu=reference.norm_backward,
    cuda=_norm_backward_cuda,
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
        dx, dgain, doffset = _norm_backward_cuda(*arguments, *counts)
    else:
        dx, dgain, doffset = torch.ops.loongforge.norm_backward(*arguments, *counts)
    return (
        dx,
        None if ctx.residual is None else dx.to(ctx.residual),
        dgain.to(ctx.gain) if ctx.needs_input_grad[2] and ctx.gain is not None else None,
        doffset.to(ctx.offset) if ctx.needs_input_grad[3] and ctx.offset is not None else None,
        *([None] * 5),
    )


_fast = differentiable(_NORM, cuda=_norm_cuda, setup_context=_setup, backward=_grad)


def _run(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    offset: Tensor | None,
    *,
    layer: bool,
    modulate: bool,
    eps: float,
    dtype: torch.dtype | None,
) -> Tensor | tuple[Tensor, Tensor]:
    shape = x.shape
    rows = x.reshape(-1, shape[-1])
    added = None if residual is None else residual.reshape(-1, shape[-1])
    table = gain if gain is not None else offset
    group_rows = max(1, rows.shape[0] // (1 if table is None else max(1, table.shape[0])))
    result = dtype or x.dtype
    arguments = (rows, added, gain, offset, layer, modulate, group_rows, eps, result)
    if plain(x, residual, gain, offset):
        if wants_grad(x, residual, gain, offset):
            y, total, _, _ = _fast(*arguments)
        else:
            y, total, _, _ = _norm_cuda(*arguments)
    else:
        y, total, _, _ = torch.ops.loongforge.norm(*arguments)
    if residual is None:
        return y.view(shape)
    return y.view(shape), total.view(shape)


def _table(name: str, what: str, value: Tensor | None, x: Tensor) -> Tensor | None:
    """Check a weight (D,) or a modulation (B, D) or (B, 1, D), and return it as (G, D)."""
    if value is None:
        return None
    width = x.shape[-1]
    if value.dim() == 3 and value.shape[1] == 1:
        value = value.squeeze(1)
    if value.dim() == 1 and value.shape[0] == width:
        return value.unsqueeze(0)
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


def layer_norm_modulate(
    x: Tensor,
    *,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
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
        eps: added to the variance.
        dtype: type of the result; default: the type of x.

    Returns:
        The normalised tensor, or (normalised, x + residual) when a residual is given.

    Raises:
        ValueError: a shape does not fit; the message says which.
    """
    name = "layer_norm_modulate"
    _check_shapes(name, x, residual)
    affine, add = _table(name, "weight", weight, x), _table(name, "bias", bias, x)
    factor, move = _table(name, "scale", scale, x), _table(name, "shift", shift, x)
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
    return _run(x, residual, gain, offset, layer=True, modulate=modulate, eps=eps, dtype=dtype)


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a * b


def _same_groups(gain: Tensor | None, offset: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if gain is not None and offset is not None and gain.shape != offset.shape:
        groups = max(gain.shape[0], offset.shape[0])
        gain, offset = gain.expand(groups, -1), offset.expand(groups, -1)
    return gain, offset


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
    gain = _table("rms_norm", "weight", weight, x)
    return _run(x, residual, gain, None, layer=False, modulate=False, eps=eps, dtype=dtype)
