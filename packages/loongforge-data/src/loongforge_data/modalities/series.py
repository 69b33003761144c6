"""Time series at a rate of their own (IMU, force, joint encoders): windows by time stamp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loongforge_data.errors import TableError
from loongforge_data.formats.tables import read_table

_NOISE = 2.0**-23  # relative rounding of a stamp that went through float32


@dataclass(frozen=True, kw_only=True)
class SeriesSource:
    """A series beside the data set: one parquet file per episode.

    Attributes:
        path: Template below the data set directory, e.g. "series/imu/episode_{episode_index:06d}.parquet".
        columns: Columns that make up the values, in order; lists are flattened.
        samples: Length of the window given to a sample: the last `samples` rows at or before its time.
        time_column: Column with seconds since the start of the episode.
    """

    path: str
    columns: tuple[str, ...]
    samples: int
    time_column: str = "timestamp"

    def __post_init__(self) -> None:
        """Refuse empty windows and empty column lists."""
        if self.samples < 1 or not self.columns:
            msg = f"a series needs at least one column and one sample, got {self.columns} and {self.samples}"
            raise ValueError(msg)


class TimeSeries:
    """Values with growing time stamps.

    Args:
        times: (N,) float64 seconds, not decreasing.
        values: (N, D) values.
        path: Where they come from, for errors.

    Raises:
        TableError: Lengths differ, or a stamp is NaN or smaller than the one before it.
    """

    def __init__(
        self, times: NDArray[np.generic], values: NDArray[np.generic], *, path: str | Path | None = None
    ) -> None:
        self.times: NDArray[np.float64] = np.ascontiguousarray(times, np.float64)
        self.values = values if values.ndim > 1 else values[:, None]
        if len(self.times) != len(self.values):
            msg = f"series has {len(self.times)} time stamps for {len(self.values)} values"
            raise TableError(msg, path=path)
        wrong = np.flatnonzero(~(np.diff(self.times) >= 0))
        if np.isnan(self.times).any() or len(wrong):
            unset = np.flatnonzero(np.isnan(self.times))
            row = int(unset[0]) if len(unset) else int(wrong[0]) + 1
            msg = f"time stamps of the series go back or are not numbers at row {row}: {self.times[row]}"
            raise TableError(msg, path=path, row=row)

    def __len__(self) -> int:
        return len(self.times)

    def between(self, start: float, stop: float) -> slice:
        """Return the rows with start <= time < stop, in seconds; float32 noise moves no row across."""
        low, high = (value - abs(value) * _NOISE for value in (start, stop))
        first, last = np.searchsorted(self.times, [low, high], side="left")
        return slice(int(first), int(max(first, last)))

    def last(self, seconds: float, count: int) -> tuple[NDArray[np.generic], NDArray[np.bool_]]:
        """Return the last `count` rows at or before a time.

        Returns:
            Values (count, D), oldest first, and a bool mask (count,), True where the series had not begun and
            its first row stands in. An empty series gives zeros, all masked.
        """
        end = int(np.searchsorted(self.times, seconds + abs(seconds) * _NOISE, side="right"))
        rows = np.arange(end - count, end)
        if not len(self.times):
            return np.zeros((count, *self.values.shape[1:]), self.values.dtype), np.ones(count, np.bool_)
        return self.values[np.clip(rows, 0, len(self.times) - 1)], rows < 0

    def at(self, seconds: Sequence[float] | NDArray[np.generic]) -> NDArray[np.float64]:
        """Return values interpolated linearly at times, (len(seconds), D); held constant beyond both ends.

        Raises:
            TableError: The series is empty.
        """
        if not len(self.times):
            msg = "an empty series has no values to interpolate"
            raise TableError(msg)
        points = np.asarray(seconds, np.float64)
        flat = self.values.reshape(len(self.times), -1).astype(np.float64)
        result = np.stack([np.interp(points, self.times, column) for column in flat.T], axis=1)
        return result.reshape(len(points), *self.values.shape[1:])


def read_series(path: str | Path, *, columns: Sequence[str], time_column: str = "timestamp") -> TimeSeries:
    """Read a series from parquet; values become float32.

    Raises:
        TableError: The file cannot be read, a column is missing, or stamps go back.
    """
    table = read_table(path, [time_column, *columns])
    missing = sorted({time_column, *columns} - set(table.column_names))
    if missing:
        msg = f"series has no columns {missing}; it has {table.column_names}"
        raise TableError(msg, path=path)
    count = table.num_rows
    parts = []
    for name in columns:
        cells = table[name].to_pylist()
        part = np.asarray(cells, np.float32).reshape(count, -1) if count else np.zeros((0, 1), np.float32)
        parts.append(part)
    times = table[time_column].to_numpy()
    return TimeSeries(times, np.concatenate(parts, axis=1), path=path)
