"""Hung-step watchdog: when no step ends in time, each rank writes the stacks of all its threads."""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from pathlib import Path
from typing import Literal

from loongforge.errors import HungStepError

log = logging.getLogger("loongforge.watchdog")


class Watchdog:
    """Watches the time since the last finished step in a thread of its own.

    A step that hangs in a collective hangs on every rank, so every rank's watchdog writes its own file.

    Args:
        folder: Where stack files go (``stacks/``).
        rank: This rank.
        limit_s: Seconds without a step; 0 never fires.
        action: ``dump`` writes the stacks once and goes on; ``abort`` then ends the process with exit code
            75.
    """

    def __init__(
        self, folder: Path, *, rank: int, limit_s: float, action: Literal["dump", "abort"] = "dump"
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._limit = limit_s
        self._action = action
        self._alive = time.monotonic()
        self._step = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.dumps: list[Path] = []

    def start(self) -> None:
        """Start watching."""
        if self._limit > 0 and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="loongforge-watchdog", daemon=True)
            self._thread.start()

    def beat(self, step: int) -> None:
        """A step has ended (or a long planned pause begins)."""
        self._step, self._alive = step, time.monotonic()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)

    def dump(self, why: str) -> Path:
        """Write the stacks of all threads of this process to a file and return its path."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank_{self._rank:05d}_step_{self._step}_{time.time_ns()}.txt"
        with path.open("w") as stream:
            stream.write(f"rank {self._rank}, pid {os.getpid()}, after step {self._step}: {why}\n\n")
            stream.flush()
            faulthandler.dump_traceback(file=stream, all_threads=True)
        self.dumps.append(path)
        return path

    def _watch(self) -> None:
        fired_at = -1.0
        while not self._stop.wait(min(1.0, self._limit / 4)):
            silent = time.monotonic() - self._alive
            if silent < self._limit or fired_at == self._alive:
                continue
            fired_at = self._alive
            path = self.dump(f"no step ended for {silent:.1f} s (limit {self._limit:.1f} s)")
            log.error("no step ended for %.1f s after step %d: stacks in %s", silent, self._step, path)
            if self._action == "abort":
                os._exit(HungStepError.exit_code)
