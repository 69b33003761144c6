"""Rows in e4m3 with one scale a row, as scaled products read them; an activation may be part of the pass.

Nothing here has a derivative: float8 is for layers that never train and pass no gradient on.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import CODES, define, fell_back, load_first, plain
from loongforge_fuse.ops.elementwise import unsupported
from loongforge_fuse.ops.norm_plan import RowPlan
from loongforge_fuse.ops.quantise_plan import ACTIVATIONS, job_of, quantise_spec, ways_of
from loongforge_fuse.ops.variants import forget_on_change, in_turn

_NAME = "quantise_rows"
_calls: dict[Hashable, tuple[Function, int]] = {}
forget_on_change(_calls.clear)


def _call(key: tuple[int, int, torch.dtype, torch.dtype, str]) -> tuple[Function, int] | None:
    """Return the kernel, and how many rows one of its blocks takes."""
    device, width, x, up, activation = key
    ways = ways_of(width, activation)
    reason = unsupported(x) or (f"dtypes {x}, {up}" if x != up else None)
    if reason is None and not ways:
        reason = f"width {width} is not a multiple of 8 in range"
    if reason:
        fell_back(_NAME, reason)
        return None
    plans: list[RowPlan] = [ways[way] for way in in_turn(job_of(width, activation), tuple(ways))]
    specs = [quantise_spec(plan, width, CODES[x], activation) for plan in plans]
    loaded = load_first(_NAME, specs, device)
    if loaded is None:
        return None
    plan = plans[loaded[1]]
    found = _calls[key] = loaded[0], plan.block // plan.threads
    return found


def _quantise_cuda(x: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    if not x.is_contiguous():
        x = x.contiguous()
    at, second, other = x.data_ptr(), 0, x.dtype
    if up is not None:
        if not up.is_contiguous():
            up = up.contiguous()
        second, other = up.data_ptr(), up.dtype
    if (at | second) & 15:
        fell_back(_NAME, "a tensor cannot be read in 16-byte vectors")
        return reference.quantise_rows(x, up, activation)
    width = x.shape[-1]
    key = (x.get_device(), width, x.dtype, other, activation)
    found = _calls.get(key) or _call(key)
    if found is None:
        return reference.quantise_rows(x, up, activation)
    rows = x.numel() // width
    y = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        call, each = found
        call.run(-(-rows // each), 1, (at, second, y.data_ptr(), scale.data_ptr(), rows, width))
    return y, scale


def _fake(x: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows = x.numel() // width
    return (
        x.new_empty((rows, width), dtype=torch.float8_e4m3fn),
        x.new_empty((rows, 1), dtype=torch.float32),
    )


define(
    "quantise_rows(Tensor x, Tensor? up, str activation) -> (Tensor, Tensor)",
    cpu=reference.quantise_rows,
    cuda=_quantise_cuda,
    fake=_fake,
)


def quantise_rows(x: Tensor, *, up: Tensor | None = None, activation: str = "none") -> tuple[Tensor, Tensor]:
    """Quantise the rows of x, or of an activation of it, to e4m3 in one pass.

    With an activation the numbers are those of `gelu_tanh` or `silu_mul` followed by this without one: what
    they would have stored, rounded to the type of x, is what is quantised.

    Args:
        x: (..., K), K > 0; bf16, f16 or f32 on a GPU of compute capability 8.9 or more; elsewhere, and for
            other types, plain torch operators. Not differentiated.
        up: for "silu_mul", the factor of silu(x), of its shape and type.
        activation: "none", "gelu_tanh" or "silu_mul".

    Returns:
        float8_e4m3fn (M, K), where M is the product of the other dimensions, and the float32 scales (M, 1)
        that multiply it back. With m the largest magnitude of a row (at least 1e-12): x * (448 / m), to the
        nearest, ties to even, and m * (1 / 448). A row with a NaN or an infinity multiplies back to NaN.

    Raises:
        ValueError: an unknown activation, rows without elements, or `up` missing, unasked for or of another
            shape.
    """
    if activation not in ACTIVATIONS:
        message = f"quantise_rows: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        raise ValueError(message)
    if not x.dim() or not x.shape[-1]:
        message = f"quantise_rows: x needs rows of at least one element, got shape {tuple(x.shape)}"
        raise ValueError(message)
    if (up is not None) != (activation == "silu_mul") or (up is not None and up.shape != x.shape):
        given = None if up is None else tuple(up.shape)
        message = (
            f"quantise_rows: 'silu_mul', and nothing else, takes a second tensor of the shape of x; got"
            f" {activation!r} with x {tuple(x.shape)} and up {given}"
        )
        raise ValueError(message)
    if plain(x, up):
        return _quantise_cuda(x, up, activation)
    return torch.ops.loongforge.quantise_rows(x.detach(), None if up is None else up.detach(), activation)
