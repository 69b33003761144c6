"""Where batches come from: `InlinePipeline` in this process, `RingPipeline` from worker processes.

Both deliver the batches of an `EpochPlan` in order. `RingPipeline` owns a ring: it gives upcoming batches
slots, plans the frames of several batches together, publishes jobs, and hands a filled slot out without
copying. All of that happens inside ``next``, so the trainer's process needs no thread; workers meanwhile
live on the jobs of the batches ahead.
"""

from __future__ import annotations

import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt

from loongforge_data._core import Lease, Ring
from loongforge_data.assembly import (
    Bad,
    good_rows,
    join_batch,
    join_samples,
    picture_failures,
    read_result,
    read_samples,
    read_table,
)
from loongforge_data.collate import collate_arrays
from loongforge_data.errors import DataError
from loongforge_data.frames import FrameReader
from loongforge_data.order import EpochPlan, group_batches
from loongforge_data.planning import (
    HEADER_BYTES,
    TARGET_FIELDS,
    BatchLayout,
    PlannedBatch,
    VideoDataset,
    plan_frames,
)
from loongforge_data.telemetry import NAMES, LoaderCounters
from loongforge_data.transport import unpack
from loongforge_data.workers.crew import Crew, StartMethod, WorkerError
from loongforge_data.workers.jobs import (
    FAILED,
    PAYLOAD_BYTES,
    STORED,
    CollateJob,
    DecodeJob,
    Job,
    SampleJob,
    TableJob,
    decode_failures,
    describe,
    encode,
    indices_to_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loongforge_data.workers.loop import WorkerSpec

CHECK_SECONDS = 0.1
# How often a job may cost its worker without any of its items being made in between, before that is an error.
MAX_DEATHS = 5
MAX_HANGS = 2


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """A batch as the pipeline hands it over."""

    value: object
    """The collated batch (numpy), or None when no sample of it was good."""
    indices: npt.NDArray[np.int64]
    """Samples that were asked for."""
    bad: tuple[tuple[int, str], ...]
    """(sample index, what went wrong) of those left out."""
    lease: Lease | None = None
    """The slot the arrays lie in, or None."""


class Pipeline(Protocol):
    """Delivers the batches of an epoch in order."""

    def begin(self, plan: EpochPlan, batch: int) -> None:
        """Start at a batch of an epoch; whatever was under way is dropped."""

    def next(self) -> Delivery:
        """Return the next batch."""

    def counters(self) -> Mapping[str, int]:
        """Return the workers' counters, summed."""

    def depths(self) -> Mapping[str, int]:
        """Return queue depths."""

    def close(self) -> None:
        """Stop and free everything."""


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the global random generators afterwards."""
    python, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one is the point
    torch = sys.modules.get("torch")
    tensor = None if torch is None else torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if torch is not None:
            torch.set_rng_state(tensor)


class InlinePipeline:
    """Makes each batch when it is asked for, in this process (``num_workers=0``)."""

    def __init__(self, spec: WorkerSpec) -> None:
        from loongforge_data.cache import FrameCache

        self._spec = spec
        self._counts = dict.fromkeys(NAMES, 0)
        self._plan: EpochPlan | None = None
        self._batch = 0
        self._reader: FrameReader | None = None
        if isinstance(spec.dataset, VideoDataset):
            cache = None if spec.cache is None else FrameCache(spec.cache)
            self._reader = FrameReader(spec.images, cache=cache, count=self._count)

    def _count(self, name: str, amount: int) -> None:
        self._counts[name] += amount

    def begin(self, plan: EpochPlan, batch: int) -> None:
        """Start at a batch of an epoch."""
        self._plan, self._batch = plan, batch

    def next(self) -> Delivery:
        """Return the next batch."""
        if self._plan is None:
            msg = "next() before begin()"
            raise RuntimeError(msg)
        indices = self._plan.batch(self._batch)
        epoch = self._plan.epoch
        value, bad = self._video(indices) if self._reader is not None else self._samples(indices, epoch)
        self._batch += 1
        named = tuple((int(indices[row]), text) for row, text in bad)
        return Delivery(value=value, indices=indices, bad=named)

    def _samples(self, indices: npt.NDArray[np.int64], epoch: int) -> tuple[object, Bad]:
        spec = self._spec
        with kept_random_state():
            samples, bad = read_samples(
                spec.dataset, indices.tolist(), seed=spec.seed, epoch=epoch, go_on=spec.skip_errors
            )
            if not samples or (bad and not spec.skip_errors):
                return None, bad
            return (spec.collate_fn or collate_arrays)(samples), bad

    def _video(self, indices: npt.NDArray[np.int64]) -> tuple[object, Bad]:
        spec, reader = self._spec, self._reader
        dataset = cast("VideoDataset", spec.dataset)
        if reader is None:
            return None, []
        layout = spec.layout(len(indices))
        places = _Memory(layout)
        batch = PlannedBatch(sequence=0, slot=0, indices=indices, layout=layout)
        texts: dict[int, str] = {}
        for job in plan_frames(dataset, [batch], {}):
            wanted: dict[int, list[tuple[int, int, int, int]]] = {}
            for index, slot, sequence, item, offset in job.targets.tolist():
                wanted.setdefault(index, []).append((slot, sequence, item, offset))
            for index, error in reader.read(job.key, job.path, wanted, places).items():
                for _, _, item, _ in wanted[index]:
                    places.marks[item] = FAILED
                    texts[item] = describe(error)
        samples, bad = read_table(dataset, indices.tolist())
        rows = good_rows(layout, bytes(places.marks), bad)
        failures = [(row, texts[item]) for row, item in picture_failures(layout, bytes(places.marks)).items()]
        everything = sorted(bad + failures)
        if not rows:
            return None, everything
        view = memoryview(places.data)
        if spec.collate_fn is None:
            return join_batch(view, layout, collate_arrays(samples), rows, bad), everything
        return spec.collate_fn(join_samples(view, layout, samples, rows, bad)), everything

    def counters(self) -> Mapping[str, int]:
        """Return this process's counters."""
        return self._counts

    def depths(self) -> Mapping[str, int]:
        """Return queue depths: nothing is queued here."""
        return {"ready_batches": 0, "filling_batches": 0, "slots": 0, "slots_in_use": 0, "queued_jobs": 0}

    def close(self) -> None:
        """Close decoders."""
        if self._reader is not None:
            self._reader.close()


class _Memory:
    """Places of one batch in ordinary memory."""

    def __init__(self, layout: BatchLayout) -> None:
        self.data = bytearray(layout.table_offset)
        self.marks = bytearray(layout.pictures)
        self._view = memoryview(self.data)

    def buffer(self, slot: int) -> memoryview:
        """Return the bytes."""
        return self._view

    def stored(self, slot: int, sequence: int, item: int) -> None:
        """Note an item."""
        self.marks[item] = STORED


@dataclass(kw_only=True)
class _Pending:
    """A batch on its way."""

    planned: PlannedBatch
    plan: EpochPlan
    batch: int
    serials: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class _Attempts:
    """Workers that a job has cost."""

    deaths: int = 0
    hangs: int = 0
    missing: int = -1


@dataclass(frozen=True, kw_only=True)
class RingSettings:
    """Sizes and limits of a `RingPipeline`."""

    slots: int
    """Slots of the ring."""
    slot_bytes: int
    """Bytes of a slot."""
    workers: int
    """Worker processes."""
    method: StartMethod
    """How the first helper process is started."""
    payload: bytes = b""
    """The pickled spec, for the method "server"."""
    timeout: float
    """Seconds after which a job counts as hung."""
    chunk: int
    """Batches planned together."""
    batch_size: int
    """Samples of a full batch."""


class RingPipeline:
    """Batches from worker processes through shared memory."""

    def __init__(
        self,
        spec: WorkerSpec,
        settings: RingSettings,
        counters: LoaderCounters,
        successor: Callable[[EpochPlan], EpochPlan] | None = None,
    ) -> None:
        self._spec = spec
        self._successor = successor
        self._settings = settings
        self._counters = counters
        self._video = isinstance(spec.dataset, VideoDataset)
        self._collating = spec.collate_fn is not None and self._video
        pictures = spec.layout(settings.batch_size).pictures if self._video else 0
        self._ring = Ring(
            slots=settings.slots,
            slot_bytes=settings.slot_bytes,
            items=pictures + 2,
            jobs=4096,
            payload=PAYLOAD_BYTES,
            workers=settings.workers,
        )
        self._crew = Crew(
            self._ring, spec, workers=settings.workers, method=settings.method, payload=settings.payload
        )
        self._gap = _gop_lengths(spec.dataset) if self._video else {}
        self._plan: EpochPlan | None = None
        self._next_batch = 0
        self._sequence = 0
        self._active = settings.slots
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        self._backlog: list[tuple[Job, int | None, tuple[int, ...]]] = []
        self._jobs: dict[int, Job] = {}
        self._attempts: dict[int, _Attempts] = {}
        self._failures: dict[tuple[int, int, int], str] = {}
        self._checked = 0.0

    # -- public ------------------------------------------------------------------------------------

    @property
    def pids(self) -> Mapping[int, int]:
        """Process ids of the workers."""
        return self._crew.pids

    @property
    def ring(self) -> Ring:
        """The ring, for registration with a device."""
        return self._ring

    def set_active(self, slots: int) -> None:
        """Use this many slots from now on (retuning); unused ones give their memory back."""
        self._active = max(2, min(slots, self._settings.slots))

    def begin(self, plan: EpochPlan, batch: int) -> None:
        """Start at a batch of an epoch; whatever was under way is dropped, unless it is just that."""
        first = next(iter(self._pending.values()), None)
        if first is not None and (first.plan.epoch, first.batch) == (plan.epoch, batch):
            same = first.plan.config == plan.config and first.plan.rank == plan.rank
            if same:
                self._schedule()
                return
        self._drop()
        self._plan, self._next_batch = plan, batch
        self._schedule()

    def next(self) -> Delivery:
        """Return the next batch; never waits longer than the time limit times the attempts."""
        self._schedule()
        if not self._pending:
            msg = "no slot is free: the consumer holds every batch; drop references to old batches"
            raise RuntimeError(msg)
        sequence, pending = next(iter(self._pending.items()))
        planned = pending.planned
        progress = self._ring.wait_progress(0xFFFFFFFF, 0.0)
        while True:
            self._collect()
            self._publish()
            lease = self._ring.take(planned.slot, sequence, 0.0)
            if lease is not None:
                break
            progress = self._ring.wait_progress(progress, CHECK_SECONDS)
            now = time.monotonic()
            if now - self._checked >= CHECK_SECONDS:
                self._checked = now
                self._watch()
        del self._pending[sequence]
        for serial in pending.serials:
            self._jobs.pop(serial, None)
            self._attempts.pop(serial, None)
        self._counters.fill_ms.append(1e3 * self._ring.fill_seconds(planned.slot))
        delivery = self._deliver(planned, lease)
        del lease
        self._schedule()
        return delivery

    def counters(self) -> Mapping[str, int]:
        """Return the workers' counters, summed."""
        rows = [self._ring.counters(number) for number in range(self._settings.workers)]
        return {name: sum(row[i] for row in rows) for i, name in enumerate(NAMES)}

    def depths(self) -> Mapping[str, int]:
        """Return queue depths."""
        states = [self._ring.state(slot) for slot in range(self._settings.slots)]
        return {
            "ready_batches": states.count("ready"),
            "filling_batches": states.count("filling"),
            "slots": self._active,
            "slots_in_use": states.count("inuse"),
            "queued_jobs": self._ring.outstanding() + len(self._backlog),
        }

    def close(self) -> None:
        """Stop the workers."""
        self._crew.close()

    # -- scheduling --------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Give upcoming batches slots and publish their jobs."""
        plan = self._plan
        if plan is None:
            return
        while True:
            if self._next_batch >= plan.num_batches:
                # The order of the next epoch is known: go on with it while this one is consumed.
                if self._successor is None or plan.num_batches == 0:
                    break
                plan = self._plan = self._successor(plan)
                self._next_batch = 0
            free = self._free_slots()
            size = self._chunk(plan)
            if len(free) < size:
                if self._pending or not free:
                    break
                size = len(free)
            self._plan_chunk(plan, free[:size])
        self._publish()

    def _free_slots(self) -> list[int]:
        taken = {pending.planned.slot for pending in self._pending.values()}
        return [
            slot for slot in range(self._active) if slot not in taken and self._ring.state(slot) == "free"
        ]

    def _chunk(self, plan: EpochPlan) -> int:
        """Return how many batches to plan together: whole groups of the block shuffle where they fit."""
        if not self._video:
            return 1
        left = plan.num_batches - self._next_batch
        group = group_batches(plan.config)
        if group > 1:
            left = min(left, group - self._next_batch % group)
        return max(1, min(left, self._settings.chunk, self._active // 2))

    def _plan_chunk(self, plan: EpochPlan, slots: Sequence[int]) -> None:
        batches = []
        for slot in slots:
            indices = plan.batch(self._next_batch)
            layout = self._layout(len(indices))
            batch = PlannedBatch(sequence=self._sequence, slot=slot, indices=indices, layout=layout)
            extra = (2 if self._collating else 1) if self._video else 1
            self._ring.begin(
                slot, self._sequence, layout.pictures + extra, layout.table_offset if self._video else 0
            )
            self._pending[self._sequence] = _Pending(planned=batch, plan=plan, batch=self._next_batch)
            batches.append(batch)
            self._sequence += 1
            self._next_batch += 1
        if self._video:
            self._video_jobs(batches)
        else:
            self._sample_jobs(batches, plan.epoch)

    def _layout(self, samples: int) -> BatchLayout:
        if not self._video:
            return BatchLayout(samples=samples, blocks=(), table_offset=HEADER_BYTES)
        return self._spec.layout(samples)

    def _video_jobs(self, batches: Sequence[PlannedBatch]) -> None:
        jobs: list[tuple[int, int, Job, int | None, tuple[int, ...]]] = []
        for batch in batches:
            pictures = batch.layout.pictures
            table = TableJob(
                batch.slot,
                batch.sequence,
                pictures,
                batch.layout.table_offset,
                indices_to_bytes(batch.indices),
                not self._collating,
            )
            jobs.append((batch.sequence, 0, table, None, (batch.sequence,)))
            if self._collating:
                collate = CollateJob(batch.slot, batch.sequence, pictures + 1, batch.layout.samples)
                jobs.append((batch.sequence, 2, collate, batch.slot, (batch.sequence,)))
        for found in plan_frames(cast("VideoDataset", self._spec.dataset), batches, self._gap):
            sequences = tuple(np.unique(found.targets[:, 2]).tolist())
            decode = DecodeJob(found.key, found.path, found.targets.tobytes())
            jobs.append((found.first, 1, decode, None, sequences))
        jobs.sort(key=lambda entry: entry[:2])
        self._backlog += [(job, waits_for, sequences) for _, _, job, waits_for, sequences in jobs]

    def _sample_jobs(self, batches: Sequence[PlannedBatch], epoch: int) -> None:
        for batch in batches:
            job = SampleJob(batch.slot, batch.sequence, 0, epoch, indices_to_bytes(batch.indices))
            self._backlog.append((job, None, (batch.sequence,)))

    def _publish(self) -> None:
        """Move the backlog to the board as far as it has room."""
        published = 0
        for job, waits_for, sequences in self._backlog:
            serial = self._ring.push(encode(job), waits_for)
            if serial is None:
                break
            self._jobs[serial] = job
            self._pending[sequences[-1]].serials.append(serial)
            published += 1
        if published:
            del self._backlog[:published]
            self._ring.wake_workers()

    def _drop(self) -> None:
        """Forget everything under way: unclaimed jobs leave the board, claimed ones are waited for."""
        self._backlog.clear()
        deadline = time.monotonic() + self._settings.timeout
        while self._ring.clear_queued():
            if time.monotonic() > deadline or self._crew.dead():
                for _, worker, _ in self._ring.claimed():
                    self._replace(worker)
            progress = self._ring.wait_progress(0xFFFFFFFF, 0.0)
            self._ring.wait_progress(progress, 0.02)
        for pending in self._pending.values():
            self._ring.abandon(pending.planned.slot)
        self._pending.clear()
        self._jobs.clear()
        self._attempts.clear()
        self._failures.clear()

    # -- failures ----------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take ended jobs off the board; mark the items that failed ones could not make."""
        for _, raw in self._ring.collect():
            for failure in decode_failures(raw):
                for item in failure.items:
                    self._failures[item] = failure.message
                    self._ring.mark(*item, FAILED)

    def _watch(self) -> None:
        """Replace workers that died or hang."""
        for worker in self._crew.dead():
            self._replace(worker)
        for _, worker, age in self._ring.claimed():
            if age > self._settings.timeout and worker in self._crew.pids:
                self._replace(worker, hung=True)

    def _replace(self, worker: int, *, hung: bool = False) -> None:
        """Put a dead worker's jobs back and start it again.

        Raises:
            WorkerError: One of its jobs has now cost several workers.
        """
        if worker not in self._crew.pids:
            return
        if not self._crew.kill(worker):
            msg = f"worker {worker} (process {self._crew.pids[worker]}) cannot be killed"
            raise WorkerError(msg)
        held = [serial for serial, owner, _ in self._ring.claimed() if owner == worker]
        pid = self._crew.remove(worker)
        for serial in held:
            self._blame(serial, hung=hung, worker=worker, pid=pid)
        self._counters.requeued_jobs += self._ring.requeue(worker)
        self._counters.restarts += 1
        self._crew.start(worker)
        for pending in self._pending.values():
            self._ring.settle(pending.planned.slot)

    def _blame(self, serial: int, *, hung: bool, worker: int, pid: int) -> None:
        """Count what a job has cost; progress in between forgives."""
        job = self._jobs.get(serial)
        attempts = self._attempts.setdefault(serial, _Attempts())
        missing = self._missing(job)
        if missing != attempts.missing:
            attempts.deaths = attempts.hangs = 0
            attempts.missing = missing
        attempts.deaths += 1
        attempts.hangs += hung
        if attempts.deaths < MAX_DEATHS and attempts.hangs < MAX_HANGS:
            return
        self.close()
        happened = (
            f"hung for {self._settings.timeout:g} s, {attempts.hangs} times in a row"
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

    # -- delivery ----------------------------------------------------------------------------------

    def _deliver(self, planned: PlannedBatch, lease: Lease) -> Delivery:
        view = memoryview(lease)
        marks = self._ring.marks(planned.slot)
        last = len(marks) - 1
        place = (planned.slot, planned.sequence)
        if marks[last] == FAILED or (self._video and marks[planned.layout.pictures] == FAILED):
            failed = last if marks[last] == FAILED else planned.layout.pictures
            text = self._failures.pop((*place, failed), "unknown error")
            msg = f"a batch of samples {planned.indices.tolist()} could not be made: {text}"
            raise DataError(msg)
        start, end = np.frombuffer(view[:16], dtype=np.int64).tolist()
        kept: Lease | None = lease
        if self._crowded():
            # The consumer holds so many batches that few slots are left: give it a copy and keep the slot.
            view = memoryview(bytearray(view[:end]))
            kept = None
            self._counters.copied_batches += 1
        value, bad = read_result(unpack(view, start))
        failures: Bad = []
        if self._video:
            for row, item in picture_failures(planned.layout, marks).items():
                failures.append((row, self._failures.pop((*place, item), "unknown error")))
            if not self._collating:
                rows = good_rows(planned.layout, marks, bad)
                value = join_batch(view, planned.layout, value, rows, bad) if rows else None
        named = tuple((int(planned.indices[row]), text) for row, text in sorted(bad + failures))
        return Delivery(value=value, indices=planned.indices, bad=named, lease=kept)

    def _crowded(self) -> bool:
        held = sum(1 for slot in range(self._settings.slots) if self._ring.state(slot) == "inuse")
        return held > max(2, self._active // 2)


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


def _gop_lengths(dataset: object) -> dict[str, int]:
    """Return the distance between key frames per camera, read from one file each."""
    from loongforge_data.video import video_index

    video = cast("VideoDataset", dataset)
    result: dict[str, int] = {}
    if len(video):
        for request in video.frame_requests(0):
            if request.key not in result:
                keys = video_index(request.path).keys
                result[request.key] = int(np.diff(keys).max()) if len(keys) > 1 else 64
    return result
