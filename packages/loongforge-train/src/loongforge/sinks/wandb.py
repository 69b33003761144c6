"""Weights & Biases sink (extra ``wandb``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loongforge.errors import require
from loongforge.records import StepRecord
from loongforge.sinks.base import scalars


class WandbSink:
    """Logs scalars to a W&B run; offline mode and project come from W&B's own environment variables."""

    def __init__(self, run: Path, settings: Mapping[str, object]) -> None:
        wandb = require("wandb", "loongforge-train[wandb]", "drop wandb from sinks")
        self._run = wandb.init(dir=str(run), name=run.name, config=dict(settings), resume="allow")  # type: ignore[attr-defined]

    def write(self, record: StepRecord) -> None:
        """Log the scalars of a step."""
        self._run.log(scalars(record), step=record.step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
