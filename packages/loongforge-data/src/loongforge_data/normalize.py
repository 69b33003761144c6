"""Normalisation of state and action, the same guarded rule in both directions.

A dimension without spread (min = max, std = 0, equal quantiles) is not scaled: its values are shifted by the
constant only. So 0/0 never occurs, the round trip returns the constant, and a slightly different input stays
slightly different.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loongforge_data.formats.statfiles import Stats

Mode = Literal["min_max", "mean_std", "quantiles"]
_TINY = 1e-8


@dataclass(frozen=True, kw_only=True)
class Normalizer:
    """An affine map per dimension.

    Attributes:
        offset: (D,) float64; subtracted.
        scale: (D,) float64; divided by. 1 for dimensions without spread.
        shift: Added afterwards: -1 for the modes that map to [-1, 1], else 0. 0 for dimensions without
            spread.
        constant: (D,) bool, True for dimensions without spread.
    """

    offset: NDArray[np.float64]
    scale: NDArray[np.float64]
    shift: NDArray[np.float64]
    constant: NDArray[np.bool_]

    def normalize(self, values: NDArray[np.generic]) -> NDArray[np.float32]:
        """Map (..., D) values; nothing is clamped."""
        data = values.astype(np.float64)
        return ((data - self.offset) / self.scale + self.shift).astype(np.float32)

    def unnormalize(self, values: NDArray[np.generic]) -> NDArray[np.float32]:
        """Inverse of `normalize`."""
        data = values.astype(np.float64)
        return ((data - self.shift) * self.scale + self.offset).astype(np.float32)


def normalizer(stats: Stats, mode: Mode) -> Normalizer:
    """Make a normaliser from statistics.

    Args:
        stats: Arrays by name, as `RobotDataset.stats` gives them per feature.
        mode: `min_max` maps [min, max] to [-1, 1]; `quantiles` maps [q01, q99] to [-1, 1]; `mean_std` gives
            zero mean and unit deviation.

    Raises:
        ValueError: The statistics lack what the mode needs, or are not finite.
    """
    needed = {"min_max": ("min", "max"), "mean_std": ("mean", "std"), "quantiles": ("q01", "q99")}.get(mode)
    if needed is None:
        msg = f"mode must be 'min_max', 'mean_std' or 'quantiles', got {mode!r}"
        raise ValueError(msg)
    missing = [name for name in needed if name not in stats]
    if missing:
        msg = (
            f"statistics have no {' and '.join(missing)}, which mode {mode!r} needs; they have "
            f"{', '.join(stats)}. "
            "Quantiles of merged data must be computed from the data (loongforge_data.stats)"
        )
        raise ValueError(msg)
    first, second = (stats[name].astype(np.float64) for name in needed)
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        msg = f"statistics {needed} hold values that are not finite; compute them with policy='mask'"
        raise ValueError(msg)
    if mode == "mean_std":
        offset, spread, shift = first, second, np.zeros_like(first)
    else:
        offset, spread, shift = first, (second - first) / 2, np.full_like(first, -1.0)
    constant = spread <= _TINY * np.maximum(1.0, np.abs(offset))
    return Normalizer(
        offset=offset,
        scale=np.where(constant, 1.0, spread),
        shift=np.where(constant, 0.0, shift),
        constant=constant,
    )
