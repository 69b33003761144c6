"""SIGTERM and SIGINT ask the run to finish its step; a second signal ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


class StopRequest:
    """Remembers the first signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Exit code of the process: 143 after SIGTERM, 130 after SIGINT, else 0."""
        return 0 if self.signal is None else EXIT_CODES.get(signal.Signals(self.signal), 128 + self.signal)


@contextmanager
def watch_signals(on_first: Callable[[int], None] | None = None) -> Iterator[StopRequest]:
    """Install the handlers and put the old ones back afterwards; outside the main thread install nothing.

    Args:
        on_first: Called in the handler with the first signal's number.
    """
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request.signal is not None:
            os._exit(EXIT_CODES.get(signal.Signals(number), 128 + number))
        request.signal = number
        if on_first is not None:
            on_first(number)

    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    old = {number: signal.signal(number, handle) for number in EXIT_CODES}
    try:
        yield request
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
