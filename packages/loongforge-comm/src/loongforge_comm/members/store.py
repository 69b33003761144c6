"""The run's store: where it is, a connection to it, and calls that end when its host does not answer."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from loongforge_comm.errors import RankFailureError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Founding:
    """What a rank that was started together with others knows about them."""

    rank: int
    """This process's rank."""
    world_size: int
    """Number of ranks that were started."""
    address: str
    """Store of the run, ``HOST:PORT/RUN/RESTART``."""
    opens: bool
    """Whether this rank opens the store."""


def founding_of(store: str | None) -> Founding:
    """Read torchrun's variables.

    Args:
        store: ``HOST:PORT`` of a store of its own, ``None`` for the one at the master's address.

    Raises:
        ValueError: a variable is missing.
    """
    needed = ("RANK", "WORLD_SIZE") if store else ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if missing:
        msg = f"{', '.join(missing)} not set: start the ranks with torchrun, or set what it would set"
        raise ValueError(msg)
    rank = int(os.environ["RANK"])
    where = store or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Founding(
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        address=f"{where}/{run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        opens=rank == 0 and not agent and store is None,
    )


def connect(address: str, *, opens: bool = False, limit_s: float = 30.0) -> dist.Store:
    """Return a connection to the store at ``HOST:PORT/PREFIX``.

    Args:
        address: host, port, and the prefix that keeps runs and restarts apart which use one store.
        opens: open the store there.
        limit_s: longest wait, also of what is asked later.

    Raises:
        ValueError: the address is not of that form.
        ConnectionError: nothing answers there within ``limit_s``.
    """
    where, _, prefix = address.partition("/")
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or not prefix:
        msg = f"store is {address!r}, allowed is HOST:PORT/PREFIX"
        raise ValueError(msg)
    limit = timedelta(seconds=limit_s)
    try:
        store = dist.TCPStore(host, int(port), is_master=opens, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        if opens:
            msg = f"no store can be opened at {where}: {str(error).splitlines()[0][:160]}"
        else:
            msg = (
                f"no store answers at {where} within {limit_s:g} s: the run has not begun, has ended, or its "
                "store is gone"
            )
        raise ConnectionError(msg) from error
    return dist.PrefixStore(prefix, store)


class BoundedStore:
    """Calls to a store, each with a time limit and with an error that says what is the matter.

    torch's calls end at once when the store's process is gone, but wait for ever when its host hangs. They
    are made by a thread of their own, which is left behind in that case.
    """

    def __init__(self, store: dist.Store, limit_s: float) -> None:
        self._store = store
        self._limit_s = limit_s
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, question: Callable[[dist.Store], T]) -> T:
        """Return ``question(store)``.

        Raises:
            RankFailureError: the store is gone, or does not answer within the limit.
        """
        begin = time.monotonic()
        answer: queue.SimpleQueue[tuple[bool, object]] = queue.SimpleQueue()
        abandoned = threading.Event()

        def job() -> None:
            if abandoned.is_set():  # it was in the queue behind one that hung
                return
            try:
                answer.put((True, question(self._store)))
            except BaseException as error:
                answer.put((False, error))

        self._serve()
        self._jobs.put(job)
        try:
            good, value = answer.get(timeout=self._limit_s)
        except queue.Empty:
            abandoned.set()
            msg = f"the run's store has not answered for {self._limit_s:g} s: its host hangs or is gone"
            raise RankFailureError(msg, elapsed_s=self._limit_s) from None
        if good:
            return value  # type: ignore[return-value]
        if isinstance(value, RuntimeError):
            first = (str(value).splitlines() or [""])[0][:160]
            msg = f"the run's store is gone, so nobody can agree on anything any more ({first})"
            raise RankFailureError(msg, elapsed_s=time.monotonic() - begin) from value
        assert isinstance(value, BaseException)
        raise value

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _serve(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._jobs,), name="loongforge-comm-store", daemon=True
            )
            self._thread.start()


def _run(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
