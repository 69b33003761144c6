"""Phase times of a step without host syncs: CUDA events that are read late, or the host clock on the CPU."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_spare: defaultdict[torch.device, list[torch.cuda.Event]] = defaultdict(list)
"""Events of clocks that were read, by device, to be recorded anew: making one costs more than recording it.
"""


class StepClock:
    """Collects the phases of one step; resolved once the device has passed the last mark.

    On CUDA every mark is an event on the stream that is current at the beginning of the step: recording costs
    microseconds and waits for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.stream = torch.cuda.current_stream(device) if self._cuda else None
        """The stream of the marks, None on the CPU."""
        self._spare = _spare[device if self.stream is None else self.stream.device]
        self._taken: list[torch.cuda.Event] = []
        self.began = time.perf_counter()
        self.ended = self.began
        self._host: dict[str, float] = {}
        self._events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self._first = self._mark()
        self.last_mark: torch.cuda.Event | None = None

    def _mark(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        self._taken.append(event)
        return event

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the device; phases of one name add up."""
        start, host = self._mark(), time.perf_counter()
        try:
            yield
        finally:
            self._host[name] = self._host.get(name, 0.0) + time.perf_counter() - host
            end = self._mark()
            if start is not None and end is not None:
                self._events.setdefault(name, []).append((start, end))

    @contextmanager
    def host_phase(self, name: str) -> Iterator[None]:
        """Time a phase of the host only."""
        host = time.perf_counter()
        try:
            yield
        finally:
            self._host[name] = self._host.get(name, 0.0) + time.perf_counter() - host

    def finish(self) -> None:
        """Mark the end of the step."""
        self.last_mark = self._mark()
        self.ended = time.perf_counter()

    def release(self) -> None:
        """Give the marks back; nothing of the device can be asked any more."""
        self._spare.extend(self._taken)
        self._taken.clear()
        self._events.clear()
        self._first = self.last_mark = None

    def host_ms(self, name: str) -> float:
        """Host milliseconds spent in a phase."""
        return 1e3 * self._host.get(name, 0.0)

    def device_ms(self, name: str) -> float:
        """Device milliseconds of a phase; on the CPU the host's."""
        if not self._cuda:
            return self.host_ms(name)
        return sum(start.elapsed_time(end) for start, end in self._events.get(name, ()))

    def total_ms(self) -> float:
        """Milliseconds from the first mark to the last, on the device's own clock where there is one."""
        if self._first is not None and self.last_mark is not None:
            return self._first.elapsed_time(self.last_mark)
        return 1e3 * (self.ended - self.began)

    def since_ms(self, previous: StepClock) -> float:
        """Milliseconds from the end of the previous step to the end of this one."""
        if previous.last_mark is not None and self.last_mark is not None:
            return previous.last_mark.elapsed_time(self.last_mark)
        return 1e3 * (self.ended - previous.ended)

    def stall_ms(self) -> float:
        """Milliseconds the device (on the CPU: the host) stood still for data at the start of the step."""
        copies = self._events.get("h2d")
        if self._first is not None and copies:
            return self._first.elapsed_time(copies[0][0])
        return self.host_ms("data")
