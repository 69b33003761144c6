"""The sink that is always there: one JSON line per step and rank in ``metrics.jsonl``."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from loongforge.records import METRICS_FILE, StepRecord

log = logging.getLogger("loongforge")
NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class JsonlSink:
    """Appends records with one write each, so that lines of several ranks never mix.

    A full disk costs records, not the run: they are dropped, with one warning, until there is room again.

    Args:
        run: Run directory; made when absent.
    """

    def __init__(self, run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self.path = run / METRICS_FILE
        self.dropped = 0
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._torn = False

    def write(self, record: StepRecord) -> None:
        """Append one line."""
        line = record.to_json().encode() + b"\n"
        # After a line that was cut by a full disk a line end keeps the next one whole.
        data = b"\n" + line if self._torn else line
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._drop(error.strerror or "no space")
            return
        self._torn = self._torn if written == 0 else written < len(data)
        if written < len(data):
            self._drop("no space for a whole line")

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if self.dropped == 1:
            log.warning("%s: %s; step records are dropped until there is room", self.path, why)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            if self.dropped:
                log.warning("%s lacks %d step record(s): there was no space", self.path, self.dropped)
            os.close(self._descriptor)
            self._descriptor = -1
