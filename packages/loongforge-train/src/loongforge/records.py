"""The step record: one dataclass, one JSON line per step and rank in ``metrics.jsonl``.

It is the only thing that monitors, reports, profilers and tests read. A value that was not measured is null,
never invented.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

METRICS_FILE = "metrics.jsonl"


@dataclass(kw_only=True)
class StepRecord:
    """What one optimizer step did on one rank. Times are milliseconds, sizes bytes."""

    step: int
    """Optimizer step, counted from 1 over the whole run."""
    epoch: int
    """Epoch the step's window belongs to, counted from 0."""
    rank: int
    time_unix: float
    """Wall clock at the end of the step, seconds."""
    loss: float | None = None
    """Mean loss over the valid elements of the window, over all ranks."""
    micro_losses: list[float] | None = None
    """Loss of each micro-batch of this rank."""
    grad_norm: float | None = None
    """Global gradient norm before clipping."""
    lr: float | None = None
    samples: int | None = None
    """Samples of this rank in this step."""
    tokens: int | None = None
    """Tokens of this rank, where the model counts them."""
    step_ms: float | None = None
    data_wait_ms: float | None = None
    h2d_ms: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    comm_exposed_ms: float | None = None
    comm_overlap: float | None = None
    optimizer_ms: float | None = None
    checkpoint_ms: float | None = None
    host_gap_ms: float | None = None
    """Part of the step that no phase explains: callbacks, sinks, host work."""
    samples_per_s: float | None = None
    tokens_per_s_gpu: float | None = None
    gpu_util: float | None = None
    mem_peak_bytes: int | None = None
    mem_reserved_bytes: int | None = None
    alloc_retries: int | None = None
    alloc_ms: float | None = None
    fused: bool | None = None
    fusion_reason: str | None = None
    graph: bool | None = None
    graph_reason: str | None = None
    filled_samples: int = 0
    """Samples without weight that brought an epoch's last window to the size of the others."""
    skipped: bool = False
    """True when the update was skipped (loss or gradient not finite, or a spike)."""
    spike: bool = False
    launch_ms: float | None = None
    """Host time spent enqueuing forward, backward and optimizer."""
    ops: int | None = None
    """Operators dispatched in a probed step."""
    op_cost_us: float | None = None
    """Measured host cost of dispatching one tiny operator on this device."""
    sync_count: int | None = None
    """Host syncs (item, nonzero, copies to the host) in a probed step."""
    sync_ms: float | None = None
    validation_loss: float | None = None
    """Loss on held-out samples after this step; null where it was not measured."""
    heartbeat: float | None = None
    """Seconds since the communication pillar last heard of all ranks."""
    data: Mapping[str, float] = field(default_factory=dict)
    """Stage times and queue depths of the loader."""
    mem: Mapping[str, float] = field(default_factory=dict)
    """Counters of the memory pillar."""
    comm: Mapping[str, float] = field(default_factory=dict)
    """Counters of the communication pillar."""

    def to_json(self) -> str:
        """Return the record as one line of strict JSON: NaN and infinities become null."""
        try:
            return _ENCODER.encode(vars(self))
        except ValueError:
            return _ENCODER.encode(_finite(vars(self)))


FIELD_NAMES = tuple(entry.name for entry in dataclasses.fields(StepRecord))
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def read_metrics(path: str | Path, *, rank: int | None = None) -> list[dict[str, object]]:
    """Read a metrics file (or the one of a run directory), sorted by step and rank.

    A torn last line, as a killed process leaves it, is passed over; of two records of the same step and rank
    the later one counts.

    Raises:
        FileNotFoundError: There is no such file.
    """
    file = Path(path)
    if file.is_dir():
        file = file / METRICS_FILE
    found: dict[tuple[int, int], dict[str, object]] = {}
    for record in _lines(file):
        step, of_rank = record.get("step"), record.get("rank")
        if isinstance(step, int) and isinstance(of_rank, int) and (rank is None or rank == of_rank):
            found[step, of_rank] = record
    return [found[key] for key in sorted(found)]


def _lines(file: Path) -> Iterator[dict[str, object]]:
    with file.open("rb") as stream:
        for line in stream:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def drop_after(path: str | Path, step: int) -> int:
    """Rewrite a metrics file without records later than ``step``; return how many were dropped.

    A resumed run does these steps again, so that each step stands in the file once.
    """
    file = Path(path)
    if not file.exists():
        return 0
    kept, dropped = [], 0
    for record in _lines(file):
        number = record.get("step")
        if isinstance(number, int) and number <= step:
            kept.append(json.dumps(record, separators=(",", ":")))
        else:
            dropped += 1
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text("".join(line + "\n" for line in kept))
    temporary.replace(file)
    return dropped
