"""Counters of workers and of the loader, and the flat dict users see."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NAMES = (
    "jobs",
    "busy_ns",
    "idle_ns",
    "decoded_frames",
    "used_frames",
    "decode_ns",
    "convert_ns",
    "cache_hits",
    "cache_misses",
    "bytes",
    "readahead_bytes",
    "gpu_frames",
    "gpu_refused_frames",
)
COUNTERS: Mapping[str, int] = {name: number for number, name in enumerate(NAMES)}
"""Number of each worker counter."""

Stat = float | int | str | None


@dataclass(kw_only=True)
class LoaderCounters:
    """What the loader counts in the trainer's process."""

    batches: int = 0
    """Batches delivered."""
    samples: int = 0
    """Samples delivered."""
    wait_ms: float = 0.0
    """Time spent waiting for a batch, in milliseconds."""
    last_wait_ms: float = 0.0
    """The same for the last batch."""
    copied_batches: int = 0
    """Batches copied out of shared memory because the consumer held too many."""
    restarts: int = 0
    """Workers started again after they died or hung."""
    requeued_jobs: int = 0
    """Jobs done again by another worker."""
    skipped_samples: int = 0
    """Samples left out by ``on_error="skip"``."""
    padded_samples: int = 0
    """Samples repeated to give ranks equal batches."""
    fill_ms: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Time to fill each of the last slots, in milliseconds."""
    step_ms: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Time between the last deliveries without the wait, in milliseconds."""


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value that ``share`` of the values do not exceed; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def ratio(part: float, whole: float) -> float | None:
    """Return part / whole, or None when there is no whole."""
    return part / whole if whole else None


def flat_stats(
    loader: LoaderCounters, workers: Mapping[str, int], extra: Mapping[str, Stat]
) -> dict[str, Stat]:
    """Return the statistics of a loader under stable names; unknown values are None."""
    hits, misses = workers.get("cache_hits", 0), workers.get("cache_misses", 0)
    busy, idle = workers.get("busy_ns", 0), workers.get("idle_ns", 0)
    fills = list(loader.fill_ms)
    return {
        "batches": loader.batches,
        "samples": loader.samples,
        "data_wait_ms": loader.wait_ms,
        "last_data_wait_ms": loader.last_wait_ms,
        "decoded_frames": workers.get("decoded_frames", 0),
        "used_frames": workers.get("used_frames", 0),
        "decode_waste": ratio(workers.get("decoded_frames", 0), workers.get("used_frames", 0)),
        "decode_ms": workers.get("decode_ns", 0) / 1e6,
        "convert_ms": workers.get("convert_ns", 0) / 1e6,
        "worker_busy": ratio(busy, busy + idle),
        "worker_busy_ms": busy / 1e6,
        "worker_idle_ms": idle / 1e6,
        "worker_jobs": workers.get("jobs", 0),
        "table_bytes": workers.get("bytes", 0),
        "readahead_bytes": workers.get("readahead_bytes", 0),
        "gpu_frames": workers.get("gpu_frames", 0),
        "gpu_refused_frames": workers.get("gpu_refused_frames", 0),
        "cache_hits": hits,
        "cache_misses": misses,
        "cache_hit_rate": ratio(hits, hits + misses),
        "copied_batches": loader.copied_batches,
        "worker_restarts": loader.restarts,
        "requeued_jobs": loader.requeued_jobs,
        "skipped_samples": loader.skipped_samples,
        "padded_samples": loader.padded_samples,
        "fill_ms_mean": sum(fills) / len(fills) if fills else None,
        "step_ms_p95": percentile(list(loader.step_ms), 0.95),
        **extra,
    }
