"""Statistics of features: streaming, mergeable, in float64, with quantiles of the data itself.

Moments follow Welford and Chan: a pass in any order and any split gives the same result to rounding.
Quantiles are exact up to `exact_limit` values per component and then come from a mergeable sketch with a
stated rank error. NaN, infinity and null follow a policy and are counted; they never reach the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loongforge_data.dataset import RobotDataset
from loongforge_data.errors import TableError
from loongforge_data.formats.statfiles import Stats
from loongforge_data.sketch import QuantileSketch

Policy = Literal["raise", "mask"]
QUANTILES: Mapping[str, float] = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


class RunningStats:
    """Minimum, maximum, mean, population standard deviation, count and quantiles of vectors.

    Args:
        size: Number of components.
        policy: `raise` refuses values that are not finite and names their rows; `mask` leaves them out of
            their component and counts them.
        quantiles: False leaves quantiles out (they cost a sort).
        name: Name of the feature, for errors.
    """

    def __init__(
        self, size: int, *, policy: Policy = "raise", quantiles: bool = True, name: str = "feature"
    ) -> None:
        if policy not in ("raise", "mask"):
            msg = f"policy must be 'raise' or 'mask', got {policy!r}"
            raise ValueError(msg)
        self.size = size
        self.policy: Policy = policy
        self.name = name
        self.count: NDArray[np.int64] = np.zeros(size, np.int64)
        self.masked: NDArray[np.int64] = np.zeros(size, np.int64)
        self._mean = np.zeros(size)
        self._square = np.zeros(size)
        self._min = np.full(size, np.inf)
        self._max = np.full(size, -np.inf)
        self._sketches = [QuantileSketch() for _ in range(size)] if quantiles else None

    def update(self, values: NDArray[np.generic], *, first_row: int = 0) -> None:
        """Add rows.

        Args:
            values: (rows, size) or (rows,) for size 1; any dtype, computed in float64.
            first_row: Row number of the first one, for errors.

        Raises:
            TableError: A value is not finite and the policy is "raise".
            ValueError: The shape does not fit.
        """
        data = np.asarray(values).reshape(len(values), -1).astype(np.float64)
        if data.shape[1] != self.size:
            msg = f"{self.name} has {data.shape[1]} components, expected {self.size}"
            raise ValueError(msg)
        finite = np.isfinite(data)
        if self.policy == "raise" and not finite.all():
            rows = np.flatnonzero(~finite.all(axis=1))
            msg = (
                f"{self.name} is not finite in {len(rows)} rows: "
                f"{', '.join(str(int(row) + first_row) for row in rows[:10])}; correct them or use "
                "policy='mask'"
            )
            raise TableError(msg, row=int(rows[0]) + first_row)
        if finite.all():
            self._add_block(data)
        else:
            self.masked += (~finite).sum(axis=0)
            for component in range(self.size):
                column = data[finite[:, component], component]
                self._add_columns(column[:, None], slice(component, component + 1))

    def _add_block(self, data: NDArray[np.float64]) -> None:
        self._add_columns(data, slice(0, self.size))

    def _add_columns(self, data: NDArray[np.float64], where: slice) -> None:
        rows = len(data)
        if not rows:
            return
        mean = data.mean(axis=0)
        self._merge_moments(
            np.full(data.shape[1], rows),
            mean,
            ((data - mean) ** 2).sum(axis=0),
            data.min(axis=0),
            data.max(axis=0),
            where,
        )
        if self._sketches is not None:
            for sketch, column in zip(self._sketches[where], data.T, strict=True):
                sketch.update(column)

    def _merge_moments(
        self,
        count: NDArray[np.int64],
        mean: NDArray[np.float64],
        square: NDArray[np.float64],
        low: NDArray[np.float64],
        high: NDArray[np.float64],
        where: slice,
    ) -> None:
        before = self.count[where]
        total = before + count
        safe = np.maximum(total, 1)
        delta = mean - self._mean[where]
        self._mean[where] += delta * count / safe
        self._square[where] += square + delta**2 * before * count / safe
        self._min[where] = np.minimum(self._min[where], low)
        self._max[where] = np.maximum(self._max[where], high)
        self.count[where] = total

    def merge(self, other: RunningStats) -> None:
        """Add what another object has seen; the rows must be different ones."""
        if other.size != self.size:
            msg = f"cannot merge {other.size} components into {self.size}"
            raise ValueError(msg)
        everything = slice(0, self.size)
        self._merge_moments(other.count, other._mean, other._square, other._min, other._max, everything)
        self.masked += other.masked
        if self._sketches is not None and other._sketches is not None:
            for mine, theirs in zip(self._sketches, other._sketches, strict=True):
                mine.merge(theirs)
        else:
            self._sketches = None

    def result(self) -> Stats:
        """Return min, max, mean, std, count and, where known, q01 to q99: (size,) float64 each.

        Raises:
            TableError: A component has no finite value at all.
        """
        empty = np.flatnonzero(self.count == 0)
        if len(empty):
            msg = f"{self.name} has no finite value in components {empty[:10].tolist()}"
            raise TableError(msg)
        stats = {
            "min": self._min.copy(),
            "max": self._max.copy(),
            "mean": self._mean.copy(),
            "std": np.sqrt(self._square / self.count),
            "count": np.array([float(self.count.max())]),
        }
        if self._sketches is not None:
            for name, share in QUANTILES.items():
                stats[name] = np.array([sketch.quantile(share) for sketch in self._sketches])
        return stats

    @property
    def rank_error(self) -> float:
        """Largest possible error of a quantile's rank, as a share of the count; 0 while exact."""
        return max((s.rank_error for s in self._sketches), default=0.0) if self._sketches else 0.0


class ImageStats:
    """Statistics of pictures per channel, scaled to [0, 1], in the shape (channels, 1, 1) LeRobot uses.

    Sums of integers up to 2**63 are exact, so uint8 pictures are never squared in uint8.
    """

    def __init__(self, channels: int = 3) -> None:
        self._channels = channels
        self._histogram = np.zeros((channels, 256), np.int64)
        self.pictures = 0

    def update(self, picture: NDArray[np.uint8]) -> None:
        """Add one (height, width, channels) uint8 picture."""
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != self._channels:
            msg = f"expected uint8 (height, width, {self._channels}), got {picture.dtype} {picture.shape}"
            raise ValueError(msg)
        for channel in range(self._channels):
            self._histogram[channel] += np.bincount(picture[..., channel].reshape(-1), minlength=256)
        self.pictures += 1

    def merge(self, other: ImageStats) -> None:
        """Add what another object has seen."""
        self._histogram += other._histogram
        self.pictures += other.pictures

    def result(self) -> Stats:
        """Return min, max, mean, std and quantiles, (channels, 1, 1) each; `count` counts pictures."""
        if not self.pictures:
            msg = "no picture was added"
            raise TableError(msg)
        levels = np.arange(256, dtype=np.float64) / 255.0
        counts = self._histogram.sum(axis=1)
        mean = self._histogram @ levels / counts
        square = (self._histogram * (levels[None, :] - mean[:, None]) ** 2).sum(axis=1) / counts
        seen = self._histogram > 0
        stats = {
            "min": levels[seen.argmax(axis=1)],
            "max": levels[255 - seen[:, ::-1].argmax(axis=1)],
            "mean": mean,
            "std": np.sqrt(square),
        }
        below = self._histogram.cumsum(axis=1)
        for name, share in QUANTILES.items():
            rank = np.ceil(share * counts)
            stats[name] = levels[np.array([np.searchsorted(b, r) for b, r in zip(below, rank, strict=True)])]
        shaped = {key: value.reshape(self._channels, 1, 1) for key, value in stats.items()}
        return {**shaped, "count": np.array([float(self.pictures)])}


def image_stats(dataset: RobotDataset, key: str, *, samples: int = 200) -> Stats:
    """Return statistics of a camera or picture column from evenly spaced samples.

    Args:
        dataset: An open data set; its `image_size` applies.
        key: A camera, or a picture feature of 3 channels.
        samples: Number of pictures at most.

    Raises:
        ValueError: The key gives no uint8 pictures, or the set is empty.
    """
    rows = np.unique(np.linspace(0, len(dataset) - 1, min(samples, len(dataset))).round().astype(int))
    running = ImageStats()
    for row in rows:
        picture = np.asarray(dataset[int(row)].get(key))
        if picture.dtype != np.uint8 or picture.ndim not in (3, 4):
            msg = f"feature {key!r} gives no uint8 pictures; cameras: {', '.join(dataset.cameras) or 'none'}"
            raise ValueError(msg)
        running.update(picture if picture.ndim == 3 else picture[0])
    return running.result()


def table_stats(
    arrays: Mapping[str, NDArray[np.generic]], keys: Sequence[str], *, policy: Policy = "raise"
) -> dict[str, Stats]:
    """Return statistics of whole columns.

    Args:
        arrays: Columns by feature, (rows, ...) each.
        keys: Which of them.
        policy: See `RunningStats`.
    """
    result = {}
    for key in keys:
        array = arrays[key]
        running = RunningStats(int(np.prod(array.shape[1:], dtype=np.int64)), policy=policy, name=key)
        running.update(array)
        result[key] = running.result()
    return result
