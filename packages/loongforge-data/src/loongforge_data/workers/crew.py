"""The owner's side of the worker processes: start, watch, replace, stop."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from loongforge_data._core import Ring
from loongforge_data.workers.loop import WorkerSpec
from loongforge_data.workers.zygote import RingHandle, zygote_main

StartMethod = Literal["fork", "spawn", "forkserver"]
START_METHODS: tuple[StartMethod, ...] = ("fork", "spawn", "forkserver")
_START_SECONDS = 60.0
_EXIT_SECONDS = 5.0


class WorkerError(RuntimeError):
    """A worker process died or hung, and doing its work again did not help."""


@dataclass(kw_only=True)
class _Member:
    pid: int
    pidfd: int


def choose_method(wanted: str | None) -> tuple[StartMethod, str]:
    """Return the start method and why: fork, unless CUDA is up in this process."""
    if wanted is not None:
        if wanted not in START_METHODS:
            msg = f"multiprocessing_context is {wanted!r}, allowed are {START_METHODS} or None"
            raise ValueError(msg)
        return wanted, "asked for"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return "forkserver", "CUDA is up in this process"
    return "fork", "default"


class Crew:
    """Worker processes of one loader."""

    def __init__(self, ring: Ring, spec: WorkerSpec, *, workers: int, method: StartMethod) -> None:
        self._ring = ring
        self._owner = os.getpid()
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        inherited = [ours.fileno()] if method == "fork" else []
        self._zygote = context.Process(  # type: ignore[attr-defined]
            target=zygote_main,
            args=(theirs, RingHandle(ring), spec, self._owner, inherited),
            name="loongforge-data-zygote",
            daemon=True,
        )
        try:
            self._zygote.start()
        except Exception as error:
            ours.close()
            theirs.close()
            msg = (
                f"workers cannot be started by {method}: {error}; everything given to the loader must pickle"
            )
            raise WorkerError(msg) from error
        theirs.close()
        self._connection = ours
        self._members: dict[int, _Member] = {}
        self._closed = False
        self._receive("ready")
        for number in range(workers):
            self.start(number)

    def _receive(self, kind: str) -> int:
        deadline = time.monotonic() + _START_SECONDS
        while not self._connection.poll(0.2):
            if not self._zygote.is_alive() or time.monotonic() > deadline:
                msg = (
                    f"the process that starts workers did not answer (exit code {self._zygote.exitcode}); "
                    "see its output above"
                )
                raise WorkerError(msg)
        try:
            answer, value = self._connection.recv()
        except EOFError:
            msg = f"the process that starts workers has ended (exit code {self._zygote.exitcode})"
            raise WorkerError(msg) from None
        if answer != kind:
            msg = f"the process that starts workers answered {answer!r} instead of {kind!r}"
            raise WorkerError(msg)
        return int(value)

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each worker."""
        return {number: member.pid for number, member in self._members.items()}

    def start(self, number: int) -> None:
        """Start worker ``number``."""
        self._connection.send(("spawn", number))
        pid = self._receive("pid")
        self._members[number] = _Member(pid=pid, pidfd=os.pidfd_open(pid))

    def dead(self) -> list[int]:
        """Return the workers that have ended, without waiting."""
        if not self._members:
            return []
        numbers = {member.pidfd: number for number, member in self._members.items()}
        poll = select.poll()
        for pidfd in numbers:
            poll.register(pidfd, select.POLLIN)
        return [numbers[fd] for fd, _ in poll.poll(0)]

    def kill(self, number: int) -> bool:
        """Kill a worker and wait until it is gone; False when it does not go."""
        member = self._members[number]
        with suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(member.pidfd, select.POLLIN)
        return bool(poll.poll(_EXIT_SECONDS * 1000))

    def remove(self, number: int) -> int:
        """Forget a dead worker; returns its process id."""
        member = self._members.pop(number)
        os.close(member.pidfd)
        self._connection.send(("reap", member.pid))
        return member.pid

    def close(self) -> None:
        """Stop all workers; those that do not leave are killed. Does nothing in a forked child."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        self._ring.stop()
        deadline = time.monotonic() + _EXIT_SECONDS
        poll = select.poll()
        for member in self._members.values():
            poll.register(member.pidfd, select.POLLIN)
        left = {member.pidfd for member in self._members.values()}
        while left and time.monotonic() < deadline:
            for fd, _ in poll.poll(100):
                left.discard(fd)
                poll.unregister(fd)
        with suppress(OSError):
            self._connection.send(("exit", 0))
        self._zygote.join(_EXIT_SECONDS)
        if self._zygote.is_alive():
            self._zygote.kill()
            self._zygote.join(_EXIT_SECONDS)
        for member in self._members.values():
            os.close(member.pidfd)
        self._members.clear()
        self._connection.close()
