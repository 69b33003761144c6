"""Float8 for frozen linear layers: e4m3 weights and activations with one scale per row, products in bf16.

Only layers that never train are touched: their weights are quantised once, and no gradient passes through
them. The scaled product is torch's own (``torch._scaled_mm``) on devices that have it; elsewhere, and as
the reference, the same quantised numbers are multiplied in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from loongforge_fuse.ops._common import fell_back
from loongforge_fuse.ops.quantise import quantise_rows
from loongforge_fuse.ops.quantise_plan import FLOAT8_CAPABILITY

__all__ = ["Float8FrozenLinear", "float8_problem", "quantise_rows", "scaled_product", "use_float8"]
ALIGNMENT = 16
"""Rows and columns of a scaled product must be multiples of this many elements."""
Rows = tuple[Tensor, Tensor]
"""Quantised rows (M, K) and their scales (M, 1)."""


def scaled_product(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply (M, K) by the transpose of (N, K), both e4m3 with row scales: (M, N) bf16.

    On a GPU this is torch's scaled product, which needs compute capability 8.9; the bias is bf16 there.
    """
    if not x.is_cuda:
        return _wide_product(x, x_scale, weight, weight_scale, bias)
    if not x.shape[0]:
        return x.new_empty((0, weight.shape[0]), dtype=torch.bfloat16)
    return torch._scaled_mm(  # noqa: SLF001 - torch's public twin does not cover row scales in all versions
        x,
        weight.t(),
        scale_a=x_scale,
        scale_b=weight_scale.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _wide_product(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    product = (x.float() * x_scale) @ (weight.float() * weight_scale).t()
    return (product if bias is None else product + bias.float()).to(torch.bfloat16)


def _missing_product(device: torch.device) -> str | None:
    """Return why a GPU has no scaled product, or None."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor >= FLOAT8_CAPABILITY:
        return None
    return f"float8 needs compute capability {FLOAT8_CAPABILITY / 10}, this GPU has {major}.{minor}"


class Float8FrozenLinear(nn.Module):
    """A frozen linear layer computed in float8.

    The original parameters stay where they are and keep their names, so that the state dict does not
    change; the quantised copies are no buffers of it. :meth:`rows` and :meth:`multiply` are the two halves of
    the forward pass: layers that read the same input share the rows, and an activation in front of the layer
    can be part of making them.

    Args:
        linear: The layer; its parameters must not require gradients.

    Raises:
        ValueError: A trainable layer, or sizes that are not multiples of 16.
    """

    weight_float8: Tensor
    weight_scale: Tensor
    bias_bfloat16: Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        problem = float8_problem(linear)
        if problem is not None:
            message = f"cannot compute this linear layer in float8: {problem}"
            raise ValueError(message)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._quantise()
        # A checkpoint is loaded into the original weight; the quantised copy has to follow.
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda module, _: module.requantise()
        )

    def _copies(self) -> tuple[Tensor, Tensor, Tensor | None]:
        weight, scale = quantise_rows(self.weight.detach())
        return weight, scale, None if self.bias is None else self.bias.detach().to(torch.bfloat16, copy=True)

    @torch.no_grad()
    def _quantise(self) -> None:
        """Make the copies that the product reads, on the device of the weight."""
        names = ("weight_float8", "weight_scale", "bias_bfloat16")
        for name, value in zip(names, self._copies(), strict=True):
            self.register_buffer(name, value, persistent=False)
        self._missing = _missing_product(self.weight.device)

    @torch.no_grad()
    def requantise(self) -> None:
        """Quantise the weight anew, into the same memory; call it after changing weight or bias in place."""
        buffers = (self.weight_float8, self.weight_scale, self.bias_bfloat16)
        for buffer, value in zip(buffers, self._copies(), strict=True):
            if buffer is not None and value is not None:
                buffer.copy_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001 - torch's
        before = (self.weight_float8.dtype, self.weight.device)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # A cast to another type would reach the quantised copies too.
        if (self.weight_float8.dtype, self.weight.device) != before:
            self._quantise()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., K) to (..., N), in the dtype of ``x``; in bfloat16 under autocast."""
        return self.multiply(self.rows(x), x)

    def rows(self, x: Tensor, *, up: Tensor | None = None, activation: str = "none") -> Rows:
        """Quantise what the layer reads: x (..., K), or an activation of it in the same pass.

        Args:
            x: The input, or what the activation in front of the layer reads.
            up: As of :func:`loongforge_fuse.ops.quantise_rows`.
            activation: ``none``, ``gelu_tanh`` or ``silu_mul``.

        Raises:
            RuntimeError: The input needs a gradient, or the layer was made to train.
        """
        if torch.is_grad_enabled() and self.weight.requires_grad:
            message = (
                "a float8 layer does not train, but its weight requires a gradient now; freeze it, or leave "
                "this layer out of the float8 rule's pattern"
            )
            raise RuntimeError(message)
        if torch.is_grad_enabled() and (x.requires_grad or (up is not None and up.requires_grad)):
            message = (
                "a float8 layer passes no gradient on, but its input needs one: something below it trains; "
                "leave this layer out of the float8 rule's pattern"
            )
            raise RuntimeError(message)
        return quantise_rows(x, up=up, activation=activation)

    def multiply(self, rows: Rows, like: Tensor) -> Tensor:
        """Multiply quantised rows; the result has the leading shape and the dtype of ``like``."""
        product = scaled_product
        if self._missing is not None:
            product = _wide_product
            if not torch.compiler.is_compiling():
                fell_back("scaled_product", self._missing)
        found = product(*rows, self.weight_float8, self.weight_scale, self.bias_bfloat16)
        result = found.view(*like.shape[:-1], self.out_features)
        return result if torch.is_autocast_enabled(like.device.type) else result.to(like.dtype)


def float8_problem(linear: nn.Linear) -> str | None:
    """Return why a layer cannot run in float8, or None."""
    if any(p.requires_grad for p in linear.parameters()):
        return "it trains; float8 is for frozen layers only"
    if linear.in_features % ALIGNMENT or linear.out_features % ALIGNMENT:
        return f"sizes {linear.in_features} -> {linear.out_features} are not multiples of {ALIGNMENT}"
    return None


def use_float8(model: nn.Module, name: str) -> nn.Linear:
    """Replace the linear layer ``name`` of ``model`` by its float8 form; return the layer it replaces."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    linear = parent.get_submodule(child)
    if not isinstance(linear, nn.Linear):
        message = f"'{name}' is a {type(linear).__name__}, float8 needs nn.Linear"
        raise TypeError(message)
    setattr(parent, child, Float8FrozenLinear(linear))
    return linear
