"""Windows of frame offsets around a row, clamped to the episode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Window:
    """Frame offsets relative to the row of a sample.

    Attributes:
        offsets: (T,) int64.
        first: Smallest offset.
        last: Largest offset.
        contiguous: True when offsets go up by one, so that a slice serves rows away from the border.
    """

    offsets: NDArray[np.int64]
    first: int
    last: int
    contiguous: bool

    def rows(self, row: int, start: int, stop: int) -> NDArray[np.int64]:
        """(T,) int64 rows, clamped to [start, stop)."""
        return np.clip(self.offsets + row, start, stop - 1)

    def padding(self, row: int, start: int, stop: int) -> NDArray[np.bool_]:
        """(T,) bool, True where the offset leaves [start, stop) and the row is clamped."""
        rows = self.offsets + row
        return (rows < start) | (rows >= stop)


def make_windows(window: Mapping[str, Sequence[int]] | None, known: Iterable[str]) -> dict[str, Window]:
    """Check and prepare the windows a user asked for.

    Raises:
        ValueError: A key is not a feature, a window is empty, or an offset is not a whole number.
    """
    known = list(known)
    result = {}
    for key, offsets in (window or {}).items():
        if key not in known:
            msg = f"window names {key!r}, which is not a feature; features: {', '.join(known)}"
            raise ValueError(msg)
        values = np.asarray(list(offsets))
        if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu":
            msg = (
                f"window of {key!r} must be a non-empty sequence of whole frame offsets such as range(16), "
                f"got {offsets!r}; turn seconds into frames with offsets_from_seconds"
            )
            raise ValueError(msg)
        array = values.astype(np.int64)
        result[key] = Window(
            offsets=array,
            first=int(array.min()),
            last=int(array.max()),
            contiguous=bool(np.all(np.diff(array) == 1)),
        )
    return result


def offsets_from_seconds(
    seconds: Sequence[float], fps: float | Fraction, *, tolerance: float = 1e-4
) -> tuple[int, ...]:
    """Turn `delta_timestamps` in seconds into frame offsets.

    Args:
        seconds: Times relative to the sample, in seconds.
        fps: Frames per second.
        tolerance: Largest allowed distance of a time to a whole frame, in seconds, inclusive.

    Raises:
        ValueError: A time is further from a whole frame than the tolerance.
    """
    offsets = []
    for value in seconds:
        frame = round(value * fps)
        if abs(value - float(frame / fps)) > tolerance + 1e-9:
            msg = (
                f"{value} s is not a multiple of 1/fps = {float(1 / fps):.6f} s within {tolerance:g} s; the "
                f"nearest frame is {frame} at {float(frame / fps):.6f} s"
            )
            raise ValueError(msg)
        offsets.append(int(frame))
    return tuple(offsets)
