"""The owner's side of the worker processes: start, watch, replace, stop."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal

from loongforge_data._core import Ring
from loongforge_data.workers.loop import WorkerSpec
from loongforge_data.workers.server import fork_zygote
from loongforge_data.workers.zygote import RingHandle, multiprocessing_main

StartMethod = Literal["server", "fork", "spawn", "forkserver"]
START_METHODS: tuple[StartMethod, ...] = ("server", "fork", "spawn", "forkserver")
_START_SECONDS = 60.0
_EXIT_SECONDS = 5.0


class WorkerError(RuntimeError):
    """A worker process died or hung, and doing its work again did not help."""


@dataclass(kw_only=True)
class _Member:
    pid: int
    pidfd: int


@dataclass(kw_only=True)
class _Zygote:
    pid: int
    pidfd: int
    process: BaseProcess | None = None


def _exited(pidfd: int, timeout: float = 0.0) -> bool:
    """Return whether a process ends within a time in seconds."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def choose_method(wanted: str | None, spec: WorkerSpec) -> tuple[StartMethod, str, bytes]:
    """Return the start method, why, and the pickled spec for "server".

    A clean server process is right unless what workers need cannot travel there: it does not pickle, or it
    lives in the main module, which is not imported there. Then this process is forked, as torch's
    DataLoader does, unless CUDA is up in it.

    Raises:
        ValueError: An unknown method, or no method is possible; the message says what does not pickle.
    """
    if wanted is not None and wanted not in START_METHODS:
        msg = f"multiprocessing_context is {wanted!r}, allowed are {START_METHODS} or None"
        raise ValueError(msg)
    if wanted not in (None, "server"):
        return wanted, "asked for", b""
    try:
        payload = pickle.dumps(spec, protocol=5)
        reason = "it refers to the main module" if b"__main__" in payload else ""
    except Exception as error:
        payload, reason = b"", f"it does not pickle ({type(error).__name__}: {error})"
    if not reason:
        return "server", "default" if wanted is None else "asked for", payload
    torch = sys.modules.get("torch")
    if wanted == "server" or (
        torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    ):
        why = (
            "" if wanted == "server" else ", and CUDA is up in this process, which therefore cannot be forked"
        )
        msg = (
            f"the data set or collate_fn cannot be sent to the worker server: {reason}{why}; define both "
            f"in an "
            "importable module, or use multiprocessing_context='spawn' in a guarded main module"
        )
        raise ValueError(msg)
    return "fork", f"the data set or collate_fn cannot be sent to a clean process: {reason}", b""


class Crew:
    """Worker processes of one loader."""

    def __init__(
        self, ring: Ring, spec: WorkerSpec, *, workers: int, method: StartMethod, payload: bytes
    ) -> None:
        self._ring = ring
        self._owner = os.getpid()
        self._members: dict[int, _Member] = {}
        self._poll = select.poll()
        self._closed = False
        self._connection, theirs = multiprocessing.Pipe()
        try:
            self._zygote = self._start_zygote(ring, spec, theirs, method, payload)
        except Exception as error:
            self._connection.close()
            msg = (
                f"workers cannot be started by {method}: {error}; everything given to the loader must pickle"
            )
            raise WorkerError(msg) from error
        finally:
            theirs.close()
        self._receive("ready")
        for number in range(workers):
            self.start(number)

    def _start_zygote(
        self, ring: Ring, spec: WorkerSpec, theirs: Connection, method: StartMethod, payload: bytes
    ) -> _Zygote:
        if method == "server":
            pid = fork_zygote(payload, (ring.fileno(), theirs.fileno()))
            return _Zygote(pid=pid, pidfd=os.pidfd_open(pid))
        context = multiprocessing.get_context(method)
        inherited = [self._connection.fileno()] if method == "fork" else []
        process = context.Process(  # type: ignore[attr-defined]
            target=multiprocessing_main,
            args=(theirs, RingHandle(ring), spec, self._owner, inherited),
            name="loongforge-data-zygote",
            daemon=True,
        )
        # No collection may run in a forked child before it has frozen what it inherited.
        collecting = gc.isenabled()
        gc.disable()
        try:
            process.start()
        finally:
            if collecting:
                gc.enable()
        return _Zygote(pid=process.pid, pidfd=os.pidfd_open(process.pid), process=process)

    def _receive(self, kind: str) -> int:
        deadline = time.monotonic() + _START_SECONDS
        while not self._connection.poll(0.2):
            ended = _exited(self._zygote.pidfd)
            if (ended and not self._connection.poll(0)) or time.monotonic() > deadline:
                msg = "has ended" if ended else f"did not answer within {_START_SECONDS:g} s"
                msg = f"the process that starts workers {msg}; see its output above"
                raise WorkerError(msg)
        try:
            answer, value = self._connection.recv()
        except EOFError:
            msg = "the process that starts workers has ended; see its output above"
            raise WorkerError(msg) from None
        if answer == "error":
            msg = f"the data set or collate_fn cannot be read in a worker process: {value}"
            raise WorkerError(msg)
        if answer != kind:
            msg = f"the process that starts workers answered {answer!r} instead of {kind!r}"
            raise WorkerError(msg)
        return int(value)

    def _send(self, command: str, value: int) -> None:
        try:
            self._connection.send((command, value))
        except OSError as error:
            msg = f"the process that starts workers is gone ({error}); see its output above"
            raise WorkerError(msg) from error

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each worker."""
        return {number: member.pid for number, member in self._members.items()}

    def start(self, number: int) -> None:
        """Start worker ``number``."""
        self._send("spawn", number)
        pid = self._receive("pid")
        member = self._members[number] = _Member(pid=pid, pidfd=os.pidfd_open(pid))
        self._poll.register(member.pidfd, select.POLLIN)

    def dead(self) -> list[int]:
        """Return the workers that have ended, without waiting."""
        if not self._members:
            return []
        ended = {fd for fd, _ in self._poll.poll(0)}
        return [number for number, member in self._members.items() if member.pidfd in ended] if ended else []

    def kill(self, number: int) -> bool:
        """Kill a worker and wait until it is gone; False when it does not go."""
        member = self._members[number]
        with suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
        return _exited(member.pidfd, _EXIT_SECONDS)

    def remove(self, number: int) -> int:
        """Forget a dead worker; returns its process id."""
        member = self._members.pop(number)
        self._poll.unregister(member.pidfd)
        os.close(member.pidfd)
        self._send("reap", member.pid)
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
        if not _exited(self._zygote.pidfd, _EXIT_SECONDS):
            with suppress(ProcessLookupError):
                os.kill(self._zygote.pid, signal.SIGKILL)
            _exited(self._zygote.pidfd, _EXIT_SECONDS)
        if self._zygote.process is not None:
            self._zygote.process.join(_EXIT_SECONDS)
        os.close(self._zygote.pidfd)
        for member in self._members.values():
            os.close(member.pidfd)
        self._members.clear()
        self._poll = select.poll()
        self._connection.close()
