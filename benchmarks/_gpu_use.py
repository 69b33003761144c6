"""What the driver says about a GPU over time: its samples with the moment each was read."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Self


class Samples:
    """What the driver says about a GPU every 0.1 s.

    Args:
        fields: Names of ``nvidia-smi --query-gpu``, of numbers.
    """

    def __init__(self, *fields: str) -> None:
        self._fields = fields
        self.samples: list[tuple[float, tuple[float, ...]]] = []
        """(``time.perf_counter`` when read, values in the order of the fields)."""
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(self._fields)}"]
        command += ["--format=csv,noheader,nounits", "--loop-ms=100"]
        # Without the tool or a GPU there are no samples, and figures made of them are null.
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def _read(self) -> None:
        stream = self._process.stdout if self._process is not None else None
        for line in stream or ():
            with contextlib.suppress(ValueError):
                self.samples.append((time.perf_counter(), tuple(map(float, line.split(",")))))

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=10)
        if self._thread is not None:
            self._thread.join(timeout=10)

    def medians(self, began: float, ended: float) -> tuple[float, ...] | None:
        """Return the median of each field in an interval of ``time.perf_counter``, None without samples."""
        found = [values for at, values in self.samples if began <= at <= ended]
        return tuple(map(statistics.median, zip(*found, strict=True))) if found else None


class Utilisation(Samples):
    """Share of time in which a kernel ran, as the driver samples it.

    A sample covers up to the second before it, so intervals should be longer than that.
    """

    def __init__(self) -> None:
        super().__init__("utilization.gpu")

    def between(self, began: float, ended: float) -> list[float]:
        """Return the shares, 0 to 1, read in an interval of ``time.perf_counter``."""
        return [percent / 100 for at, (percent,) in self.samples if began <= at <= ended]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None without values."""
    return sum(values) / len(values) if values else None
