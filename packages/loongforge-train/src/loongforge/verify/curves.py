"""What one run left behind, and how far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from loongforge.config import TrainConfig
from loongforge.ranks import Ranks
from loongforge.records import read_metrics
from loongforge.verify.toggles import Tolerance

Build = Callable[[TrainConfig, Ranks], tuple[nn.Module, Callable[[], object]]]
"""Builds a run: the model, and a function that trains it."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one run left."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    rates: tuple[float, ...]
    weights: Mapping[str, Tensor]
    records: tuple[Mapping[str, object], ...]


@dataclass(frozen=True, kw_only=True)
class Distance:
    """How far two runs are apart, in the units of :class:`Tolerance`."""

    loss: float
    """Largest relative difference of a step's loss."""
    norm: float
    """Largest relative difference of a step's gradient norm."""
    weights: float
    """Largest absolute difference of a final weight over the summed learning rates."""

    def within(self, allowed: Tolerance) -> bool:
        """Tell whether no difference is larger than allowed."""
        return self.loss <= allowed.loss and self.norm <= allowed.norm and self.weights <= allowed.weights


def run_curve(config: TrainConfig, ranks: Ranks, build: Build) -> Curve:
    """Train from the start and return losses, norms and final weights."""
    model, train = build(config, ranks)
    train()
    records = read_metrics(config.output, rank=ranks.rank)
    return Curve(
        losses=tuple(known(record, "loss") for record in records),
        norms=tuple(known(record, "grad_norm") for record in records),
        rates=tuple(known(record, "lr") for record in records),
        weights={name: value.detach().float().cpu().clone() for name, value in model.state_dict().items()},
        records=tuple(records),
    )


def distance(first: Curve, second: Curve) -> Distance:
    """Compare two runs of the same model step by step; runs of unequal length are infinitely far apart."""
    travelled = sum(first.rates) or 1.0
    weights = max(
        (
            float((value - second.weights[name]).abs().max())
            for name, value in first.weights.items()
            if value.numel()
        ),
        default=0.0,
    )
    same_length = len(first.losses) == len(second.losses)
    return Distance(
        loss=largest(first.losses, second.losses) if same_length else math.inf,
        norm=largest(first.norms, second.norms) if same_length else math.inf,
        weights=math.inf if math.isnan(weights) else weights / travelled,
    )


def largest(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest relative difference; a value that is missing on one side only counts as infinite."""
    worst = 0.0
    for a, b in zip(first, second, strict=False):
        if math.isnan(a) and math.isnan(b):
            continue
        difference = abs(a - b) / max(abs(a), 1e-8)
        worst = max(worst, math.inf if math.isnan(difference) else difference)
    return worst


def known(record: Mapping[str, object], name: str) -> float:
    """Return a numeric field of a record, or NaN."""
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) else math.nan
