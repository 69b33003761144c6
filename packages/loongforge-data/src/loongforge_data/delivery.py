"""What a pipeline hands to the loader, and what the loader needs of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loongforge_data._core import Lease
from loongforge_data.order import EpochPlan


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """A batch as the pipeline hands it over."""

    value: object
    """The collated batch (numpy), or None when no sample of it was good."""
    indices: npt.NDArray[np.int64]
    """Samples that were asked for."""
    bad: tuple[tuple[int, str], ...]
    """(sample index, what went wrong) of those left out."""
    lease: Lease | None = None
    """The slot the arrays lie in, or None."""


class Pipeline(Protocol):
    """Delivers the batches of an epoch in order."""

    def begin(self, plan: EpochPlan, batch: int) -> None:
        """Start at a batch of an epoch; whatever was under way is dropped."""

    def next(self) -> Delivery:
        """Return the next batch."""

    def counters(self) -> Mapping[str, int]:
        """Return the workers' counters, summed."""

    def depths(self) -> Mapping[str, int]:
        """Return queue depths."""

    def close(self) -> None:
        """Stop and free everything."""
