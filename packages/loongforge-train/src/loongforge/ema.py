"""Exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from loongforge.parallel.tensors import local, split_like


class WeightAverage:
    """Keeps ``average = decay * average + (1 - decay) * weight`` in float32 for every parameter.

    Averages of sharded weights are sharded like them.

    Args:
        model: Model whose parameters are averaged, by name.
        decay: Share of the old average, between 0 and 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0 < decay < 1:
            msg = f"decay is {decay}: allowed is a number between 0 and 1"
            raise ValueError(msg)
        self.decay = decay
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        device = next(iter(self._parameters.values())).device if self._parameters else torch.device("cpu")
        self._share = torch.tensor(1 - decay, device=device)
        self._average = {name: p.detach().float().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, skipped: Tensor | None = None) -> None:
        """Take in the present weights; a skipped step (a device flag, not read here) changes nothing."""
        share = self._share if skipped is None else torch.where(skipped > 0, 0.0, self._share)
        for name, parameter in self._parameters.items():
            local(self._average[name]).lerp_(local(parameter.detach()).float(), share)

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the present weights."""
        for name, parameter in self._parameters.items():
            self._average[name].copy_(parameter.detach())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by parameter name, each where its parameter is."""
        return dict(self._average)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over stored averages: whole tensors, equal on all ranks.

        Raises:
            ValueError: Names differ.
        """
        missing, extra = set(self._average) - set(state), set(state) - set(self._average)
        if missing or extra:
            msg = f"weight average: missing {sorted(missing)[:5]}, not in the model {sorted(extra)[:5]}"
            raise ValueError(msg)
        for name, value in state.items():
            self._average[name].copy_(split_like(value, self._average[name]))

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Write the averages into the parameters of ``model``, in place."""
        for name, parameter in model.named_parameters():
            if name in self._average:
                parameter.copy_(self._average[name])
