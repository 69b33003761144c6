"""The sink protocol and the scalars that sinks publish."""

from __future__ import annotations

from typing import Protocol

from loongforge.records import StepRecord


class Sink(Protocol):
    """Takes step records."""

    def write(self, record: StepRecord) -> None:
        """Take one record; must not block the step for long."""

    def close(self) -> None:
        """Flush and release."""


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
