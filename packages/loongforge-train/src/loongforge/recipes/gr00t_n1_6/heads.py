"""Embodiment-specific encoders and decoder, and the flow-matching action head around the DiT."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from loongforge.errors import ConfigError
from loongforge.recipes.gr00t_n1_6.config import GrootConfig
from loongforge.recipes.gr00t_n1_6.dit import DiT

Slot = Tensor | int
"""Slots of the samples (B,), or one number that holds for all of them and needs no look-up."""


class CategoryLinear(nn.Module):
    """Linear layer with one weight per embodiment slot.

    ``W`` is (slots, in, out), ``b`` (slots, out). After :meth:`keep_only` both hold the live slots alone, as
    views of the full tensors, which stay what ``state_dict`` shows and loads.
    """

    def __init__(self, slots: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.zeros(slots, inputs, outputs))
        self.b = nn.Parameter(torch.zeros(slots, outputs))
        self.first = 0
        self._full: dict[str, Tensor] = {}

    def forward(self, x: Tensor, slot: Slot) -> Tensor:
        """Apply the weights of ``slot`` to (B, T, in)."""
        if isinstance(slot, int):
            at = slot - self.first
            return functional.linear(x, self.W[at].t(), self.b[at])
        at_each = slot - self.first if self.first else slot
        return torch.baddbmm(self.b[at_each][:, None].to(x.dtype), x, self.W[at_each].to(x.dtype))

    def keep_only(self, first: int, count: int) -> None:
        """Make only slots ``first`` to ``first + count - 1`` parameters; the others keep their values."""
        if self._full:
            msg = "this layer already keeps a part of its slots"
            raise ConfigError(msg)
        slots = self.W.shape[0]
        if not 0 <= first < first + count <= slots:
            msg = f"slots {first}..{first + count - 1} are not within 0..{slots - 1}"
            raise ConfigError(msg)
        self.first = first
        for name in ("W", "b"):
            parameter = getattr(self, name)
            self._full[name] = parameter.detach()
            live = nn.Parameter(
                self._full[name][first : first + count], requires_grad=parameter.requires_grad
            )
            self.register_parameter(name, live)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CategoryLinear:  # noqa: FBT001
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, full in self._full.items():
            moved = fn(full)
            self._full[name] = moved
            live = getattr(self, name)
            live.data = moved[self.first : self.first + live.shape[0]]
        return self

    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:  # noqa: FBT001
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, full in self._full.items():
            destination[prefix + name] = full

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *rest: object) -> None:
        given = dict(state_dict)
        for name, full in self._full.items():
            value = given.get(prefix + name)
            if isinstance(value, Tensor) and value.shape == full.shape:
                full.copy_(value)
                given[prefix + name] = full[self.first : self.first + getattr(self, name).shape[0]]
        super()._load_from_state_dict(given, prefix, *rest)


class CategoryMLP(nn.Module):
    """Two category layers around a ReLU."""

    def __init__(self, slots: int, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.layer1 = CategoryLinear(slots, inputs, inner)
        self.layer2 = CategoryLinear(slots, inner, outputs)

    def forward(self, x: Tensor, slot: Slot) -> Tensor:
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

    def forward(self, actions: Tensor, buckets: Tensor, slot: Slot) -> Tensor:
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
