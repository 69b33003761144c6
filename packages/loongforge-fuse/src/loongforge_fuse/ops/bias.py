"""The gradient of a linear layer's bias by one fast kernel, without touching the layer's forward."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.kernels.specs import KernelSpec
from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import CODES, Context, define, direct_apply, fell_back, plain, resolve

_calls: dict[Hashable, Function] = {}
# One block takes 64 columns; with more rows than this, torch's reduction over rows has more parallelism.
_MAX_ROWS = 16384
_AHEAD = 4  # rows in flight for a thread


def bias_spec(x: str, y: str) -> KernelSpec:
    """Return the specification of the kernel."""
    return KernelSpec(
        module="columns",
        maker="bias_sums",
        options={"x": x, "y": y, "ahead": _AHEAD},
        arguments="PPqq",
        block=1024,
    )


def _reference(grad: Tensor) -> Tensor:
    return reference.wide(grad).sum(0).to(grad.dtype)


def _call(grad: Tensor) -> Function | None:
    rows, width = grad.shape
    reason = None
    if grad.dtype not in CODES:
        reason = f"dtype {grad.dtype}"
    elif width % 8 or grad.data_ptr() & 15:
        reason = "a tensor cannot be read in 16-byte vectors"
    elif rows > _MAX_ROWS:
        reason = f"more than {_MAX_ROWS} rows"
    if reason:
        fell_back("bias_grad", reason)
        return None
    key = (grad.get_device(), grad.dtype)
    code = CODES[grad.dtype]
    return _calls.get(key) or resolve("bias_grad", _calls, key, bias_spec(code, code), key[0])


def _cuda(grad: Tensor) -> Tensor:
    grad = grad.contiguous()
    call = _call(grad)
    if call is None:
        return grad.sum(0)
    rows, width = grad.shape
    out = grad.new_empty(width)
    if width:
        call.run(-(-width // 64), 1, (grad.data_ptr(), out.data_ptr(), rows, width))
    return out


define(
    "bias_grad(Tensor grad) -> Tensor",
    cpu=_reference,
    cuda=_cuda,
    fake=lambda grad: grad.new_empty(grad.shape[1]),
)


class _WithBias(torch.autograd.Function):
    """Passes y on and gives the bias its gradient."""

    @staticmethod
    def forward(ctx: Context, y: Tensor, bias: Tensor) -> Tensor:
        """Return y as it is."""
        ctx.kind = bias.dtype
        return y.view_as(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Pass the gradient on, and sum it over rows for the bias."""
        rows = grad.reshape(-1, grad.shape[-1])
        total = _cuda(rows) if plain(rows) else torch.ops.loongforge.bias_grad(rows)
        return grad, total.to(ctx.kind)


_apply = direct_apply(_WithBias)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``torch.nn.functional.linear`` whose bias gradient is summed by one kernel, accumulated in float32.

    Args:
        x: (..., in).
        weight: (out, in).
        bias: (out,), of the type of the result.

    Returns:
        (..., out). Forward, and the gradients of x and weight, are torch's own.
    """
    y = torch.nn.functional.linear(x, weight, bias.detach())
    if plain(y, bias):
        return _apply(y, bias)
    return _WithBias.apply(y, bias)  # type: ignore[no-untyped-call]
