"""Phase times of a step without host syncs: CUDA events that are read late, or the host clock on the CPU."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

_spare: defaultdict[torch.device, list[torch.cuda.Event]] = defaultdict(list)
"""Events of clocks that were read, by device, to be recorded anew: making one costs more than recording it.
"""


class StepClock:
    """Notes where the phases of one step begin; read once the device has passed the last mark.

    A phase ends where the next one begins, so that a border costs one mark and the phases add up to the step.
    On CUDA a mark is an event on the stream that is current at the beginning of the step: recording it costs
    microseconds and waits for nothing. The first phase is ``data``; phases of one name add up, and
    ``forward`` is the whole window from its first to its last phase less the ``backward`` in it.
    """

    __slots__ = ("_marks", "_names", "_spare", "_times", "began", "ended", "stream", "waited_s")

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        """The stream of the marks, None on the CPU."""
        self._spare = _spare[device if self.stream is None else self.stream.device]
        self._names = ["data"]
        self._marks: list[torch.cuda.Event] = []
        self.began = self.ended = time.perf_counter()
        self._times = [self.began]
        self.waited_s: float | None = None
        """Host seconds until the window was there."""
        if self.stream is not None:
            self._mark()

    def _mark(self) -> None:
        spare = self._spare
        event = spare.pop() if spare else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        self._marks.append(event)

    def have_window(self) -> None:
        """Note that the host has the window: what follows is no wait for data."""
        self.waited_s = time.perf_counter() - self.began

    def enter(self, phase: str) -> None:
        """End the present phase and begin another one."""
        self._names.append(phase)
        self._times.append(time.perf_counter())
        if self.stream is not None:
            self._mark()

    def finish(self) -> None:
        """Mark the end of the step."""
        if self.stream is not None:
            self._mark()
        self.ended = time.perf_counter()
        self._times.append(self.ended)

    @property
    def last_mark(self) -> torch.cuda.Event | None:
        """The mark of the end of the step; None on the CPU and after :meth:`release`."""
        return self._marks[-1] if self._marks else None

    def release(self) -> None:
        """Give the marks back; nothing of the device can be asked any more."""
        self._spare.extend(self._marks)
        self._marks.clear()

    def host_ms(self, *phases: str) -> float:
        """Host milliseconds spent in phases."""
        times = self._times
        return 1e3 * sum(times[i + 1] - times[i] for i, name in enumerate(self._names) if name in phases)

    def host_wait_ms(self) -> float:
        """Host milliseconds until the window was there."""
        return self.host_ms("data") if self.waited_s is None else 1e3 * self.waited_s

    def phases_ms(self) -> dict[str, float]:
        """Return device milliseconds by phase; on the CPU the host's."""
        found = dict.fromkeys(self._names, 0.0)
        window: tuple[int, int] | None = None
        for place, name in enumerate(self._names):
            if name == "forward":
                window = (place if window is None else window[0], place + 1)
            else:
                found[name] += self._between(place, place + 1)
        if window is not None:
            found["forward"] = max(0.0, self._between(*window) - found.get("backward", 0.0))
        if self.stream is None:
            found["data"] = self.host_wait_ms()
        return found

    def _between(self, first: int, last: int) -> float:
        if self.stream is None:
            return 1e3 * (self._times[last] - self._times[first])
        return self._marks[first].elapsed_time(self._marks[last])

    def total_ms(self, previous: StepClock | None = None) -> float:
        """Milliseconds from the end of the previous step, or from this one's beginning, to its end.

        On the device's own clock where there is one.
        """
        if self.stream is None:
            return 1e3 * (self.ended - (self.began if previous is None else previous.ended))
        first = previous.last_mark if previous is not None else None
        return (first or self._marks[0]).elapsed_time(self._marks[-1])
