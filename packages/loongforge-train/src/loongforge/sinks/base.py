"""The sink protocol and the optional sinks by name."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from loongforge.errors import ConfigError
from loongforge.records import StepRecord


class Sink(Protocol):
    """Takes step records."""

    def write(self, record: StepRecord) -> None:
        """Take one record; must not block the step for long."""

    def close(self) -> None:
        """Flush and release."""


SINK_NAMES = ("tensorboard", "wandb", "prometheus")


def build_sink(name: str, run: Path, rank: int, settings: dict[str, object]) -> Sink:
    """Return an optional sink by name.

    Raises:
        ConfigError: Unknown name.
        MissingPillarError: Its package is not installed; the message names the extra.
    """
    if name == "tensorboard":
        from loongforge.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(run / "tensorboard")
    if name == "wandb":
        from loongforge.sinks.wandb import WandbSink

        return WandbSink(run, settings)
    if name == "prometheus":
        from loongforge.sinks.prometheus import PrometheusSink

        return PrometheusSink(rank=rank)
    msg = f"sink {name!r} is unknown: allowed are {', '.join(SINK_NAMES)}"
    raise ConfigError(msg)


SCALARS = (
    "loss",
    "grad_norm",
    "lr",
    "step_ms",
    "data_wait_ms",
    "h2d_ms",
    "forward_ms",
    "backward_ms",
    "comm_exposed_ms",
    "comm_overlap",
    "optimizer_ms",
    "checkpoint_ms",
    "host_gap_ms",
    "samples_per_s",
    "tokens_per_s_gpu",
    "gpu_util",
    "mem_peak_bytes",
    "alloc_ms",
)
"""Fields that the scalar sinks publish."""


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the known scalar fields of a record."""
    values = {name: getattr(record, name) for name in SCALARS}
    return {name: float(value) for name, value in values.items() if value is not None}
