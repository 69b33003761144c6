"""Batches made in this process when they are asked for (``num_workers=0``)."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import numpy as np
import numpy.typing as npt

from loongforge_data.assembly import (
    Bad,
    good_rows,
    join_batch,
    join_samples,
    picture_failures,
    read_samples,
    read_table,
)
from loongforge_data.cache import FrameCache
from loongforge_data.collate import collate_arrays
from loongforge_data.delivery import Delivery
from loongforge_data.frames import FrameReader
from loongforge_data.layout import BatchLayout, PlannedBatch
from loongforge_data.order import EpochPlan
from loongforge_data.planning import VideoDataset, plan_frames
from loongforge_data.telemetry import NAMES
from loongforge_data.workers.jobs import FAILED, STORED, describe
from loongforge_data.workers.loop import WorkerSpec


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
        self._spec = spec
        self._counts = dict.fromkeys(NAMES, 0)
        self._plan: EpochPlan | None = None
        self._batch = 0
        self._reader: FrameReader | None = None
        if isinstance(spec.dataset, VideoDataset):
            cache = None if spec.cache is None else FrameCache(spec.cache)
            self._reader = FrameReader(spec.images, cache=cache, count=self._count, gpu=spec.gpu)

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
