"""Dropout with a counter that lives on the device, so that replays of a CUDA graph draw new masks.

`philox_counter(seed)` makes the counter: an int64 tensor (seed, offset). `philox_next(counter)` copies it
out as the key of one dropout and moves the counter on. The key, not the mask, is kept for backward. The
state of all randomness is the counter tensor: save and load it with the model to continue the same sequence.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.kernels.specs import KernelSpec
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
from loongforge_fuse.ops.elementwise import checked_key, contiguous_like, elementwise_spec, unsupported

_tick_calls: dict[Hashable, Function] = {}
_dropout_calls: dict[Hashable, Function] = {}


def philox_counter(seed: int, device: torch.device | str | int) -> Tensor:
    """Return a new counter (seed, 0): int64, shape (2,), on `device`.

    Raises:
        ValueError: the seed does not fit in 63 bits.
    """
    if not 0 <= seed < 2**63:
        message = f"philox_counter: seed must be in [0, 2^63), got {seed}"
        raise ValueError(message)
    return torch.tensor([seed, 0], dtype=torch.int64, device=device)


def tick_spec() -> KernelSpec:
    """Return the specification of the counter kernel."""
    return KernelSpec(module="counter", maker="philox_tick", arguments="PPq", block=32, vector=False)


def _next_reference(counter: Tensor, steps: int) -> Tensor:
    key = counter.clone()
    counter[1] += steps
    return key


def _next_cuda(counter: Tensor, steps: int) -> Tensor:
    device = counter.get_device()
    call = _tick_calls.get(device) or resolve("philox_next", _tick_calls, device, tick_spec(), device)
    if call is None:
        return _next_reference(counter, steps)
    key = torch.empty_like(counter)
    call.run(1, 1, (counter.data_ptr(), key.data_ptr(), steps))
    return key


define(
    "philox_next(Tensor(a!) counter, int steps) -> Tensor",
    cpu=_next_reference,
    cuda=_next_cuda,
    fake=lambda counter, steps: torch.empty_like(counter),
)


def philox_next(counter: Tensor, *, steps: int = 1) -> Tensor:
    """Return the counter's value as a key and advance the counter by `steps`, both on its device.

    Raises:
        ValueError: the counter is not a contiguous int64 tensor of shape (2,).
    """
    if counter.dtype != torch.int64 or counter.shape != (2,) or not counter.is_contiguous():
        found = f"{counter.dtype} of shape {tuple(counter.shape)}"
        message = f"philox_next: counter must be a contiguous int64 tensor of shape (2,), got {found}"
        raise ValueError(message)
    if plain(counter):
        return _next_cuda(counter, steps)
    return torch.ops.loongforge.philox_next(counter, steps)


def _dropout_call(key: tuple[int, torch.dtype, torch.dtype, bool, int]) -> Function | None:
    device, x, y, added, misaligned = key
    reason = unsupported(x, y)
    if reason:
        fell_back("dropout", reason)
        return None
    spec = elementwise_spec("dropout_forward", x=CODES[x], r=CODES[y], vector=not misaligned, residual=added)
    return resolve("dropout", _dropout_calls, key, spec, device)


def _dropout_cuda(x: Tensor, residual: Tensor | None, p: float, key: Tensor) -> Tensor:
    x = x.contiguous()
    at, base = x.data_ptr(), 0
    if residual is None:
        kind = x.dtype
    else:
        residual, kind = residual.contiguous(), residual.dtype
        base = residual.data_ptr()
    odd = (at | base) & 15
    spot = (x.get_device(), x.dtype, kind, residual is not None, odd)
    call = _dropout_calls.get(spot) or _dropout_call(spot)
    if call is None or reference.drops_all(p):
        return reference.dropout_residual(x, residual, p, key)
    y = torch.empty_like(x if residual is None else residual)
    count = x.numel()
    if count:
        limit, scale = reference.threshold_of(p), reference.keep_scale(p)
        arguments = (at, base, y.data_ptr(), key.data_ptr(), count, limit, scale)
        call.run(vector_blocks(count, odd), 1, arguments)
    return y


def _backward_reference(grad: Tensor, p: float, key: Tensor, dtype: torch.dtype) -> Tensor:
    return reference.dropped(grad, p, key).to(dtype).contiguous()


def _backward_cuda(grad: Tensor, p: float, key: Tensor, dtype: torch.dtype) -> Tensor:
    grad = grad.contiguous()
    at = grad.data_ptr()
    odd = at & 15
    spot = (grad.get_device(), grad.dtype, dtype, False, odd)
    call = _dropout_calls.get(spot) or _dropout_call(spot)
    if call is None or reference.drops_all(p):
        return _backward_reference(grad, p, key, dtype)
    dx = torch.empty_like(grad, dtype=dtype)
    count = grad.numel()
    if count:
        limit, scale = reference.threshold_of(p), reference.keep_scale(p)
        arguments = (at, 0, dx.data_ptr(), key.data_ptr(), count, limit, scale)
        call.run(vector_blocks(count, odd), 1, arguments)
    return dx


_DROPOUT = define(
    "dropout_residual(Tensor x, Tensor? residual, float p, Tensor key) -> Tensor",
    cpu=reference.dropout_residual,
    cuda=_dropout_cuda,
    fake=lambda x, residual, p, key: contiguous_like(x if residual is None else residual),
)
define(
    "dropout_backward(Tensor grad, float p, Tensor key, ScalarType dtype) -> Tensor",
    cpu=_backward_reference,
    cuda=_backward_cuda,
    fake=lambda grad, p, key, dtype: contiguous_like(grad, dtype),
)


def _setup(ctx: Context, inputs: tuple, output: Tensor) -> None:
    x, residual, p, key = inputs
    ctx.save_for_backward(key)
    ctx.p, ctx.dtype, ctx.residual = p, x.dtype, residual is not None


def _grad(ctx: Context, grad: Tensor) -> tuple:
    (key,) = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[0]:
        if plain(grad):
            dx = _backward_cuda(grad, ctx.p, key, ctx.dtype)
        else:
            dx = torch.ops.loongforge.dropout_backward(grad, ctx.p, key, ctx.dtype)
    return dx, grad if ctx.residual else None, None, None


_fast = differentiable(_DROPOUT, cuda=_dropout_cuda, setup_context=_setup, backward=_grad)


def dropout_residual(
    x: Tensor, residual: Tensor | None = None, *, p: float, key: Tensor | None = None
) -> Tensor:
    """Residual + dropout(x) in one pass; the mask depends on (key, position) alone.

    Two dropouts in series with probabilities p and q are one with 1 - (1 - p)(1 - q); see
    :func:`series_probability`.

    Args:
        x: any shape.
        residual: same shape; the result has its type. None: plain dropout, in the type of x.
        p: probability to drop an element, 0 to 1, rounded to a multiple of 2^-16. 0 with a residual is a
        plain
            addition.
        key: int64 tensor (seed, offset) from :func:`philox_next`; needed when p > 0.

    Raises:
        ValueError: shapes differ, p is out of range, or p > 0 without a key.
    """
    if residual is not None and residual.shape != x.shape:
        found = f"{tuple(x.shape)} and {tuple(residual.shape)}"
        message = f"dropout_residual: x and residual must have one shape, got {found}"
        raise ValueError(message)
    drawn = checked_key("dropout_residual", p, key)
    if drawn is None:
        return x.clone() if residual is None else residual + x.to(residual.dtype)
    if plain(x, residual):
        return (
            _fast(x, residual, p, drawn) if wants_grad(x, residual) else _dropout_cuda(x, residual, p, drawn)
        )
    return torch.ops.loongforge.dropout_residual(x, residual, p, drawn)


def series_probability(*chances: float) -> float:
    """Return the drop probability of one dropout that replaces several in series."""
    kept = 1.0
    for p in chances:
        kept *= 1.0 - p
    return 1.0 - kept
