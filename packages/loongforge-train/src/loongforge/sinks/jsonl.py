"""``metrics.jsonl``: one line per step and rank, appended by one write call each."""

from __future__ import annotations

import os
from pathlib import Path

from loongforge.records import METRICS_FILE, StepRecord


class JsonlSink:
    """Appends records to a file that all ranks share.

    Each line is one ``write`` on a descriptor opened for appending, so lines of different ranks never mix on
    a local file system, and a killed process loses at most the line it was writing.
    """

    def __init__(self, run: Path) -> None:
        run.mkdir(parents=True, exist_ok=True)
        self.path = run / METRICS_FILE
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, record: StepRecord) -> None:
        """Append one line."""
        os.write(self._descriptor, record.to_json().encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
