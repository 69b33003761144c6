"""Small models and data sets for tests of trainers: no network, no video, exact in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

Sample = dict[str, Tensor]


class ToyData:
    """``length`` samples of a linear task: ``x`` (6,), ``y`` (T, 2), a mask of ragged lengths, an index."""

    def __init__(self, length: int = 64, *, horizon: int = 4, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._x = torch.randn(length, 6, generator=generator)
        weight = torch.randn(6, 2 * horizon, generator=generator)
        self._y = (self._x @ weight).reshape(length, horizon, 2)
        lengths = torch.randint(1, horizon + 1, (length,), generator=generator)
        self._mask = torch.arange(horizon)[None, :] < lengths[:, None]
        self.fingerprint = f"toy-{length}-{horizon}-{seed}"

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return {
            "x": self._x[index],
            "y": self._y[index],
            "mask": self._mask[index],
            "index": torch.tensor(index),
        }


def collate(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Stack samples."""
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


class ToyModel(nn.Module):
    """A small flow-matching-like regressor with the whole model protocol: draws, counts, per-sample sums.

    Args:
        dropout: Share of hidden units dropped; uses the global generator, unlike the draws.
        noise: Scale of the noise that :meth:`draw` adds to the input.
        seed: Seed of the weights; the global generator is left alone.
    """

    def __init__(
        self, *, horizon: int = 4, hidden: int = 16, dropout: float = 0.0, noise: float = 0.1, seed: int = 0
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Dropout(dropout))
            self.head = nn.Linear(hidden, 2 * horizon)
        self._horizon = horizon
        self._noise = noise

    def loss_count(self, batch: Mapping[str, object]) -> Tensor:
        """Return valid action values per sample."""
        mask = batch["mask"]
        if not isinstance(mask, Tensor):
            msg = "mask"
            raise TypeError(msg)
        return mask.sum(dim=1) * 2

    def draw(
        self,
        batch: Mapping[str, object],
        generator: Sequence[torch.Generator] | torch.Generator | None = None,
    ) -> dict[str, object]:
        """Add this micro-batch's noise."""
        x = batch["x"]
        if not isinstance(x, Tensor):
            msg = "x"
            raise TypeError(msg)
        if isinstance(generator, Sequence):
            noise = torch.stack([torch.randn(x.shape[1:], generator=one) for one in generator])
        else:
            noise = torch.randn(x.shape, generator=generator)
        return {**batch, "noise": noise.to(x.device)}

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the masked squared error as mean, per-sample sum and per-sample count."""
        x = batch["x"]
        if "noise" in batch:
            x = x + self._noise * batch["noise"]
        out = self.head(self.body(x)).reshape(-1, self._horizon, 2)
        error = (out - batch["y"]).square() * batch["mask"][..., None]
        sums = error.sum(dim=(1, 2))
        counts = batch["mask"].sum(dim=1) * 2
        return {"loss": sums.sum() / counts.sum().clamp(min=1), "loss_sum": sums, "loss_count": counts}
