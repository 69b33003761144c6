"""Embodiment-specific encoders and decoder, and the flow-matching action head around the DiT."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from loongforge.recipes.gr00t_n1_6.config import GrootConfig
from loongforge.recipes.gr00t_n1_6.dit import DiT


class CategoryLinear(nn.Module):
    """Linear layer with one weight per embodiment slot.

    ``W`` is (slots, in, out). After :meth:`keep_only` it holds the live slots alone, as a view of the full
    tensor, which stays what ``state_dict`` shows.
    """

    def __init__(self, slots: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.zeros(slots, inputs, outputs))
        self.b = nn.Parameter(torch.zeros(slots, outputs))

    def forward(self, x: Tensor, slot: Tensor | None) -> Tensor:
        """Apply slot ``slot`` (B,) to each row of (B, T, in); None means the only slot there is."""
        if slot is None:
            return functional.linear(x, self.W[0].t(), self.b[0])
        return torch.baddbmm(self.b[slot][:, None].to(x.dtype), x, self.W[slot].to(x.dtype))


class CategoryMLP(nn.Module):
    """Two category layers around a ReLU."""

    def __init__(self, slots: int, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(slots, inputs, inner)
        self.layer2 = CategoryLinear(slots, inner, outputs)

    def forward(self, x: Tensor, slot: Tensor | None) -> Tensor:
        """Map (B, T, in) to (B, T, out)."""
        return self.layer2(functional.relu(self.layer1(x, slot)), slot)


def action_time_encoding(buckets: Tensor, steps: int, width: int) -> Tensor:
    """Sinusoidal features (B, steps, width) of integer times (B,), sines first, equal for all steps."""
    half = width // 2
    exponent = -torch.arange(half, dtype=torch.float32, device=buckets.device) * (math.log(10_000) / half)
    angles = buckets[:, None].float() * torch.exp(exponent)
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[:, None].expand(-1, steps, -1)


class ActionEncoder(nn.Module):
    """Encoder of noisy actions and the flow time."""

    def __init__(self, slots: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.W1 = CategoryLinear(slots, action_dim, width)
        self.W2 = CategoryLinear(slots, 2 * width, width)
        self.W3 = CategoryLinear(slots, width, width)

    def forward(self, actions: Tensor, buckets: Tensor, slot: Tensor | None) -> Tensor:
        """Map actions (B, T, A) and buckets (B,) to tokens (B, T, width)."""
        up = self.W1(actions, slot)
        time = action_time_encoding(buckets, actions.shape[1], self.width).to(up.dtype)
        return self.W3(functional.silu(self.W2(torch.cat((up, time), dim=-1), slot)), slot)


class ActionHead(nn.Module):
    """State and action tokens, DiT, decoder."""

    def __init__(self, config: GrootConfig) -> None:
        super().__init__()
        head, width = config.head, config.dit.width
        slots = head.max_embodiments
        self.config = head
        self.model = DiT(config.dit, config.language.hidden_size)
        self.state_encoder = CategoryMLP(slots, head.max_state_dim, head.hidden_size, width)
        self.action_encoder = ActionEncoder(slots, head.max_action_dim, width)
        self.action_decoder = CategoryMLP(
            slots, config.dit.output_size, head.hidden_size, head.max_action_dim
        )
        self.vlln = nn.LayerNorm(config.language.hidden_size)
        self.position_embedding = nn.Embedding(head.max_positions, width)
        if head.state_dropout > 0:
            self.mask_token = nn.Parameter(torch.zeros(1, 1, width))

    def category_layers(self) -> Sequence[tuple[str, CategoryLinear]]:
        """Return the embodiment-specific layers with their names."""
        return [(n, m) for n, m in self.named_modules() if isinstance(m, CategoryLinear)]
