"""The terminal: a progress bar where there is one, plain lines elsewhere; both on standard error."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from loongforge.records import StepRecord

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class TerminalSink:
    """Shows steps of rank 0.

    Args:
        total: Steps of the whole run, when known.
        interval: Steps between two lines.
        bar: Force the bar on or off; by default on when standard error is a terminal.
    """

    def __init__(self, *, total: int | None, interval: int = 1, bar: bool | None = None) -> None:
        self._total = total
        self._interval = interval
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._began = time.monotonic()
        self._first: int | None = None
        if sys.stderr.isatty() if bar is None else bar:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[line]}"),
                console=Console(stderr=True),
            )
            self._progress.start()
            self._task = self._progress.add_task("training", total=total, line="")

    def write(self, record: StepRecord) -> None:
        """Show a step."""
        if self._first is None:
            self._first = record.step
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=record.step, line=summary(record))
        elif record.step % self._interval == 0 or record.skipped or record.step in {self._first, self._total}:
            of = f"/{self._total}" if self._total else ""
            sys.stderr.write(f"step {record.step}{of}  {summary(record)}{self._eta(record.step)}\n")

    def _eta(self, step: int) -> str:
        if self._total is None or self._first is None or step <= self._first:
            return ""
        left = (self._total - step) * (time.monotonic() - self._began) / (step - self._first + 1)
        return f"  eta {int(left // 60)}:{int(left % 60):02d}"

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        sys.stderr.flush()


def summary(record: StepRecord) -> str:
    """Return one line: loss, step time, throughput, utilisation, data wait, communication wait."""

    def show(name: str, value: float | None, unit: str, digits: int = 0) -> str:
        return "" if value is None else f"  {name} {value:.{digits}f}{unit}"

    loss = "nan" if record.loss is None else f"{record.loss:.4f}"
    return (
        f"loss {loss}"
        + show("lr", record.lr, "", 6)
        + show("step", record.step_ms, " ms")
        + show("data wait", record.data_wait_ms, " ms")
        + show("comm wait", record.comm_exposed_ms, " ms", 1)
        + show("tokens/s/gpu", record.tokens_per_s_gpu, "")
        + show("samples/s", record.samples_per_s, "", 1)
        + show("gpu", record.gpu_util, " %")
        + ("  SKIPPED (not finite or spike)" if record.skipped else "")
    )
