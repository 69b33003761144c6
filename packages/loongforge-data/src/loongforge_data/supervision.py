"""The owner's side of the work: jobs on their way, workers that die or hang, items that failed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loongforge_data._core import Ring
from loongforge_data.planning import TARGET_FIELDS
from loongforge_data.telemetry import LoaderCounters
from loongforge_data.workers.crew import Crew, WorkerError
from loongforge_data.workers.jobs import (
    FAILED,
    CollateJob,
    DecodeJob,
    Job,
    SampleJob,
    TableJob,
    decode,
    decode_failures,
    encode,
)

# How often a job may cost its worker without any of its items being made in between, before that is an error.
MAX_DEATHS = 5
MAX_HANGS = 2
CHECK_SECONDS = 0.1
Item = tuple[int, int, int]
"""slot, sequence, item"""


class QueuedJob(NamedTuple):
    """A job with what it depends on.

    Attributes:
        job: What to do.
        waits_for: Slot that must be filled but for one item first.
    """

    job: Job
    waits_for: int | None = None


@dataclass(kw_only=True)
class _Attempts:
    """Workers that a job has cost."""

    deaths: int = 0
    hangs: int = 0
    missing: int = -1


class Supervisor:
    """Publishes jobs, watches the workers that do them, and keeps what went wrong.

    Args:
        ring: The board.
        crew: The workers.
        timeout: Seconds after which a job counts as hung.
        counters: Where restarts and repeated jobs are counted.
    """

    def __init__(self, ring: Ring, crew: Crew, timeout: float, counters: LoaderCounters) -> None:
        self._ring = ring
        self._board = ring.board()
        self._crew = crew
        self._timeout = timeout
        self._counters = counters
        self._backlog: deque[QueuedJob] = deque()
        self._attempts: dict[int, _Attempts] = {}
        self._failures: dict[Item, str] = {}
        self._checked = 0.0

    @property
    def waiting(self) -> int:
        """Jobs that are not finished, on the board or before it."""
        return self._board.outstanding() + len(self._backlog)

    def add(self, jobs: Iterable[QueuedJob]) -> None:
        """Queue jobs behind those that are there."""
        self._backlog.extend(jobs)

    def publish(self) -> None:
        """Move the backlog to the board as far as it has room."""
        if not self._backlog:
            return
        self.collect()
        while self._backlog:
            queued = self._backlog[0]
            if self._board.push(encode(queued.job), queued.waits_for) is None:
                break
            self._backlog.popleft()
        self._board.wake_workers()

    def failure(self, item: Item) -> str:
        """Return why an item could not be made, and forget it."""
        return self._failures.pop(item, "unknown error")

    def drop(self) -> None:
        """Forget everything: unclaimed jobs leave the board, claimed ones are waited for."""
        self._backlog.clear()
        deadline = time.monotonic() + self._timeout
        while self._board.clear_queued():
            if time.monotonic() > deadline or self._crew.dead():
                for _, worker, _ in self._board.claimed():
                    self._replace(worker, ())
            progress = self._ring.wait_progress(0xFFFFFFFF, 0.0)
            self._ring.wait_progress(progress, 0.02)
        self._attempts.clear()
        self._failures.clear()

    def collect(self) -> None:
        """Take ended jobs off the board; mark the items that failed ones could not make."""
        for _, raw in self._board.collect():
            for failure in decode_failures(raw):
                for item in failure.items:
                    self._failures[item] = failure.message
                    self._ring.mark(*item, FAILED)

    def watch(self, filling: Callable[[], Sequence[int]]) -> None:
        """Replace workers that died or hang; looks at most every `CHECK_SECONDS`.

        Args:
            filling: Returns the slots being filled.
        """
        now = time.monotonic()
        if now - self._checked < CHECK_SECONDS:
            return
        self._checked = now
        self.collect()
        for worker in self._crew.dead():
            self._replace(worker, filling())
        for _, worker, age in self._board.claimed():
            if age > self._timeout:
                self._replace(worker, filling(), hung=True)

    def _replace(self, worker: int, slots: Sequence[int], *, hung: bool = False) -> None:
        """Put a dead worker's jobs back and start it again.

        Raises:
            WorkerError: One of its jobs has now cost several workers.
        """
        if worker not in self._crew.pids:
            return
        if not self._crew.kill(worker):
            msg = f"worker {worker} (process {self._crew.pids[worker]}) cannot be killed"
            raise WorkerError(msg)
        held = [serial for serial, owner, _ in self._board.claimed() if owner == worker]
        pid = self._crew.remove(worker)
        for serial in held:
            self._blame(serial, hung=hung, worker=worker, pid=pid)
        self._counters.requeued_jobs += self._board.requeue(worker)
        self._counters.restarts += 1
        self._crew.start(worker)
        for slot in slots:
            self._ring.settle(slot)

    def _blame(self, serial: int, *, hung: bool, worker: int, pid: int) -> None:
        """Count what a job has cost; progress in between forgives."""
        payload = self._board.payload(serial)
        job = None if payload is None else decode(payload)
        attempts = self._attempts.setdefault(serial, _Attempts())
        missing = self._missing(job)
        if missing != attempts.missing:
            attempts.deaths = attempts.hangs = 0
            attempts.missing = missing
        attempts.deaths += 1
        attempts.hangs += hung
        if attempts.deaths < MAX_DEATHS and attempts.hangs < MAX_HANGS:
            return
        self._crew.close()
        happened = (
            f"hung for {self._timeout:g} s, {attempts.hangs} times in a row"
            if hung
            else f"died {attempts.deaths} times in a row"
        )
        msg = f"worker {worker} (process {pid}) {happened}, at {_name(job)}; see its output above" + (
            ", or raise timeout" if hung else ""
        )
        raise WorkerError(msg)

    def _missing(self, job: Job | None) -> int:
        """Return how many items of a job are not made yet."""
        if not isinstance(job, DecodeJob):
            return 1
        table = np.frombuffer(job.targets, np.int64).reshape(-1, TARGET_FIELDS)
        return sum(self._ring.wants(slot, sequence, item) for _, slot, sequence, item, _ in table.tolist())


def _name(job: Job | None) -> str:
    match job:
        case DecodeJob():
            frames = np.frombuffer(job.targets, np.int64).reshape(-1, TARGET_FIELDS)[:, 0]
            return f"frames {frames[:8].tolist()} of {job.path}"
        case TableJob() | SampleJob():
            return f"samples {np.frombuffer(job.indices, np.int64).tolist()}"
        case CollateJob():
            return f"collating {job.samples} samples"
        case _:
            return "a job that was dropped"
