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
    transforming,
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


def _reference(grad: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return reference.wide(grad).sum(0).to(dtype or grad.dtype)


def _call(grad: Tensor, dtype: torch.dtype) -> Function | None:
    rows, width = grad.shape
    reason = None
    if grad.dtype not in CODES or dtype not in (grad.dtype, torch.float32):
        reason = f"dtype {grad.dtype} to {dtype}"
    elif width % 8 or grad.data_ptr() & 15:
        reason = "a tensor cannot be read in 16-byte vectors"
    elif rows > _MAX_ROWS:
        reason = f"more than {_MAX_ROWS} rows"
    if reason:
        fell_back("bias_grad", reason)
        return None
    key = (grad.get_device(), grad.dtype, dtype)
    spec = bias_spec(CODES[grad.dtype], CODES[dtype])
    return _calls.get(key) or resolve("bias_grad", _calls, key, spec, key[0])


def _cuda(grad: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    grad, kind = grad.contiguous(), dtype or grad.dtype
    call = _call(grad, kind)
    if call is None:
        return grad.sum(0, dtype=kind)
    rows, width = grad.shape
    out = grad.new_empty(width, dtype=kind)
    if width:
        call.run(-(-width // 64), 1, (grad.data_ptr(), out.data_ptr(), rows, width))
    return out


define(
    "bias_grad(Tensor grad, ScalarType? dtype=None) -> Tensor",
    cpu=_reference,
    cuda=_cuda,
    fake=lambda grad, dtype=None: grad.new_empty(grad.shape[1], dtype=dtype or grad.dtype),
)


def sum_rows(rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sums over the rows of (M, N), accumulated in float32: the gradient of a bias.

    Args:
        rows: The gradient of the layer's output.
        dtype: Type of the result, that of ``rows`` or float32. Default that of ``rows``.
    """
    total: Tensor = _cuda(rows, dtype) if plain(rows) else torch.ops.loongforge.bias_grad(rows, dtype)
    return total


def weight_gradient(rows: Tensor, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a weight from those of (M, N) outputs and the (M, K) inputs, in a type.

    In float32 the product writes what it accumulated; elsewhere than on CUDA it is rounded in between.
    """
    if dtype == torch.float32 != rows.dtype and rows.is_cuda:
        return torch.mm(rows.t(), inputs, out_dtype=torch.float32)
    return (rows.t() @ inputs).to(dtype)


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
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor, kind: torch.dtype) -> Tensor:
        """Return the product, computed in a type."""
        low = (x.to(kind), weight.to(kind), bias.to(kind))
        # What checkpointing or offloading gives back for the weight is no parameter: its gradient is made at
        # once then, since a late one would keep the inputs that they wanted to be rid of.
        ctx.save_for_backward(*low[:2], weight)
        ctx.bias = bias
        ctx.kind = x.dtype
        return torch.nn.functional.linear(*low)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Give x its gradient, and weight and bias theirs, at once or with the others at the end."""
        x, low, weight = ctx.saved_tensors
        bias = ctx.bias
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        needs_x, *needs = ctx.needs_input_grad[:3]
        to_x = (rows @ low).view(x.shape).to(ctx.kind) if needs_x else None

        def products() -> list[Tensor]:
            made = []
            if needs[0]:
                made.append(weight_gradient(rows, inputs, weight.dtype))
            if needs[1]:
                made.append(sum_rows(rows, bias.dtype))
            return made

        wanted = [p for p, needed in zip((weight, bias), needs, strict=True) if needed]
        late = collector(grad.device, wanted)
        if late is not None:
            late.add(wanted, products, reads=(rows, inputs))
            return to_x, None, None, None
        made = iter(products())
        return to_x, next(made) if needs[0] else None, next(made) if needs[1] else None, None


_linear = direct_apply(_Linear)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``torch.nn.functional.linear`` whose bias gradient is summed by one kernel, accumulated in float32.

    Under autocast the gradients of float32 weights are not rounded to the low type on their way. The
    gradients of weight and bias run beside the backward pass where
    :class:`~loongforge_fuse.ops.beside.WeightGradients` collects them.

    Args:
        x: (..., in).
        weight: (out, in).
        bias: (out,), of the type of the result.

    Returns:
        (..., out). Forward, and the gradient of x, are torch's own products.
    """
    kind = _common_type(x, weight, bias) if ordinary(x, weight, bias) and not x.is_nested else None
    if kind is not None:
        return _linear(x, weight, bias, kind)
    if x.is_nested or transforming():
        return torch.nn.functional.linear(x, weight, bias)
    y = torch.nn.functional.linear(x, weight, bias.detach())
    if plain(y, bias):
        return _with_bias(y, bias)
    return _WithBias.apply(y, bias)  # type: ignore[no-untyped-call]


def _common_type(x: Tensor, weight: Tensor, bias: Tensor) -> torch.dtype | None:
    """Return the type in which torch would compute the product, None where that is not known here."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x.dtype if x.dtype == weight.dtype == bias.dtype else None
    low = torch.get_autocast_dtype(kind)
    known = all(t.dtype in (low, torch.float32) for t in (x, weight, bias))
    return low if known and weight.dtype == bias.dtype else None
