"""The optional sinks by name."""

from __future__ import annotations

from pathlib import Path

from loongforge.errors import ConfigError
from loongforge.sinks.base import Sink

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
