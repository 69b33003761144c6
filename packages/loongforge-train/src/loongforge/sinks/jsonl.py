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
        gather: Keep lines until :meth:`flush`, which writes them at once; otherwise each is written when it
            comes.
    """

    def __init__(self, run: Path, *, gather: bool = False) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self.path = run / METRICS_FILE
        self.dropped = 0
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._torn = False
        self._gather = gather
        self._lines: list[str] = []

    def write(self, record: StepRecord) -> None:
        """Append one line, now or with the next :meth:`flush`."""
        self._lines.append(record.to_json())
        if not self._gather:
            self.flush()

    def flush(self) -> None:
        """Write the lines that were gathered."""
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        # After a line that was cut by a full disk a line end keeps the next one whole.
        data = ("\n" * self._torn + "\n".join(lines) + "\n").encode()
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            self._drop(len(lines), error.strerror or "no space")
            return
        if written < len(data):
            whole = data[:written].count(b"\n") - (self._torn and written > 0)
            self._drop(len(lines) - whole, "no space for a whole line")
        if written > 0:
            self._torn = not data[:written].endswith(b"\n")

    def _drop(self, lines: int, why: str) -> None:
        if self.dropped == 0:
            log.warning("%s: %s; step records are dropped until there is room", self.path, why)
        self.dropped += lines

    def close(self) -> None:
        """Write what was gathered and close the file."""
        if self._descriptor >= 0:
            self.flush()
            if self.dropped:
                log.warning("%s lacks %d step record(s): there was no space", self.path, self.dropped)
            os.close(self._descriptor)
            self._descriptor = -1
