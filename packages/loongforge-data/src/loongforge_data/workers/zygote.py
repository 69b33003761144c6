"""The process that forks workers.

It is started once per loader, before anything else happens there (before CUDA is up, when the loader is
used early), by fork, spawn or forkserver. Workers are forked from it, so that replacing a dead one is
quick and safe at any time: the zygote has one thread, no CUDA and no open decoder.

It leaves, and its workers with it, when the trainer's process ends for whatever reason.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd

from loongforge_data._core import Ring
from loongforge_data.workers.loop import WorkerSpec, run_threads

_PR_SET_PDEATHSIG = 1


class RingHandle:
    """A ring that can be handed to a child process of any start method of multiprocessing."""

    def __init__(self, ring: Ring) -> None:
        self._fd = ring.fileno()

    def __getstate__(self) -> dict[str, object]:
        return {"duplicate": DupFd(self._fd)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self._fd = state["duplicate"].detach()  # type: ignore[attr-defined]

    def open(self) -> Ring:
        """Join the ring."""
        return Ring.attach(self._fd)


def multiprocessing_main(
    connection: Connection, handle: RingHandle, spec: WorkerSpec, owner: int, inherited: list[int]
) -> None:
    """Be a zygote that multiprocessing started."""
    zygote_main(connection, handle.open(), spec, owner, inherited)


def zygote_main(
    connection: Connection, ring: Ring, spec: WorkerSpec, owner: int, inherited: list[int]
) -> None:
    """Serve requests: ("spawn", number) answers the process id; ("reap", pid) collects a dead worker.

    Args:
        connection: To the trainer's process.
        ring: The ring.
        spec: What workers do.
        owner: Process id of the trainer.
        inherited: Descriptors of the trainer that a fork copied and that must be closed here.
    """
    # Garbage of the trainer must not be collected in a copy of it: it may hold decoders whose threads do
    # not exist
    # here. Frozen objects are never looked at again.
    gc.disable()
    gc.freeze()
    for descriptor in inherited:
        with suppress(OSError):
            os.close(descriptor)
    _calm()
    try:
        owner_fd = os.pidfd_open(owner)
    except OSError:
        return
    children: set[int] = set()
    connection.send(("ready", os.getpid()))
    try:
        while True:
            readable, _, _ = select.select([connection.fileno(), owner_fd], [], [])
            if owner_fd in readable or not _serve(connection, ring, spec, children):
                return
    except (EOFError, OSError):
        return
    finally:
        ring.stop()
        for child in children:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
        # Nothing of the trainer's (exit handlers, buffered output) may run in this copy of it.
        os._exit(0)


def _serve(connection: Connection, ring: Ring, spec: WorkerSpec, children: set[int]) -> bool:
    command, value = connection.recv()
    if command == "spawn":
        child = os.fork()
        if child == 0:
            _worker(connection, ring, value, spec)
        children.add(child)
        connection.send(("pid", child))
    elif command == "reap":
        with suppress(ChildProcessError):
            os.waitpid(value, 0)
        children.discard(value)
    return command != "exit"


def _worker(connection: Connection, ring: Ring, number: int, spec: WorkerSpec) -> None:
    """Be worker ``number``; never returns."""
    code = 1
    try:
        connection.close()
        parent = os.getppid()
        gc.enable()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _give_way(spec.niceness)
        _quiet_decoder()
        run_threads(ring, number, spec, _parent_check(parent))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stderr.flush()
            sys.stdout.flush()
        os._exit(code)


def _parent_check(parent: int) -> Callable[[], bool]:
    return lambda: os.getppid() == parent


def _calm() -> None:
    """Leave Ctrl-C to the trainer, and thread pools of libraries unused."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _give_way(niceness: int) -> None:
    """A worker must not push the trainer's thread off its core: it is batch work, of lower weight."""
    if niceness == 0:
        return
    with suppress(OSError):  # not allowed in some containers; then workers only compete as equals
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(niceness)


def _quiet_decoder() -> None:
    """FFmpeg must not call back into Python for log lines: a known deadlock with threads and fork."""
    if "av" in sys.modules:
        import av.logging

        av.logging.restore_default_callback()
