"""TensorBoard sink (extra ``tensorboard``)."""

from __future__ import annotations

from pathlib import Path

from loongforge.errors import require
from loongforge.records import StepRecord
from loongforge.sinks.base import scalars


class TensorBoardSink:
    """Writes scalars for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        require("tensorboard", "loongforge-train[tensorboard]", "drop tensorboard from sinks")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, record: StepRecord) -> None:
        """Write the scalars of a step."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()
