"""`RingPipeline`: batches from worker processes through shared memory, in order.

It owns a ring: it gives upcoming batches slots, plans the frames of several batches together, publishes
jobs, and hands a filled slot out without copying. All of that happens inside ``next``, so the trainer's
process needs no thread; workers meanwhile live on the jobs of the batches ahead.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from loongforge_data._core import Lease, Ring
from loongforge_data.assembly import Bad, good_rows, join_batch, picture_failures, read_result
from loongforge_data.delivery import Delivery
from loongforge_data.dispatch import gop_lengths, sample_jobs, video_jobs
from loongforge_data.errors import DataError
from loongforge_data.layout import HEADER_BYTES, BatchLayout, PlannedBatch
from loongforge_data.order import EpochPlan
from loongforge_data.planning import VideoDataset
from loongforge_data.supervision import CHECK_SECONDS, Supervisor
from loongforge_data.telemetry import NAMES, LoaderCounters
from loongforge_data.transport import unpack
from loongforge_data.workers.crew import Crew, StartMethod
from loongforge_data.workers.jobs import FAILED, payload_bytes
from loongforge_data.workers.loop import WorkerSpec

_HEADER = struct.Struct("<2q")  # where the packed rest of a batch starts and ends
_FREE, _FILLING, _READY, _IN_USE = range(4)  # states of a slot


@dataclass(kw_only=True)
class _Pending:
    """A batch on its way."""

    planned: PlannedBatch
    plan: EpochPlan
    batch: int


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
    shrink: bool = True
    """Give the memory of slots that retuning left unused back; not when a device knows their pages."""


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
        # A picture, a table and a collation are a job each at most.
        self._ring = Ring(
            slots=settings.slots,
            slot_bytes=settings.slot_bytes,
            items=pictures + 2,
            jobs=max(64, min(4096, settings.slots * (pictures + 2))),
            payload=payload_bytes(settings.batch_size),
            workers=settings.workers,
        )
        self._crew = Crew(
            self._ring, spec, workers=settings.workers, method=settings.method, payload=settings.payload
        )
        self._supervisor = Supervisor(self._ring, self._crew, settings.timeout, counters)
        self._gap = gop_lengths(cast("VideoDataset", spec.dataset)) if self._video else {}
        self._plan: EpochPlan | None = None
        self._next_batch = 0
        self._sequence = 0
        self._active = settings.slots
        self._pending: OrderedDict[int, _Pending] = OrderedDict()

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
        if self._settings.shrink:
            states = self._ring.states()
            for slot in range(self._active, self._settings.slots):
                if states[slot] == _FREE and self._ring.reserved(slot):
                    self._ring.shrink(slot)

    def begin(self, plan: EpochPlan, batch: int) -> None:
        """Start at a batch of an epoch; whatever was under way is dropped, unless it is just that."""
        first = next(iter(self._pending.values()), None)
        # The number of an epoch is not enough: what is left of a begun one has other batches.
        if first is not None and first.batch == batch and first.plan.same_batches(plan):
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
        lease = self._ring.take(planned.slot, sequence, 0.0) or self._wait(planned)
        # Also where nothing had to be waited for: a dead worker is missed before its batches are.
        self._supervisor.watch(self._filling)
        del self._pending[sequence]
        self._counters.fill_ms.append(1e3 * self._ring.fill_seconds(planned.slot))
        delivery = self._deliver(planned, lease)
        del lease
        self._schedule()
        return delivery

    def _wait(self, planned: PlannedBatch) -> Lease:
        """Wait until a batch is complete; dead and hanging workers are replaced meanwhile."""
        progress = self._ring.wait_progress(0xFFFFFFFF, 0.0)
        while True:
            self._supervisor.collect()
            self._supervisor.publish()
            lease = self._ring.take(planned.slot, planned.sequence, 0.0)
            if lease is not None:
                return lease
            progress = self._ring.wait_progress(progress, CHECK_SECONDS)
            self._supervisor.watch(self._filling)

    def _filling(self) -> list[int]:
        return [pending.planned.slot for pending in self._pending.values()]

    def counters(self) -> Mapping[str, int]:
        """Return the workers' counters, summed."""
        rows = [self._ring.counters(number) for number in range(self._settings.workers)]
        return {name: sum(row[i] for row in rows) for i, name in enumerate(NAMES)}

    def depths(self) -> Mapping[str, int]:
        """Return queue depths."""
        states = self._ring.states()
        return {
            "ready_batches": states.count(_READY),
            "filling_batches": states.count(_FILLING),
            "slots": self._active,
            "slots_in_use": states.count(_IN_USE),
            "queued_jobs": self._supervisor.waiting,
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
            states = self._ring.states()[: self._active]
            free, size = states.count(_FREE), self._chunk(plan)
            if free < size:
                if self._pending or not free:
                    break
                size = free
            slots = [slot for slot, state in enumerate(states) if state == _FREE]
            self._plan_chunk(plan, slots[:size])
        self._supervisor.publish()

    def _chunk(self, plan: EpochPlan) -> int:
        """Return how many batches to plan together: whole groups of the block shuffle where they fit."""
        if not self._video:
            return 1
        left = plan.left_in_group(self._next_batch)
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
            dataset = cast("VideoDataset", self._spec.dataset)
            self._supervisor.add(video_jobs(dataset, batches, self._gap, collating=self._collating))
        else:
            self._supervisor.add(sample_jobs(batches, plan.epoch))

    def _layout(self, samples: int) -> BatchLayout:
        if not self._video:
            return BatchLayout(samples=samples, blocks=(), table_offset=HEADER_BYTES)
        return self._spec.layout(samples)

    def _drop(self) -> None:
        """Forget everything under way."""
        self._supervisor.drop()
        for pending in self._pending.values():
            self._ring.abandon(pending.planned.slot)
        self._pending.clear()

    # -- delivery ----------------------------------------------------------------------------------

    def _deliver(self, planned: PlannedBatch, lease: Lease) -> Delivery:
        view = memoryview(lease)
        marks = self._ring.marks(planned.slot)
        last = len(marks) - 1
        place = (planned.slot, planned.sequence)
        if marks[last] == FAILED or (self._video and marks[planned.layout.pictures] == FAILED):
            failed = last if marks[last] == FAILED else planned.layout.pictures
            text = self._supervisor.failure((*place, failed))
            msg = f"a batch of samples {planned.indices.tolist()} could not be made: {text}"
            raise DataError(msg)
        start, end = _HEADER.unpack_from(view)
        kept: Lease | None = lease
        if self._crowded():
            # The consumer holds so many batches that few slots are left: give it a copy and keep the slot.
            view = memoryview(bytearray(view[:end]))
            kept = None
            self._counters.copied_batches += 1
        value, bad = read_result(unpack(view, start))
        failures: Bad = []
        if self._video and FAILED in marks:
            for row, item in picture_failures(planned.layout, marks).items():
                failures.append((row, self._supervisor.failure((*place, item))))
        if self._video and not self._collating:
            rows = good_rows(planned.layout, marks, bad)
            value = join_batch(view, planned.layout, value, rows, bad) if rows else None
        named = tuple((int(planned.indices[row]), text) for row, text in sorted(bad + failures))
        return Delivery(value=value, indices=planned.indices, bad=named, lease=kept)

    def _crowded(self) -> bool:
        return self._ring.states().count(_IN_USE) > max(2, self._active // 2)
