"""GPU utilisation over time: the driver's samples with the moment each was read."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Sequence


class Utilisation:
    """Share of time in which a kernel ran, as the driver samples it, every 0.1 s.

    A sample covers up to the second before it, so intervals should be longer than that.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []
        """(``time.perf_counter`` when read, share 0 to 1)."""
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Utilisation:
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        command = ["nvidia-smi", f"--id={gpu}", "--query-gpu=utilization.gpu"]
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
                self.samples.append((time.perf_counter(), float(line) / 100))

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=10)
        if self._thread is not None:
            self._thread.join(timeout=10)

    def between(self, began: float, ended: float) -> list[float]:
        """Return the samples read in an interval of ``time.perf_counter``."""
        return [share for at, share in self.samples if began <= at <= ended]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None without values."""
    return sum(values) / len(values) if values else None
