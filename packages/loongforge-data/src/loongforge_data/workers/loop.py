"""The loop of a worker process: claim a job, do it, mark what was stored, report what was not."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from loongforge_data._core import Ring
from loongforge_data.assembly import (
    good_rows,
    join_samples,
    read_result,
    read_samples,
    read_table,
)
from loongforge_data.cache import CacheConfig, FrameCache
from loongforge_data.collate import collate_arrays
from loongforge_data.frames import FrameReader
from loongforge_data.layout import HEADER_BYTES, BatchLayout, ImageLayoutLike, batch_layout
from loongforge_data.planning import TARGET_FIELDS, VideoDataset
from loongforge_data.prefetch import Mode, ReadAhead
from loongforge_data.telemetry import COUNTERS
from loongforge_data.transport import align, pack, unpack
from loongforge_data.workers.jobs import (
    STORED,
    CollateJob,
    DecodeJob,
    Failure,
    Job,
    SampleJob,
    TableJob,
    decode,
    describe,
    encode_failures,
    indices_from_bytes,
)

POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker needs to know; travels to it once."""

    dataset: object
    """The data set."""
    collate_fn: Callable[[list[object]], object] | None
    """The user's collate function; None for the default."""
    images: Mapping[str, ImageLayoutLike] = field(default_factory=dict)
    """Shapes of decoded pictures, for data sets that list their frames."""
    seed: int
    """Seed of the loader, for the random streams of samples."""
    skip_errors: bool
    """True: leave bad samples out and report them; False: report the first."""
    readahead: Mode = "off"
    """How bytes are asked for ahead of decoding; done by worker 0."""
    threads: int = 1
    """Threads of this process that do jobs."""
    cache: CacheConfig | None = None
    """Frame cache, or None."""
    gpu: bool = False
    """Decode on the GPU where it gives the CPU's frames."""
    niceness: int = 0
    """How much worker processes give way to the trainer; 0 leaves scheduling alone."""

    def layout(self, samples: int) -> BatchLayout:
        """Return where everything of a batch lies."""
        return batch_layout(self.images, samples)


class Counter:
    """Adds to the counters of one worker."""

    def __init__(self, ring: Ring, number: int) -> None:
        self._ring = ring
        self._number = number

    def __call__(self, name: str, amount: int) -> None:
        """Add an amount to a counter."""
        self._ring.count(self._number, COUNTERS[name], max(0, amount))


class Worker:
    """One thread's view of a worker process."""

    def __init__(self, ring: Ring, number: int, spec: WorkerSpec, alive: Callable[[], bool]) -> None:
        self._ring = ring
        self._board = ring.board()
        self._number = number
        self._spec = spec
        self._alive = alive
        self._count = Counter(ring, number)
        self._views: dict[int, memoryview] = {}
        self._reader: FrameReader | None = None

    def run(self) -> None:
        """Do jobs until the ring stops or the owner is gone."""
        while not self._ring.stopped() and self._alive():
            since = time.perf_counter_ns()
            claim = self._board.claim(self._number, POLL_SECONDS)
            self._count("idle_ns", time.perf_counter_ns() - since)
            if claim is None:
                continue
            entry, _, payload = claim
            since = time.perf_counter_ns()
            failures = self._do(decode(payload))
            self._count("busy_ns", time.perf_counter_ns() - since)
            self._count("jobs", 1)
            self._board.finish(self._number, entry, encode_failures(failures) if failures else None)
        if self._reader is not None:
            self._reader.close()

    def _do(self, job: Job) -> list[Failure]:
        match job:
            case DecodeJob():
                return self._decode(job)
            case TableJob():
                return self._one_item(job, self._table)
            case CollateJob():
                return self._one_item(job, self._collate)
            case SampleJob():
                return self._one_item(job, self._samples)

    def _one_item(self, job: TableJob | CollateJob | SampleJob, make: Callable[..., None]) -> list[Failure]:
        if not self._ring.wants(job.slot, job.sequence, job.item):
            return []
        try:
            make(job)
        except Exception as error:
            return [Failure(items=((job.slot, job.sequence, job.item),), message=describe(error))]
        self.stored(job.slot, job.sequence, job.item)
        return []

    # -- places ------------------------------------------------------------------------------------

    def buffer(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        view = self._views.get(slot)
        if view is None:
            view = self._views[slot] = memoryview(self._ring.view(slot))
        return view

    def stored(self, slot: int, sequence: int, item: int) -> None:
        """Mark an item as stored."""
        self._ring.mark(slot, sequence, item, STORED)

    # -- jobs --------------------------------------------------------------------------------------

    def _decode(self, job: DecodeJob) -> list[Failure]:
        table = np.frombuffer(job.targets, dtype=np.int64).reshape(-1, TARGET_FIELDS)
        wanted: dict[int, list[tuple[int, int, int, int]]] = {}
        for index, slot, sequence, item, offset in table.tolist():
            if self._ring.wants(slot, sequence, item):
                wanted.setdefault(index, []).append((slot, sequence, item, offset))
        if not wanted:
            return []
        errors = self._frame_reader().read(job.key, job.path, wanted, self)
        failures = []
        for index, error in errors.items():
            items = tuple(place[:3] for place in wanted[index])
            text = describe(error)
            where = "" if job.path in text else f" ({job.key}, frame {index}, file {job.path})"
            failures.append(Failure(items=items, message=text + where))
        return failures

    def _frame_reader(self) -> FrameReader:
        if self._reader is None:
            cache = None if self._spec.cache is None else FrameCache(self._spec.cache)
            self._reader = FrameReader(self._spec.images, cache=cache, count=self._count, gpu=self._spec.gpu)
        return self._reader

    def _table(self, job: TableJob) -> None:
        dataset = self._spec.dataset
        if not isinstance(dataset, VideoDataset):
            msg = f"{type(dataset).__name__} lists no frames"
            raise TypeError(msg)
        samples, bad = read_table(dataset, indices_from_bytes(job.indices))
        value = collate_arrays(samples) if job.stack and samples else samples
        self._store(job.slot, job.offset, (value, bad))

    def _store(self, slot: int, offset: int, value: object) -> None:
        """Pack a value and note its end in the slot's header."""
        view = self.buffer(slot)
        end = pack(value, view, offset, lambda size: self._ring.reserve(slot, size))
        view[0:16] = np.array([offset, end], dtype=np.int64).tobytes()
        self._count("bytes", end - offset)

    def _collate(self, job: CollateJob) -> None:
        view, layout = self.buffer(job.slot), self._spec.layout(job.samples)
        header = np.frombuffer(view[:16], dtype=np.int64)
        table, bad = read_result(unpack(view, int(header[0])))
        rows = good_rows(layout, self._ring.marks(job.slot), bad)
        samples = join_samples(view, layout, table, rows, bad)
        collate = self._spec.collate_fn or collate_arrays
        value = collate(samples) if samples else None
        self._store(job.slot, align(int(header[1])), (value, bad))

    def _samples(self, job: SampleJob) -> None:
        samples, bad = read_samples(
            self._spec.dataset,
            indices_from_bytes(job.indices),
            seed=self._spec.seed,
            epoch=job.epoch,
            go_on=self._spec.skip_errors,
        )
        value = None
        if samples and (not bad or self._spec.skip_errors):
            collate = self._spec.collate_fn or collate_arrays
            value = collate(samples)
        self._store(job.slot, HEADER_BYTES, (value, bad))


def _run_or_die(worker: Worker) -> None:
    """Run one worker thread. An error that a job cannot report ends the process: a thread that vanished alone
    would keep its job until the time limit.
    """
    try:
        worker.run()
    except BaseException:
        try:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
        finally:  # a report that cannot be written must not keep the process alive
            os._exit(1)


def run_threads(ring: Ring, number: int, spec: WorkerSpec, alive: Callable[[], bool]) -> None:
    """Run ``spec.threads`` workers under one number; returns when the ring stops."""
    threads = [
        threading.Thread(target=_run_or_die, args=(Worker(ring, number, spec, alive),), daemon=True)
        for _ in range(spec.threads - 1)
    ]
    for thread in threads:
        thread.start()
    if number == 0 and spec.readahead != "off" and isinstance(spec.dataset, VideoDataset):
        ReadAhead(ring, spec.readahead, Counter(ring, number)).start()
    Worker(ring, number, spec, alive).run()
    for thread in threads:
        thread.join(POLL_SECONDS * 4)
