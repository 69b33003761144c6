"""Quantiles of a stream: exact while it is short, then a mergeable sketch with a known rank error."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_EXACT = 1 << 20  # values kept before the first compaction
_CAPACITY = 1 << 14  # values per level afterwards


class QuantileSketch:
    """A KLL-like sketch with deterministic compaction.

    Values are kept as they are up to `exact_limit`. Beyond that, full levels are sorted and every second
    value moves up with twice the weight, alternating between odd and even ones, so the same data in the same
    order always gives the same result. Each compaction of a level of weight w can move a rank by at most w,
    which is summed up in `rank_error`.

    Args:
        exact_limit: Values kept before anything is thinned.
        capacity: Values per level after that.
    """

    def __init__(self, *, exact_limit: int = _EXACT, capacity: int = _CAPACITY) -> None:
        if exact_limit < 2 or capacity < 2:
            msg = f"exact_limit and capacity must be at least 2, got {exact_limit} and {capacity}"
            raise ValueError(msg)
        self._limit = exact_limit
        self._capacity = capacity
        self._levels: list[list[NDArray[np.float64]]] = [[]]
        self._sizes: list[int] = [0]
        self._turns: list[int] = [0]
        self._count = 0
        self._moved = 0.0

    def __len__(self) -> int:
        return self._count

    @property
    def rank_error(self) -> float:
        """Bound for the error of a rank, as a share of the count."""
        return self._moved / self._count if self._count else 0.0

    def update(self, values: NDArray[np.float64]) -> None:
        """Add finite values."""
        self._levels[0].append(np.array(values, np.float64))
        self._sizes[0] += len(values)
        self._count += len(values)
        self._compact()

    def merge(self, other: QuantileSketch) -> None:
        """Add what another sketch has seen."""
        while len(self._levels) < len(other._levels):
            self._grow()
        for level, parts in enumerate(other._levels):
            self._levels[level] += [part.copy() for part in parts]
            self._sizes[level] += other._sizes[level]
        self._count += other._count
        self._moved += other._moved
        self._compact()

    def _grow(self) -> None:
        self._levels.append([])
        self._sizes.append(0)
        self._turns.append(0)

    def _compact(self) -> None:
        if len(self._levels) == 1 and self._sizes[0] <= self._limit:
            return
        level = 0
        while level < len(self._levels):
            if self._sizes[level] > self._capacity:
                self._thin(level)
            level += 1

    def _thin(self, level: int) -> None:
        if level + 1 == len(self._levels):
            self._grow()
        values = np.sort(np.concatenate(self._levels[level]))
        keep = values[-1:] if len(values) % 2 else values[:0]
        values = values[: len(values) - len(keep)]
        self._levels[level], self._sizes[level] = [keep], len(keep)
        self._levels[level + 1].append(values[self._turns[level] :: 2])
        self._sizes[level + 1] += len(values) // 2
        self._turns[level] ^= 1
        self._moved += float(1 << level)

    def quantile(self, share: float) -> float:
        """Return the value at a share of the sorted data.

        While exact, values are interpolated linearly as numpy does; later the nearest kept value is given.

        Raises:
            ValueError: The sketch is empty or the share is outside [0, 1].
        """
        if not self._count or not 0.0 <= share <= 1.0:
            msg = f"a quantile needs values and a share in [0, 1]; have {self._count} values, share {share}"
            raise ValueError(msg)
        if len(self._levels) == 1:
            merged = np.concatenate(self._levels[0])
            self._levels[0] = [merged]
            return float(np.quantile(merged, share))
        values = np.concatenate([part for parts in self._levels for part in parts])
        weights = np.concatenate(
            [np.full(sum(map(len, parts)), float(1 << level)) for level, parts in enumerate(self._levels)]
        )
        order = np.argsort(values, kind="stable")
        reached = np.cumsum(weights[order])
        position = int(np.searchsorted(reached, share * reached[-1], side="left"))
        return float(values[order[min(position, len(order) - 1)]])
