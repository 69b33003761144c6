"""Helpers for tests of data loading, also of your own trainer: a data set whose samples check themselves."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

PathName = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong, by sample index."""

    bad: tuple[int, ...] = ()
    """Samples that raise ValueError."""
    kill: tuple[int, ...] = ()
    """Samples at which the process kills itself."""
    hang: tuple[int, ...] = ()
    """Samples that never come."""
    once: PathName | None = None
    """Directory for marks: with it, ``kill`` and ``hang`` happen once per sample; without, every time."""


class ToyDataset:
    """``length`` samples ``{"index": i, "values": float32 (width,) all i, "name": "sample i", "draw":
    random}``.

    Args:
        length: Number of samples.
        width: Numbers per sample.
        faults: What goes wrong.
        delay_s: Seconds that each sample takes.
    """

    def __init__(
        self, length: int, *, width: int = 3, faults: Faults | None = None, delay_s: float = 0.0
    ) -> None:
        self.length = length
        self.width = width
        self.faults = faults or Faults()
        self.delay_s = delay_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, object]:
        """Return sample ``index``."""
        if not 0 <= index < self.length:
            msg = f"index is {index}, allowed is 0 to {self.length - 1}"
            raise IndexError(msg)
        if index in self.faults.bad:
            msg = f"sample {index} is meant to be bad"
            raise ValueError(msg)
        if index in self.faults.kill and self._first_time("kill", index):
            os.kill(os.getpid(), signal.SIGKILL)
        if index in self.faults.hang and self._first_time("hang", index):
            while True:
                time.sleep(3600)
        if self.delay_s:
            time.sleep(self.delay_s)
        return {
            "index": index,
            "values": np.full(self.width, index, dtype=np.float32),
            "name": f"sample {index}",
            "draw": random.random() + float(np.random.rand()),  # noqa: NPY002 - what user transforms do
        }

    def _first_time(self, kind: str, index: int) -> bool:
        if self.faults.once is None:
            return True
        try:
            (Path(self.faults.once) / f"{kind}-{index}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def indices_of(batches: Iterable[object]) -> list[list[int]]:
    """Return the ``index`` entries of batches of `ToyDataset` or `RobotDataset` as plain lists."""
    result = []
    for batch in batches:
        if not isinstance(batch, dict):
            msg = f"a batch is {type(batch).__name__}, expected a dict with 'index'"
            raise TypeError(msg)
        values: npt.NDArray[np.int64] | Sequence[int] = batch["index"]
        result.append([int(value) for value in values])
    return result
