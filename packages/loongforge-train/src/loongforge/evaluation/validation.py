"""Validation loss on held-out episodes, with the same noise every time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from loongforge.errors import ConfigError

Sample = Mapping[str, object]
Collate = Callable[[Sequence[Sample]], dict[str, object]]


class Samples(Protocol):
    """A map-style data set."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Sample:
        """Return one sample."""
        ...


class Validation:
    """Measures the loss of a model on fixed samples with fixed draws.

    The samples are spread evenly over the data set and read once; the draws depend on the seed and the place
    alone, so two measurements differ only by the weights.

    Args:
        dataset: Held-out data.
        collate: The recipe's collate function.
        samples: Number of samples that are used at most.
        batch_size: Samples of one forward pass.
        seed: Seed of the draws.

    Raises:
        ConfigError: The data set is empty or a number is not positive.
    """

    def __init__(
        self, dataset: Samples, collate: Collate, *, samples: int = 256, batch_size: int = 16, seed: int = 0
    ) -> None:
        if len(dataset) == 0:
            msg = "the validation data set has no sample: hold out an episode that exists"
            raise ConfigError(msg)
        if samples < 1 or batch_size < 1:
            msg = f"samples and batch_size must be at least 1, got {samples} and {batch_size}"
            raise ConfigError(msg)
        count = min(samples, len(dataset))
        self._indices = [i * len(dataset) // count for i in range(count)]
        self._dataset, self._collate = dataset, collate
        self._batch_size, self._seed = batch_size, seed
        self._batches: list[dict[str, object]] | None = None

    @property
    def samples(self) -> int:
        """Number of samples that are measured."""
        return len(self._indices)

    def batches(self) -> list[dict[str, object]]:
        """Return the host batches, read on first use and kept (images as uint8)."""
        if self._batches is None:
            size = self._batch_size
            groups = [self._indices[at : at + size] for at in range(0, len(self._indices), size)]
            self._batches = [self._collate([self._dataset[i] for i in group]) for group in groups]
        return self._batches

    @torch.no_grad()
    def loss(self, model: nn.Module, *, autocast: torch.dtype | None = None) -> float:
        """Return the loss over all samples: summed error / summed valid elements; waits for the device.

        Args:
            model: A model with the recipes' protocol; its training mode is restored.
            autocast: 16-bit type of the forward pass, or None.
        """
        device = next(model.parameters()).device
        was_training = model.training
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=device)
        try:
            for number, batch in enumerate(self.batches()):
                drawn = _draw(model, batch, self._seed * 1_000_003 + number)
                moved = {
                    name: value.to(device) if isinstance(value, Tensor) else value
                    for name, value in drawn.items()
                }
                with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
                    out = model(moved)
                sums += torch.stack((out["loss_sum"].sum(), out["loss_count"].sum())).double()
        finally:
            model.train(was_training)
        total, count = sums.tolist()
        return total / max(count, 1e-6)


def _draw(model: nn.Module, batch: dict[str, object], seed: int) -> dict[str, object]:
    draw = getattr(model, "draw", None)
    if not callable(draw):
        return batch
    drawn = draw(batch, torch.Generator().manual_seed(seed))
    return dict(drawn)
