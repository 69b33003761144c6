"""Times of one synchronised backward, on the host's clock and, for CUDA, by events that are read later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, Self

from loongforge_comm.internals import cuda_event


class Mark(Protocol):
    """A moment on a device; ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether the device has passed it (never waits)."""

    def elapsed_time(self, end_event: Self) -> float:
        """Milliseconds from here to ``end_event``, both passed."""


@dataclass(kw_only=True)
class DeviceTimes:
    """Marks of one backward; nothing is known before the device has passed the last one.

    Attributes:
        begin: start of backward.
        end: end of the gradient computation.
        finish: all averages in place; ``None`` where that is when the last bucket landed.
        spans: per bucket, packed and ready to go, and landed.
    """

    begin: Mark
    end: Mark | None = None
    finish: Mark | None = None
    spans: dict[int, tuple[Mark, Mark]] = field(default_factory=dict)

    def passed(self) -> bool:
        """Whether all marks can be read without waiting."""
        marks = [mark for span in self.spans.values() for mark in span]
        marks += [mark for mark in (self.begin, self.end, self.finish) if mark is not None]
        return self.end is not None and all(mark.query() for mark in marks)

    def resolve(self, record: BackwardRecord) -> BackwardRecord:
        """``record`` with the device's times, in seconds after the start of backward."""

        def at(mark: Mark | None) -> float:
            return self.begin.elapsed_time(mark) / 1e3 if mark is not None else 0.0

        spans = {index: (at(start), at(landed)) for index, (start, landed) in self.spans.items()}
        end = at(self.end)
        last = max([end, *(landed for _, landed in spans.values())])
        finish = at(self.finish) if self.finish is not None else last
        return BackwardRecord(end=end, finish=finish, spans=spans, deferred=record.deferred)


@dataclass(kw_only=True)
class BackwardRecord:
    """Times of one synchronised backward, in seconds of ``time.perf_counter()``.

    Attributes:
        begin: first sign of the backward.
        end: end of the gradient computation.
        finish: all averages in place.
        first_ready: first gradient ready, 0.0 when unknown.
        spans: launch and landing of each bucket that is known to the host.
        deferred: the buckets were launched after backward (first backward, mode ``simple``, ``reduce_now``).
        captured: the work was recorded into a CUDA graph; times mean nothing.
        on_device: parameters are on a device, so the host's ``end`` and ``finish`` say when work was queued.
        device: the device's own times; ``None`` on CPU and where this backward was not timed.
    """

    begin: float = 0.0
    end: float = 0.0
    finish: float = 0.0
    first_ready: float = 0.0
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    deferred: bool = False
    captured: bool = False
    on_device: bool = False
    device: DeviceTimes | None = None


class ReadyTimes:
    """When each gradient of one backward was accumulated, by the host's clock and by events on CUDA."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}
        self._events: dict[str, Mark] = {}

    def note(self, name: str, now: float, *, event: bool) -> None:
        """A gradient is ready; with ``event`` the current CUDA stream marks it as well."""
        self._at[name] = now
        if event:
            self._events[name] = cuda_event()

    def relative(self, begin: float) -> dict[str, float]:
        """Milliseconds from ``begin`` by name. Waits for the device when events were taken (profiling)."""
        times = {name: (at - begin) * 1e3 for name, at in self._at.items()}
        if self._events:
            first, anchor = next(iter(self._events.items()))
            for name, event in self._events.items():
                event.synchronize()  # type: ignore[attr-defined]
                times[name] = times[first] + anchor.elapsed_time(event)
        return times
