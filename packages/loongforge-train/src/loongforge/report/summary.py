"""Means, shares and spreads over step records; the one place where records are added up."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Record = Mapping[str, object]
PHASES = (
    "data_wait_ms",
    "h2d_ms",
    "forward_ms",
    "backward_ms",
    "comm_exposed_ms",
    "optimizer_ms",
    "checkpoint_ms",
    "host_gap_ms",
)
"""Parts of a step; they add up to its length."""
COUNTERS = frozenset(
    {
        "batches", "samples", "data_wait_ms", "decoded_frames", "used_frames", "decode_ms", "convert_ms",
        "worker_busy_ms", "worker_idle_ms", "worker_jobs", "table_bytes", "readahead_bytes", "gpu_frames",
        "gpu_refused_frames", "cache_hits", "cache_misses", "copied_batches", "worker_restarts",
        "requeued_jobs", "skipped_samples", "padded_samples", "h2d_bytes", "h2d_ms", "h2d_pageable_bytes",
        "device_batches",
    }
)  # fmt: skip
"""Entries of a record's ``data`` that only grow; what a step did is their growth."""


def number(record: Record, name: str) -> float | None:
    """Return a numeric field of a record, or None."""
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def column(records: Iterable[Record], name: str) -> list[float]:
    """Return the known values of a field, in order."""
    return [value for value in (number(record, name) for record in records) if value is not None]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None of nothing."""
    return sum(values) / len(values) if values else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile, ``share`` from 0 to 1."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a stretch of steps did. Times are milliseconds per step."""

    steps: int
    ranks: int
    first_step: int
    last_step: int
    step_ms: float
    step_ms_median: float
    step_ms_p95: float
    phases: Mapping[str, float]
    """Mean of each phase that is known, over all ranks."""
    samples_per_s: float | None
    """Over all ranks."""
    tokens_per_s_gpu: float | None
    gpu_util: float | None
    mem_peak_bytes: float | None
    alloc_ms: float | None
    comm_overlap: float | None
    fused_share: float | None
    fusion_reasons: Mapping[str, int] = field(default_factory=dict)
    graph_share: float | None = None
    graph_reasons: Mapping[str, int] = field(default_factory=dict)
    loader: Mapping[str, float] = field(default_factory=dict)
    """What the loader did per step (its counters), and means of its gauges."""
    comm: Mapping[str, float] = field(default_factory=dict)
    mem: Mapping[str, float] = field(default_factory=dict)
    skipped: int = 0
    first_loss: float | None = None
    last_loss: float | None = None


def steady(records: Sequence[Record]) -> list[Record]:
    """Leave out the first steps (at most 5, at most a quarter) and probed ones, which counting slows."""
    steps = sorted({int(value) for value in column(records, "step")})
    skip = min(5, len(steps) // 4)
    kept = set(steps[skip:])
    late = [record for record in records if number(record, "step") in kept]
    return [record for record in late if number(record, "ops") is None] or late


def summarise(records: Sequence[Record]) -> Summary:
    """Add up records of one run.

    Raises:
        ValueError: There is no record.
    """
    if not records:
        msg = "there is no step record: allowed is at least one; the run has not finished a step yet"
        raise ValueError(msg)
    steps = column(records, "step")
    ranks = sorted({int(value) for value in column(records, "rank")})
    times = column(records, "step_ms")
    samples = [mean(column((r for r in records if r.get("rank") == rank), "samples_per_s")) for rank in ranks]
    known = [value for value in samples if value is not None]
    phases = {name: mean(column(records, name)) for name in PHASES}
    losses = [
        value for record in records if record.get("rank") == ranks[0] for value in column([record], "loss")
    ]
    return Summary(
        steps=len(set(steps)),
        ranks=len(ranks),
        first_step=int(min(steps)),
        last_step=int(max(steps)),
        step_ms=mean(times) or 0.0,
        step_ms_median=statistics.median(times) if times else 0.0,
        step_ms_p95=percentile(times, 0.95) or 0.0,
        phases={name: value for name, value in phases.items() if value is not None},
        samples_per_s=sum(known) if known else None,
        tokens_per_s_gpu=mean(column(records, "tokens_per_s_gpu")),
        gpu_util=mean(column(records, "gpu_util")),
        mem_peak_bytes=max(column(records, "mem_peak_bytes"), default=None),
        alloc_ms=mean(column(records, "alloc_ms")),
        comm_overlap=mean(column(records, "comm_overlap")),
        fused_share=_share(records, "fused"),
        fusion_reasons=_reasons(records, "fusion_reason"),
        graph_share=_share(records, "graph"),
        graph_reasons=_reasons(records, "graph_reason"),
        loader=_loader(records),
        comm=_means(records, "comm"),
        mem=_means(records, "mem"),
        skipped=sum(1 for record in records if record.get("skipped") is True),
        first_loss=mean(losses[:10]),
        last_loss=mean(losses[-10:]),
    )


def _share(records: Sequence[Record], name: str) -> float | None:
    known = [record[name] for record in records if isinstance(record.get(name), bool)]
    return sum(1 for value in known if value) / len(known) if known else None


def _reasons(records: Sequence[Record], name: str) -> dict[str, int]:
    return dict(
        Counter(str(record[name]) for record in records if record.get(name) is not None).most_common()
    )


def _loader(records: Sequence[Record]) -> dict[str, float]:
    """Return growth per step of the loader's counters, averaged over ranks, and means of everything else."""
    result = {name: value for name, value in _means(records, "data").items() if name not in COUNTERS}
    growths: dict[str, list[float]] = {}
    for rank in {record.get("rank") for record in records}:
        own = [record for record in records if record.get("rank") == rank]
        first, last = own[0], own[-1]
        steps = (number(last, "step") or 0.0) - (number(first, "step") or 0.0)
        before, after = first.get("data"), last.get("data")
        if steps <= 0 or not isinstance(before, Mapping) or not isinstance(after, Mapping):
            continue
        for name in COUNTERS & set(before) & set(after):
            grown = float(after[name]) - float(before[name])
            # A resumed run counts from zero again.
            if grown >= 0:
                growths.setdefault(name, []).append(grown / steps)
    return result | {name: sum(values) / len(values) for name, values in sorted(growths.items())}


def _means(records: Sequence[Record], name: str) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for record in records:
        values = record.get(name)
        if isinstance(values, Mapping):
            for key, value in values.items():
                if isinstance(value, (int, float)):
                    sums.setdefault(str(key), []).append(float(value))
    return {key: sum(values) / len(values) for key, values in sums.items()}
