"""Statistics of relative actions: per step of the window, from the data set's own rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loongforge.errors import ConfigError
from loongforge.recipes.gr00t_n1_6.processing.embodiment import Embodiment, KeyConfig
from loongforge.recipes.gr00t_n1_6.processing.normalise import reference_state, to_relative

Array = npt.NDArray[np.float32]
MAX_SAMPLES = 200_000
"""Samples that are read; of a larger data set every n-th."""


class TabularSource(Protocol):
    """A data set that gives the numbers of a sample without decoding its images."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def tabular(self, i: int, /) -> Mapping[str, object]:
        """Return all of sample ``i`` but its images."""
        ...


def relative_statistics(
    dataset: TabularSource, robot: Embodiment, *, max_samples: int = MAX_SAMPLES
) -> dict[str, dict[str, Array]]:
    """Return minimum, maximum, mean and standard deviation (T, D) of each relative action key.

    Steps past the end of an episode are left out. Empty where no key is relative.

    Raises:
        ConfigError: A step of the window is never inside an episode.
    """
    keys = [key for key in robot.action if key.relative]
    if not keys:
        return {}
    stride = max(1, -(-len(dataset) // max_samples))
    totals = {key.name: _Moments(robot.action_steps) for key in keys}
    for i in range(0, len(dataset), stride):
        sample = dataset.tabular(i)
        states = {c: _row(sample[c])[None] for c in robot.state_columns}
        for key in keys:
            action = np.asarray(sample[key.column], dtype=np.float32)[:, key.start : key.end]
            pad = np.asarray(sample.get(f"{key.column}_is_pad", np.zeros(len(action))), dtype=bool)
            moved = to_relative(action[None], reference_state(key, robot.state, states), key.kind)[0]
            totals[key.name].add(moved, ~pad)
    return {key.name: totals[key.name].result(key) for key in keys}


def _row(value: object) -> Array:
    array = np.asarray(value, dtype=np.float32)
    return array[-1] if array.ndim == 2 else array


class _Moments:
    """Running extremes and float64 moments per step."""

    def __init__(self, steps: int) -> None:
        self.count = np.zeros((steps, 1))
        self.low: npt.NDArray[np.float64] | None = None
        self.high: npt.NDArray[np.float64] | None = None
        self.sum: npt.NDArray[np.float64] | None = None
        self.squares: npt.NDArray[np.float64] | None = None

    def add(self, values: Array, valid: npt.NDArray[np.bool_]) -> None:
        """Count the valid steps of one window (T, D)."""
        keep = valid[:, None]
        wide = values.astype(np.float64)
        low, high = np.where(keep, wide, np.inf), np.where(keep, wide, -np.inf)
        inside = np.where(keep, wide, 0.0)
        if self.low is None or self.high is None or self.sum is None or self.squares is None:
            self.low, self.high, self.sum, self.squares = low, high, inside, inside**2
        else:
            self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
            self.sum, self.squares = self.sum + inside, self.squares + inside**2
        self.count += keep

    def result(self, key: KeyConfig) -> dict[str, Array]:
        """Return the statistics as float32."""
        if self.low is None or self.sum is None or self.squares is None or (self.count == 0).any():
            reached = int((self.count > 0).sum())
            msg = (
                f"relative action key '{key.name}' has {len(self.count)} steps, but no episode is longer "
                f"than {reached}; set embodiment.action_steps to at most {reached}"
            )
            raise ConfigError(msg)
        mean = self.sum / self.count
        spread = np.sqrt(np.maximum(self.squares / self.count - mean**2, 0))
        high = self.high if self.high is not None else self.low
        pairs = {"min": self.low, "max": high, "mean": mean, "std": spread}
        return {name: value.astype(np.float32) for name, value in pairs.items()}
