"""Linear layers that train: bias gradients by one fast kernel, weight gradients beside the backward pass."""

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
    direct_apply,
    fell_back,
    ordinary,
    plain,
    resolve,
)
from loongforge_fuse.ops.beside import collector

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


def sum_rows(rows: Tensor) -> Tensor:
    """Return the sums over the rows of (M, N), accumulated in float32: the gradient of a bias."""
    total: Tensor = _cuda(rows) if plain(rows) else torch.ops.loongforge.bias_grad(rows)
    return total


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
        return grad, sum_rows(rows).to(ctx.kind)


_with_bias = direct_apply(_WithBias)


class _Linear(torch.autograd.Function):
    """A product with a bias whose weight gradients may run beside the backward pass."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return the product."""
        ctx.save_for_backward(x, weight, bias)
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Give x its gradient, and weight and bias theirs, at once or with the others at the end."""
        x, weight, bias = ctx.saved_tensors
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        needs_x, *needs = ctx.needs_input_grad
        to_x = (rows @ weight).view(x.shape) if needs_x else None

        def products() -> list[Tensor]:
            made = []
            if needs[0]:
                made.append(rows.t() @ inputs)
            if needs[1]:
                made.append(sum_rows(rows))
            return made

        wanted = [p for p, needed in zip((weight, bias), needs, strict=True) if needed]
        late = collector(grad.device, wanted)
        if late is not None:
            late.add(wanted, products, reads=(rows, inputs))
            return to_x, None, None
        made = iter(products())
        return to_x, next(made) if needs[0] else None, next(made) if needs[1] else None


_linear = direct_apply(_Linear)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``torch.nn.functional.linear`` whose bias gradient is summed by one kernel, accumulated in float32.

    The gradients of weight and bias run beside the backward pass where
    :class:`~loongforge_fuse.ops.beside.WeightGradients` collects them.

    Args:
        x: (..., in).
        weight: (out, in).
        bias: (out,), of the type of the result.

    Returns:
        (..., out). Forward, and the gradients of x and weight, are torch's own products.
    """
    if ordinary(x, weight, bias) and _alike(x, weight, bias):
        return _linear(x, weight, bias)
    y = torch.nn.functional.linear(x, weight, bias.detach())
    if plain(y, bias):
        return _with_bias(y, bias)
    return _WithBias.apply(y, bias)  # type: ignore[no-untyped-call]


def _alike(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Tell whether the product and its gradients have one type, without autocast."""
    same = x.dtype == weight.dtype == bias.dtype
    return same and not torch.is_autocast_enabled(x.device.type)
