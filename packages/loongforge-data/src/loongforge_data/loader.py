"""`ADFEDataLoader`: a drop-in for `torch.utils.data.DataLoader` with exact order, exact resume and
statistics.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Generic, Literal, TypeVar, cast

from loongforge_data.cache import CacheConfig
from loongforge_data.collate import to_tensors, torch_available
from loongforge_data.delivery import Delivery, Pipeline
from loongforge_data.errorpolicy import ErrorPolicy, OnError, SkippedSample
from loongforge_data.errors import DataError
from loongforge_data.inline import InlinePipeline
from loongforge_data.order import DEFAULT_GROUP, EpochPlan, OrderConfig, Shuffle, Tail
from loongforge_data.pinning import SlotPinner
from loongforge_data.pipeline import RingPipeline, RingSettings
from loongforge_data.planning import VideoDataset, batch_layout
from loongforge_data.prefetch import MODES, Mode
from loongforge_data.resume import LoaderState, check_state, read_state
from loongforge_data.sizing import DEFAULT_SLOT_MB, RingSize, available_bytes, ring_size, slots_needed
from loongforge_data.startup import (
    MapDataset,
    block_starts,
    cache_config,
    check_range,
    fingerprint,
    following,
    threads_per_worker,
)
from loongforge_data.telemetry import LoaderCounters, Stat, flat_stats
from loongforge_data.workers.crew import START_METHODS, choose_method
from loongforge_data.workers.loop import WorkerSpec

Batch = TypeVar("Batch")
ShuffleArgument = bool | Literal["full", "block", "none"]
_TABLE_BYTES = 1 << 20
_RETUNE_BATCHES = 32


class ADFEDataLoader(Generic[Batch]):
    """Loads batches of a map-style data set.

    The first seven arguments mean what they mean for `torch.utils.data.DataLoader`. The order of samples
    depends on (seed, epoch, batch_size, world_size) alone, never on the number of workers or on a global
    random state.

    Each ``iter()`` walks the rest of the current epoch; when it ends, the loader stands at the start of
    the next one. ``state_dict()`` counts batches that were delivered, so nothing that was only prefetched
    is lost.

    A data set that lists its frames (`planning.VideoDataset`, such as `RobotDataset`) is decoded by group
    of pictures for many batches at once, straight into shared memory; the arrays of a batch are views of
    it. Any other data set is indexed in the workers.

    Args:
        dataset: Map-style data set.
        batch_size: Samples per batch and rank.
        num_workers: Worker processes; 0 loads in this process.
        pin_memory: Register shared memory with CUDA, so that copies to the device can run on their own.
        collate_fn: Makes a batch of a list of samples, in the workers; None stacks arrays and lists strings.
        prefetch_factor: Batches ahead per worker, at least; video data sets use the whole ring.
        persistent_workers: Keep workers when an epoch ends.
        shuffle: False, True or "full" (exact permutation), "block" (see `order`).
        seed: Seed of the shuffle and of the samples' random streams.
        rank: This process's share, 0 to world_size - 1.
        world_size: Number of ranks.
        drop_last: Leave out samples that do not fill a global batch. Short for ``tail="drop"``.
        tail: "short", "pad" or "drop", see `order.OrderConfig`; overrides ``drop_last``.
        infinite: Go on with the next epoch instead of ending; ``len()`` stays batches per epoch.
        group: Samples mixed together by the block shuffle; None fits half the ring, at most 512.
        on_error: "raise" stops at a bad sample; "skip" leaves it out of its batch and lists it in
            ``skipped``.
        error_budget: With "skip": the most samples (int) or the largest share (float) that may be bad.
        slots: Slots of the ring; None fits 8 x slot_mb, "auto" also adapts to measured step times.
        slot_mb: MiB per slot where a batch's size is not known beforehand; 8 x slot_mb is the ring's budget.
        threads_per_worker: Threads of each worker process; None shares the cores out among the workers.
        cache: Directory or `CacheConfig` of the frame cache; None decodes always.
        readahead: How bytes of video files are asked for ahead: "advise", "populate" or "off", see
            `prefetch`.
        lookahead: Go on filling slots with the next epoch's first batches while an epoch ends (with
            persistent_workers).
        multiprocessing_context: "server" (a clean process that workers are forked from), "fork", "spawn" or
            "forkserver"; None takes "server", or "fork" for what cannot be pickled.
        timeout: Seconds after which a worker's job counts as hung and is done again by a new worker.

    Raises:
        ValueError: An argument is outside of what it names.
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int = 1,
        num_workers: int = 0,
        pin_memory: bool = False,  # noqa: FBT001 - positional in DataLoader too
        collate_fn: Callable[[list[object]], Batch] | None = None,
        prefetch_factor: int | None = 2,
        persistent_workers: bool = False,  # noqa: FBT001
        *,
        shuffle: ShuffleArgument = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        tail: Tail | None = None,
        infinite: bool = False,
        group: int | None = None,
        on_error: OnError = "raise",
        error_budget: float = 0.01,
        slots: int | Literal["auto"] | None = None,
        slot_mb: int = DEFAULT_SLOT_MB,
        threads_per_worker: int | None = None,
        cache: str | os.PathLike[str] | CacheConfig | None = None,
        readahead: Mode = "advise",
        lookahead: bool = True,
        multiprocessing_context: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        check_range("num_workers", num_workers, 0, 1024)
        check_range("prefetch_factor", prefetch_factor or 2, 1, 1024)
        check_range("slot_mb", slot_mb, 1, 1 << 20)
        if isinstance(slots, int):
            check_range("slots", slots, 2, 4096)
        if readahead not in MODES:
            msg = f"readahead is {readahead!r}, allowed are {MODES}"
            raise ValueError(msg)
        if not timeout > 0:
            msg = f"timeout is {timeout}, allowed is a number of seconds above 0"
            raise ValueError(msg)
        if not 0 <= rank < world_size:
            msg = f"rank is {rank}, allowed is 0 <= rank < world_size = {world_size}"
            raise ValueError(msg)
        self.dataset = dataset
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.pin_memory = pin_memory
        self.collate_fn = collate_fn
        self.prefetch_factor = prefetch_factor or 2
        self.persistent_workers = persistent_workers
        self.rank = rank
        self.infinite = infinite
        self._errors = ErrorPolicy(on_error, error_budget)
        self._video = isinstance(dataset, VideoDataset)
        self._images = dict(dataset.image_layout()) if isinstance(dataset, VideoDataset) else {}
        self._slots = slots
        self._slot_mb = slot_mb
        self._timeout = timeout
        self._threads = threads_per_worker
        self._readahead: Mode = readahead
        self._cache = cache_config(cache, dataset)
        if multiprocessing_context is not None and multiprocessing_context not in START_METHODS:
            msg = (
                f"multiprocessing_context is {multiprocessing_context!r}, allowed are {START_METHODS} or None"
            )
            raise ValueError(msg)
        self._context = multiprocessing_context
        self._method: str | None = None
        self._method_reason: str | None = None
        self._lookahead = lookahead
        kind: Shuffle = shuffle if isinstance(shuffle, str) else ("full" if shuffle else "none")
        self._order = OrderConfig(
            length=len(dataset),
            batch_size=batch_size,
            world_size=world_size,
            shuffle=kind,
            seed=seed,
            tail=tail or ("drop" if drop_last else "short"),
            block_starts=block_starts(dataset) if kind == "block" else (),
            group=group or self._default_group(),
            lanes=world_size,
        )
        self._size: RingSize | None = None
        self._plan: EpochPlan | None = None
        self._epoch = 0
        self._batch = 0
        self._generation = 0
        self._counters = LoaderCounters()
        self._pipeline: Pipeline | None = None
        self._finalizer: weakref.finalize[..., object] | None = None
        self._left_at: float | None = None
        self._pinner: SlotPinner | None = None
        self._pin_reason: str | None = None

    # -- order and position ------------------------------------------------------------------------

    @property
    def skipped(self) -> list[SkippedSample]:
        """Samples left out so far."""
        return self._errors.skipped

    @property
    def epoch(self) -> int:
        """Epoch of the next batch."""
        return self._epoch

    @property
    def batch(self) -> int:
        """Batches of the current epoch already delivered."""
        return self._batch

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._order.world_size

    def __len__(self) -> int:
        """Batches per epoch, equal on every rank."""
        return self._current_plan().num_batches

    def _current_plan(self) -> EpochPlan:
        if self._plan is None or self._plan.epoch != self._epoch:
            self._plan = EpochPlan(self._order, epoch=self._epoch, rank=self.rank)
        return self._plan

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. Naming the current epoch keeps a position inside it."""
        if epoch < 0:
            msg = f"epoch is {epoch}, allowed is >= 0"
            raise ValueError(msg)
        if epoch != self._epoch:
            self._epoch, self._batch = epoch, 0
            self._generation += 1

    def state_dict(self) -> dict[str, object]:
        """Return the position after the last delivered batch; exact on any number of workers."""
        return LoaderState(
            epoch=self._epoch,
            batch=self._batch,
            order=self._order.identity(),
            length=self._order.length,
            global_batch=self._order.global_batch,
            seed=self._order.seed,
            shuffle=self._order.shuffle,
            tail=self._order.tail,
            lanes=self._order.lanes,
            fingerprint=fingerprint(self.dataset),
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue where a state was taken, also on another number of ranks with the same global batch.

        An iterator that is already running ends; the next ``iter()`` delivers the batch after the saved
        position.

        Raises:
            ValueError: The state belongs to another data set, order, global batch or format.
        """
        saved = read_state(state)
        order = replace(self._order, lanes=saved.lanes)
        check_state(saved, order, fingerprint(self.dataset))
        self._order = order
        self._plan = None
        self._epoch, self._batch = saved.epoch, saved.batch
        self._generation += 1

    # -- iteration ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the rest of the current epoch."""
        self._generation += 1
        return self._iterate(self._generation)

    def _iterate(self, generation: int) -> Iterator[Batch]:
        while True:
            plan = self._current_plan()
            pipeline = self._ready_pipeline(plan)
            if pipeline is not None:
                pipeline.begin(plan, self._batch)
                while self._batch < plan.num_batches:
                    batch = self._next_batch(pipeline, plan)
                    if batch is not None:
                        yield cast("Batch", batch)
                    if generation != self._generation:
                        return
            self._counters.padded_samples += plan.padded
            self._epoch, self._batch = self._epoch + 1, 0
            if not self.infinite or plan.num_batches == 0:
                break
        self._left_at = None
        if not self.persistent_workers:
            self._stop()

    def _ready_pipeline(self, plan: EpochPlan) -> Pipeline | None:
        if self._batch >= plan.num_batches:
            return None
        if self._pipeline is None:
            self._pipeline = self._start()
        return self._pipeline

    def _next_batch(self, pipeline: Pipeline, plan: EpochPlan) -> object | None:
        counters = self._counters
        start = time.perf_counter()
        if self._left_at is not None:
            counters.step_ms.append(1e3 * (start - self._left_at))
        try:
            delivery = pipeline.next()
            self._handle_bad(delivery)
        except BaseException:
            self._stop()
            raise
        value = self._finish(delivery)
        self._batch += 1
        end = time.perf_counter()
        counters.last_wait_ms = 1e3 * (end - start)
        counters.wait_ms += counters.last_wait_ms
        counters.batches += 1
        counters.samples += len(delivery.indices) - len({index for index, _ in delivery.bad})
        self._left_at = end
        if self._slots == "auto" and counters.batches % _RETUNE_BATCHES == 0:
            self._retune(pipeline)
        if value is None and plan.config.world_size > 1:
            msg = (
                f"every sample of batch {self._batch - 1} is bad ({delivery.bad[:2]}): leaving it out "
                f"would give this rank "
                "fewer batches than the others"
            )
            raise DataError(msg)
        return value

    def _finish(self, delivery: Delivery) -> object | None:
        value = delivery.value
        if self._pinner is not None and delivery.lease is not None:
            self._pinner.deliver(delivery.lease)
        if self.collate_fn is None and torch_available():
            value = to_tensors(value)
        return value

    def _handle_bad(self, delivery: Delivery) -> None:
        counters = self._counters
        seen = counters.samples + len(delivery.indices)
        counters.skipped_samples += self._errors.apply(delivery.bad, epoch=self._epoch, seen=seen)

    # -- pipeline ----------------------------------------------------------------------------------

    def _start(self) -> Pipeline:
        spec = WorkerSpec(
            dataset=self.dataset,
            collate_fn=self.collate_fn,
            images=self._images,
            seed=self._order.seed,
            skip_errors=self._errors.on_error == "skip",
            threads=self._threads or threads_per_worker(self.num_workers, video=self._video),
            cache=self._cache,
            readahead=self._readahead,
        )
        if self.num_workers == 0:
            inline = InlinePipeline(spec)
            self._finalizer = weakref.finalize(self, inline.close)
            return inline
        size = self._ring_size()
        self._size = size
        method, self._method_reason, payload = choose_method(self._context, spec)
        self._method = method
        settings = RingSettings(
            slots=size.slots,
            slot_bytes=size.slot_bytes,
            workers=self.num_workers,
            method=method,
            payload=payload,
            timeout=self._timeout,
            chunk=max(1, size.slots // 2),
            batch_size=self.batch_size,
        )
        ahead = self._lookahead and (self.persistent_workers or self.infinite)
        ring = RingPipeline(spec, settings, self._counters, following if ahead else None)
        self._finalizer = weakref.finalize(self, ring.close)
        self._pinner = self._pin(ring)
        return ring

    def _pin(self, ring: RingPipeline) -> SlotPinner | None:
        """Return what page-locks slots, or None with a reason in the statistics."""
        self._pin_reason = None
        if not self.pin_memory:
            return None
        if not torch_available():
            self._pin_reason = "torch is not installed"
            return None
        import torch

        if not torch.cuda.is_available():
            self._pin_reason = "torch sees no CUDA device"
            return None
        return SlotPinner(ring.ring)

    def _batch_bytes(self) -> int | None:
        if not self._video:
            return None
        pictures = batch_layout(self._images, self.batch_size).table_offset
        # The collate function's result lies in the slot too and may hold the pictures once more, as floats.
        return pictures + _TABLE_BYTES + (pictures * 5 if self.collate_fn is not None else 0)

    def _ring_size(self) -> RingSize:
        ahead = self.prefetch_factor * self.num_workers
        return ring_size(
            batch_bytes=self._batch_bytes(),
            slots=self._slots if isinstance(self._slots, int) else None,
            slot_mb=self._slot_mb,
            least=ahead + 3,
            available=available_bytes(),
        )

    def _default_group(self) -> int:
        """Return the samples that half a ring of the standard budget holds; a function of the arguments
        alone.
        """
        size = self._batch_bytes()
        if size is None:
            return DEFAULT_GROUP
        planned = ring_size(
            batch_bytes=size,
            slots=self._slots if isinstance(self._slots, int) else None,
            slot_mb=self._slot_mb,
            least=5,
            available=1 << 50,
        )
        return min(DEFAULT_GROUP, max(1, planned.slots // 2) * self.batch_size)

    def _retune(self, pipeline: Pipeline) -> None:
        counters = self._counters
        if not isinstance(pipeline, RingPipeline) or not counters.fill_ms or not counters.step_ms:
            return
        stats = self.stats()
        step, fill = stats["step_ms_p95"], stats["fill_ms_mean"]
        if isinstance(step, float) and isinstance(fill, float):
            wanted = slots_needed(step_ms_p95=step, fill_ms=fill, workers=self.num_workers)
            pipeline.set_active(max(wanted + 1, self.prefetch_factor * self.num_workers + 1))

    @property
    def pipeline(self) -> Pipeline | None:
        """The running pipeline, or None before the first batch and after `close`."""
        return self._pipeline

    def stats(self) -> dict[str, Stat]:
        """Return counters and times as a flat dict with stable names; unknown values are None."""
        pipeline = self._pipeline
        workers = pipeline.counters() if pipeline is not None else {}
        depths = pipeline.depths() if pipeline is not None else {}
        extra: dict[str, Stat] = {
            "epoch": self._epoch,
            "batch": self._batch,
            "workers": self.num_workers,
            "start_method": self._method,
            "start_method_reason": self._method_reason,
            "pinned_bytes": 0 if self._pinner is None else self._pinner.registered_bytes,
            "pin_reason": self._pin_reason if self._pinner is None else self._pinner.reason,
            "slot_bytes": None if self._size is None else self._size.slot_bytes,
            "slots_reason": None if self._size is None else self._size.reason,
            **{f"queue_{name}": depth for name, depth in depths.items()},
        }
        return flat_stats(self._counters, workers, extra)

    def _stop(self) -> None:
        if self._pinner is not None:
            self._pinner.close()
            self._pinner = None
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None
        self._pipeline = None

    def close(self) -> None:
        """Stop workers. The loader stays usable: the next ``iter()`` starts them again at the same
        position.
        """
        self._generation += 1
        self._stop()

    def __enter__(self) -> ADFEDataLoader[Batch]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
