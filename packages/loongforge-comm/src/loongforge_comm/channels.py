"""Sends one bucket: picks the process group, stream and algorithm, and returns something to wait for."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from loongforge_comm.algorithms import ALGORITHMS
from loongforge_comm.internals import abort_groups, cuda_event, cuda_stream, wait_slice


@dataclass(kw_only=True)
class Flight:
    """A bucket on its way.

    Attributes:
        launched: ``time.perf_counter()`` at launch.
        landed: the same at completion, 0.0 while unknown (CUDA completion is not observed by the host).
        done_event: CUDA event after the collective, when timing was asked for.
    """

    launched: float
    landed: float = 0.0
    work: dist.Work | None = None
    finished: threading.Event | None = None
    error: BaseException | None = None
    stream: torch.cuda.Stream | None = None
    start_event: torch.cuda.Event | None = None
    done_event: torch.cuda.Event | None = None
    after: list[Callable[[], None]] = field(default_factory=list)

    def wait(self, limit_s: float) -> bool:
        """Wait up to ``limit_s`` seconds. CPU: until done. CUDA: makes the current stream wait and returns.

        Returns:
            False when the time ran out. Errors of the backend are raised.
        """
        if self.work is not None:
            if not self._wait_work(limit_s):
                return False
        elif self.finished is not None:
            if not self.finished.wait(limit_s):
                return False
            if self.error is not None:
                raise self.error
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        while self.after:
            self.after.pop(0)()
        return True

    def _wait_work(self, limit_s: float) -> bool:
        work = self.work
        assert work is not None
        if self.stream is not None:
            work.wait()
            return True
        if not wait_slice(work, limit_s):
            return False
        if not self.landed:
            self.landed = time.perf_counter()
        return True


class Channels:
    """Process groups and threads that carry buckets; all ranks must create it and launch in the same order.

    Two groups of the same ranks are used beside the caller's: ``ring`` for the backend's all-reduce and
    ``peers`` for the algorithms of :mod:`loongforge_comm.algorithms`, so that neither mixes with collectives
    of the model. torch names such groups by their ranks and by how many groups the process is in, so every
    rank must be in equally many.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        timeout_s: float,
        nccl_algorithms: bool = False,
    ) -> None:
        """Create the groups (collective over ``ranks``)."""
        self.ranks = tuple(ranks)
        self._timeout = timedelta(seconds=timeout_s)
        self.ring = self._group()
        self.peers = self._group()
        self._named: dict[str, dist.ProcessGroup] = {}
        self._nccl_algorithms = nccl_algorithms
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._watching: dict[torch.device, torch.cuda.Stream] = {}

    def _group(self) -> dist.ProcessGroup:
        group = dist.new_group(list(self.ranks), timeout=self._timeout, use_local_synchronization=True)
        if group is None or not isinstance(group, dist.ProcessGroup):
            msg = f"ranks {self.ranks} do not contain this process, rank {dist.get_rank()}"
            raise ValueError(msg)
        return group

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """The side stream for packing and point-to-point algorithms on ``device``."""
        if device not in self._streams:
            self._streams[device] = cuda_stream(device)
        return self._streams[device]

    def launch(
        self,
        buffer: Tensor,
        strategy: str,
        *,
        average: bool = False,
        compress: bool = False,
        timed: bool = False,
    ) -> Flight:
        """Start the sum over ranks of ``buffer`` in place.

        Args:
            buffer: contiguous, any dtype the backend carries; complex is sent as pairs of reals.
            strategy: ``ring``, ``tree``, ``direct`` or ``all_gather``.
            average: let the backend divide by the number of ranks (NCCL ring only).
            compress: send float32 as bfloat16.
            timed: record CUDA events around the collective.
        """
        payload = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        flight = Flight(launched=time.perf_counter())
        side = self.stream(buffer.device) if buffer.is_cuda else None
        with torch.cuda.stream(side) if side is not None else nullcontext():
            if compress and payload.dtype == torch.float32:
                small = payload.to(torch.bfloat16)
                flight.after.append(partial(_copy, payload, small))
                payload = small
            if timed and side is not None:
                flight.start_event = cuda_event()
            flight.stream = side
            if strategy == "ring" or (side is not None and self._nccl_algorithms and strategy == "tree"):
                operation = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
                group = self._communicator(strategy, payload)
                flight.work = dist.all_reduce(payload, operation, group=group, async_op=True)
                if side is None and flight.work is not None:
                    flight.work.get_future().add_done_callback(lambda _: _land(flight))
            elif side is not None:
                ALGORITHMS[strategy](payload, self.peers)
            else:
                self._submit(flight, payload, strategy)
            if timed and side is not None:
                flight.done_event = self._landing_event(buffer.device, flight.work)
        return flight

    def _landing_event(self, device: torch.device, work: dist.Work | None) -> torch.cuda.Event:
        """An event after the collective, on a stream of its own: the next bucket's packing must not wait."""
        if work is None:
            return cuda_event()
        if device not in self._watching:
            self._watching[device] = cuda_stream(device)
        with torch.cuda.stream(self._watching[device]):
            work.wait()
            return cuda_event()

    def _communicator(self, strategy: str, payload: Tensor) -> dist.ProcessGroup:
        """The plain group, or with ``nccl_algorithms`` one whose communicator was made under a forced
        algorithm.

        NCCL reads ``NCCL_ALGO`` when a communicator is created, that is at the group's first collective on a
        device. The setting is undocumented, process-wide while set, and must be equal on all ranks.
        """
        if not (self._nccl_algorithms and payload.is_cuda):
            return self.ring
        if strategy not in self._named:
            group = self._group()
            before = os.environ.get("NCCL_ALGO")
            os.environ["NCCL_ALGO"] = f"allreduce:{strategy}"
            try:
                dist.all_reduce(torch.zeros(1, device=payload.device), group=group)
            finally:
                if before is None:
                    del os.environ["NCCL_ALGO"]
                else:
                    os.environ["NCCL_ALGO"] = before
            self._named[strategy] = group
        return self._named[strategy]

    def _submit(self, flight: Flight, payload: Tensor, strategy: str) -> None:
        """Queue a CPU algorithm; one thread runs them in launch order, so messages match between ranks."""
        flight.finished = threading.Event()

        def job() -> None:
            try:
                ALGORITHMS[strategy](payload, self.peers)
            except BaseException as error:
                flight.error = error
            flight.landed = time.perf_counter()
            flight.finished.set()  # type: ignore[union-attr]

        if self._thread is None:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_run_jobs, args=(self._jobs,), name="loongforge-comm-peers", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)  # type: ignore[union-attr]

    def abort_device_groups(self, *, limit_s: float = 5.0) -> None:
        """End collectives that a device waits in for ever (NCCL), within ``limit_s`` seconds."""
        abort_groups((self.ring, self.peers, *self._named.values()), limit_s)

    def close(self, *, limit_s: float = 5.0) -> None:
        """End the thread. Process groups stay with torch until it is shut down.

        Args:
            limit_s: longest wait for it; with a rank lost it may be in a transfer that will not end.
        """
        if self._thread is not None and self._jobs is not None:
            self._jobs.put(None)
            self._thread.join(timeout=limit_s)
            self._thread = None


def _run_jobs(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()


def _land(flight: Flight) -> None:
    flight.landed = time.perf_counter()


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
