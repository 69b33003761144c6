"""Float8 for frozen linear layers: e4m3 weights and activations with one scale per row, products in bf16.

Only layers that never train are touched: their weights are quantised once, and no gradient passes through
them. The scaled product is torch's own (``torch._scaled_mm``) on devices that have it; elsewhere, and as
the reference, the same quantised numbers are multiplied in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

E4M3_MAX = 448.0
_TINY = 1e-12
ALIGNMENT = 16
"""Rows and columns of a scaled product must be multiples of this many elements."""


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the rows of ``x`` (M, K) to e4m3.

    Returns:
        ``(M, K)`` float8_e4m3fn and the float32 scales ``(M, 1)`` that multiply it back.
    """
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=_TINY) / E4M3_MAX
    return (wide / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def scaled_product(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply (M, K) by the transpose of (N, K), both e4m3 with row scales: (M, N) bf16."""
    if x.is_cuda:
        return torch._scaled_mm(  # noqa: SLF001 - torch's public twin does not cover row scales in all versions
            x,
            weight.t(),
            scale_a=x_scale,
            scale_b=weight_scale.t(),
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    product = (x.float() * x_scale) @ (weight.float() * weight_scale).t()
    return (product if bias is None else product + bias.float()).to(torch.bfloat16)


class Float8FrozenLinear(nn.Module):
    """A frozen linear layer computed in float8.

    The original parameters stay where they are and keep their names, so that the state dict does not
    change; the quantised copy is no buffer of it.

    Args:
        linear: The layer; its parameters must not require gradients.

    Raises:
        ValueError: A trainable layer, or sizes that are not multiples of 16.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        problem = float8_problem(linear)
        if problem is not None:
            message = f"cannot compute this linear layer in float8: {problem}"
            raise ValueError(message)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        weight, scale = quantise_rows(linear.weight.detach())
        self.register_buffer("weight_float8", weight, persistent=False)
        self.register_buffer("weight_scale", scale, persistent=False)
        # A checkpoint is loaded into the original weight; the quantised copy has to follow.
        self.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda module, _: module.requantise()
        )

    @torch.no_grad()
    def requantise(self) -> None:
        """Quantise the weight anew, into the same memory; call it after changing the weight in place."""
        weight, scale = quantise_rows(self.weight.detach())
        for buffer, value in ((self.weight_float8, weight), (self.weight_scale, scale)):
            if isinstance(buffer, Tensor):
                buffer.copy_(value)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., K) to (..., N), in the dtype of ``x``; in bfloat16 under autocast."""
        if torch.is_grad_enabled() and x.requires_grad:
            message = (
                "a float8 layer passes no gradient on, but its input needs one: something below it trains; "
                "leave this layer out of the float8 rule's pattern"
            )
            raise RuntimeError(message)
        rows = x.reshape(-1, self.in_features)
        quantised, scale = quantise_rows(rows)
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        weight, weight_scale = self.weight_float8, self.weight_scale
        if not isinstance(weight, Tensor) or not isinstance(weight_scale, Tensor):
            message = "the quantised weight is gone; apply the precision policy again"
            raise TypeError(message)
        product = scaled_product(quantised, scale, weight, weight_scale, bias)
        result = product.view(*x.shape[:-1], self.out_features)
        return result if torch.is_autocast_enabled(x.device.type) else result.to(x.dtype)


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
