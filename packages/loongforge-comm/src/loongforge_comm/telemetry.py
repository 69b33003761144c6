"""Collective times per group: a bounded history, its summary, and the status file the monitor reads."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from loongforge_comm.plan import CommPlan
from loongforge_comm.records import BackwardRecord

HISTORY = 512
PENDING = 16
"""Backwards whose device times may be open; the oldest is dropped, so a device far behind costs no memory."""


class Telemetry:
    """Keeps the last 512 synchronised backwards of this rank."""

    def __init__(self, plan: CommPlan) -> None:
        self._plan = plan
        self.synced = 0
        self.captured = 0
        self.bytes_sent = 0
        self._exposed: deque[float] = deque(maxlen=HISTORY)
        self._backward: deque[float] = deque(maxlen=HISTORY)
        self._busy: deque[float] = deque(maxlen=HISTORY)
        self._first: deque[float] = deque(maxlen=HISTORY)
        self._overlap: deque[float] = deque(maxlen=HISTORY)
        self._bucket_ms: dict[int, deque[float]] = {}
        self._alone: dict[int, deque[bool]] = {}
        self._only_deferred = True
        self._pending: deque[BackwardRecord] = deque(maxlen=PENDING)
        self.last_exposed_ms: float | None = None
        self.last_overlap: float | None = None

    def use_plan(self, plan: CommPlan) -> None:
        """Start new per-bucket series: bucket numbers mean something else now."""
        self._plan = plan
        self._pending.clear()
        self._bucket_ms = {}
        self._alone = {}
        self._only_deferred = True

    def add(self, record: BackwardRecord) -> None:
        """Account one synchronised backward; a device's times follow when the device has passed them."""
        self.synced += 1
        self.bytes_sent += self._plan.nbytes
        if record.captured:
            self.captured += 1
            return
        backward = record.end - record.begin
        if backward > 0 and record.first_ready:
            self._first.append((record.first_ready - record.begin) / backward)
        if record.device is not None:
            self._pending.append(record)
        self.collect()
        if not record.on_device:
            self._account(record)

    def collect(self) -> None:
        """Take over the device times that have become known; never waits for the device."""
        while self._pending:
            record = self._pending[0]
            if record.device is None or not record.device.passed():
                return
            self._pending.popleft()
            self._account(record.device.resolve(record))

    def _account(self, record: BackwardRecord) -> None:
        self.last_exposed_ms = (record.finish - record.end) * 1e3
        self._exposed.append(self.last_exposed_ms)
        self._backward.append((record.end - record.begin) * 1e3)
        if self._only_deferred and not record.deferred:
            self._bucket_ms, self._alone = {}, {}  # without backward beside them buckets took other times
            self._only_deferred = False
        busy = 0.0
        for index, took, alone in _occupancy(record.spans):
            busy += took
            self._bucket_ms.setdefault(index, deque(maxlen=HISTORY)).append(took * 1e3)
            self._alone.setdefault(index, deque(maxlen=HISTORY)).append(alone)
        if busy > 0:
            self._busy.append(busy * 1e3)
            tail = sum(max(0.0, b - max(a, record.end)) for a, b in _merge(record.spans.values()))
            self.last_overlap = max(0.0, 1.0 - tail / busy)
            if not record.deferred:
                self._overlap.append(self.last_overlap)

    def bucket_ms(self) -> dict[int, float]:
        """Median milliseconds of each bucket on the channel, queueing behind earlier buckets taken out."""
        return {index: float(np.median(series)) for index, series in self._bucket_ms.items() if series}

    def ran_alone(self) -> set[int]:
        """Buckets that had the channel for themselves in most backwards."""
        return {index for index, series in self._alone.items() if 2 * sum(series) > len(series)}

    def groups(self) -> dict[str, dict[str, float]]:
        """Per group: buckets, MiB, mean and 95th percentile of the collective time in ms."""
        result: dict[str, dict[str, float]] = {}
        for name in dict.fromkeys(bucket.group for bucket in self._plan.buckets):
            members = [bucket for bucket in self._plan.buckets if bucket.group == name]
            times = [v for b in members for v in self._bucket_ms.get(b.index, ())]
            entry = {"buckets": float(len(members)), "mib": sum(b.nbytes for b in members) / 2**20}
            if times:
                entry.update(mean_ms=float(np.mean(times)), p95_ms=float(np.percentile(times, 95)))
            result[name] = entry
        return result

    def first_gradient_share(self) -> float | None:
        """Median of (time to the first gradient / backward time); near 1 means that nothing can overlap."""
        return float(np.median(self._first)) if self._first else None

    def summary(self) -> dict[str, object]:
        """Flat figures for logs; ``None`` where nothing was observed."""
        self.collect()
        exposed = float(np.mean(self._exposed)) if self._exposed else None
        busy = float(np.mean(self._busy)) if self._busy else None
        return {
            "synced_backwards": self.synced,
            "captured_backwards": self.captured,
            "bytes_reduced": self.bytes_sent,
            "exposed_ms": self.last_exposed_ms,
            "exposed_ms_mean": exposed,
            "backward_ms_mean": float(np.mean(self._backward)) if self._backward else None,
            "comm_ms_mean": busy,
            "overlap": self.last_overlap,
            "overlap_mean": float(np.mean(self._overlap)) if self._overlap else None,
            "overlap_median": float(np.median(self._overlap)) if self._overlap else None,
            "first_gradient_share": self.first_gradient_share(),
        }


class StatusFile:
    """Rewrites a JSON file through a rename, at most once a second."""

    def __init__(self, path: Path, *, every_s: float = 1.0) -> None:
        self._path = path
        self._every_s = every_s
        self._last = 0.0

    def write(self, status: Mapping[str, object], *, force: bool = False) -> None:
        """Write unless it was written less than a second ago."""
        now = time.monotonic()
        if not force and now - self._last < self._every_s:
            return
        self._last = now
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_text(json.dumps({"time_unix": time.time(), **status}))
        temporary.replace(self._path)

    @property
    def due(self) -> bool:
        """Whether a write would happen now."""
        return time.monotonic() - self._last >= self._every_s


def _occupancy(spans: Mapping[int, tuple[float, float]]) -> Iterator[tuple[int, float, bool]]:
    """Index, time the bucket added to the busy time of the channel, and whether no other was in flight."""
    free = 0.0
    for index, (launched, landed) in sorted(spans.items(), key=lambda item: item[1][1]):
        others = (span for other, span in spans.items() if other != index)
        alone = all(stop <= launched or start >= landed for start, stop in others)
        yield index, max(0.0, landed - max(launched, free)), alone
        free = max(free, landed)


def _merge(spans: object) -> list[tuple[float, float]]:
    """Union of intervals."""
    result: list[tuple[float, float]] = []
    for start, stop in sorted(spans):  # type: ignore[call-overload]
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], stop))
        else:
            result.append((start, stop))
    return result
