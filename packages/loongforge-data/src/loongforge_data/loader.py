"""`ADFEDataLoader`: a drop-in for `torch.utils.data.DataLoader` with exact order, exact resume and
statistics.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, Literal, TypeVar, cast

from loongforge_data.building import NO_FACTS, PipelineOptions, Started, start_pipeline
from loongforge_data.cache import CacheConfig
from loongforge_data.collate import to_tensors, torch_available
from loongforge_data.delivery import Delivery, Pipeline
from loongforge_data.errorpolicy import ErrorPolicy, OnError, SkippedSample
from loongforge_data.errors import DataError
from loongforge_data.order import BegunEpoch, EpochPlan, OrderConfig, Shuffle, Tail
from loongforge_data.pipeline import RingPipeline
from loongforge_data.planning import VideoDataset
from loongforge_data.prefetch import Mode
from loongforge_data.resume import find_position, read_state, state_of
from loongforge_data.sizing import DEFAULT_SLOT_MB, slots_needed
from loongforge_data.startup import Decode, MapDataset, block_starts, cache_config, fingerprint
from loongforge_data.telemetry import LoaderCounters, Stat, flat_stats

Batch = TypeVar("Batch")
ShuffleArgument = bool | Literal["full", "block", "none"]
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
        decode: Where video is decoded: "cpu", or "cuda" and "auto" for the GPU in the worker processes, where
            it gives the CPU's frames; what falls back is counted in ``gpu_refused_frames``, and
            ``decode_reason`` says why nothing can be decoded there. See `video.hardware`.
        niceness: How much workers give way to the trainer where cores are short: their nice value, 0 to 19.
            Above 0 they are also batch work, which does not push the trainer aside when it wakes up.

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
        decode: Decode = "cpu",
        niceness: int = 5,
    ) -> None:
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
        self._options = PipelineOptions(
            dataset=dataset,
            collate_fn=collate_fn,
            images=dict(dataset.image_layout()) if isinstance(dataset, VideoDataset) else {},
            video=isinstance(dataset, VideoDataset),
            batch_size=batch_size,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor or 2,
            pin_memory=pin_memory,
            lookahead=lookahead and (persistent_workers or infinite),
            slots=slots,
            slot_mb=slot_mb,
            threads_per_worker=threads_per_worker,
            cache=cache_config(cache, dataset),
            readahead=readahead,
            multiprocessing_context=multiprocessing_context,
            timeout=timeout,
            decode=decode,
            niceness=niceness,
        )
        kind: Shuffle = shuffle if isinstance(shuffle, str) else ("full" if shuffle else "none")
        self._built = OrderConfig(
            length=len(dataset),
            batch_size=batch_size,
            world_size=world_size,
            shuffle=kind,
            seed=seed,
            tail=tail or ("drop" if drop_last else "short"),
            block_starts=block_starts(dataset) if kind == "block" else (),
            group=group or self._options.default_group(),
            lanes=world_size,
        )
        self._order = self._built
        self._plan: EpochPlan | None = None
        self._epoch = 0
        self._batch = 0
        self._begun: BegunEpoch | None = None
        self._generation = 0
        self._counters = LoaderCounters()
        self._started: Started | None = None
        self._facts: Mapping[str, Stat] = NO_FACTS
        self._finalizer: weakref.finalize[..., object] | None = None
        self._left_at: float | None = None

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
        """Batches of the current epoch already delivered; of its rest, where it began on another global
        batch (see `load_state_dict`).
        """
        return self._batch

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._order.world_size

    def __len__(self) -> int:
        """Batches of the current epoch, equal on every rank; the same in every epoch, but for one that began
        on another global batch (see `load_state_dict`): there those of the rest, until the next epoch.
        """
        return self._current_plan().num_batches

    def _current_plan(self) -> EpochPlan:
        plan = self._plan
        if plan is None or (plan.epoch, plan.begun) != (self._epoch, self._begun):
            plan = EpochPlan(self._order, epoch=self._epoch, rank=self.rank, begun=self._begun)
            self._plan = plan
        return plan

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. Naming the current epoch keeps a position inside it."""
        if epoch < 0:
            msg = f"epoch is {epoch}, allowed is >= 0"
            raise ValueError(msg)
        if epoch != self._epoch:
            self._epoch, self._batch, self._begun = epoch, 0, None
            self._generation += 1

    def state_dict(self) -> dict[str, object]:
        """Return the position after the last delivered batch; exact on any number of workers."""
        return state_of(
            self._order,
            epoch=self._epoch,
            batch=self._batch,
            begun=self._begun,
            fingerprint=fingerprint(self.dataset),
        ).to_dict()

    def load_state_dict(self, state: Mapping[str, object], *, reshard: bool = False) -> None:
        """Continue where a state was taken, also on another number of ranks.

        With the same global batch (batch_size x world_size) the same global batches follow. With another
        one, ``reshard=True`` deals out the rest of the epoch: every sample that was not delivered yet is
        delivered once, in the epoch's order, in global batches of this loader. ``batch`` counts from 0 there.
        The tail policy acts at the end of the rest; what ``drop`` would have left out on the old ranks
        belongs to it. The next epoch is a regular one; until then a block of the block shuffle may be decoded
        by several ranks. The global batch may change several times within an epoch.

        An iterator that is already running ends; the next ``iter()`` delivers the batch after the saved
        position.

        Args:
            state: What `state_dict` returned on any rank; give the same one to every rank.
            reshard: Also take the state of another global batch.

        Raises:
            ValueError: The state belongs to another data set, order or format, or to another global batch
                and ``reshard`` is False. The position stays as it was.
        """
        saved = read_state(state)
        position = find_position(saved, self._built, fingerprint(self.dataset), reshard=reshard)
        self._order, self._begun = position.order, position.begun
        self._epoch, self._batch = position.epoch, position.batch
        self._plan = None
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
                self._begin(pipeline, plan)
                while self._batch < plan.num_batches:
                    batch = self._next_batch(pipeline, plan)
                    if batch is not None:
                        yield cast("Batch", batch)
                    if generation != self._generation:
                        return
            self._counters.padded_samples += plan.padded
            self._epoch, self._batch, self._begun = self._epoch + 1, 0, None
            # Of a begun epoch nothing may be left; only a whole one without batches means there are none.
            if not self.infinite or (plan.num_batches == 0 and plan.begun is None):
                break
        self._left_at = None
        if not self.persistent_workers:
            self._stop()

    def _begin(self, pipeline: Pipeline, plan: EpochPlan) -> None:
        """Let workers fill slots from the current position on."""
        start = time.perf_counter()
        pipeline.begin(plan, self._batch)
        self._counters.wait_ms += 1e3 * (time.perf_counter() - start)
        if self.collate_fn is None and torch_available():
            # Takes seconds where the trainer has not loaded it yet: done while slots fill.
            import torch  # noqa: F401

    def _ready_pipeline(self, plan: EpochPlan) -> Pipeline | None:
        if self._batch >= plan.num_batches:
            return None
        if self._started is None:
            self._started = start_pipeline(
                self._options,
                seed=self._order.seed,
                skip_errors=self._errors.on_error == "skip",
                counters=self._counters,
            )
            self._facts = self._started.facts
            self._finalizer = weakref.finalize(self, self._started.pipeline.close)
        return self._started.pipeline

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
        if self._options.slots == "auto" and counters.batches % _RETUNE_BATCHES == 0:
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
        pinner = None if self._started is None else self._started.pinner
        if pinner is not None and delivery.lease is not None:
            pinner.deliver(delivery.lease)
        if self.collate_fn is None and torch_available():
            value = to_tensors(value)
        return value

    def _handle_bad(self, delivery: Delivery) -> None:
        counters = self._counters
        seen = counters.samples + len(delivery.indices)
        counters.skipped_samples += self._errors.apply(delivery.bad, epoch=self._epoch, seen=seen)

    # -- pipeline ----------------------------------------------------------------------------------

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
        return None if self._started is None else self._started.pipeline

    def stats(self) -> dict[str, Stat]:
        """Return counters and times as a flat dict with stable names; unknown values are None."""
        started = self._started
        workers = {} if started is None else started.pipeline.counters()
        depths = {} if started is None else started.pipeline.depths()
        pinner = None if started is None else started.pinner
        extra: dict[str, Stat] = {
            "epoch": self._epoch,
            "batch": self._batch,
            "workers": self.num_workers,
            **self._facts,
            "pinned_bytes": 0 if pinner is None else pinner.registered_bytes,
            **{f"queue_{name}": depth for name, depth in depths.items()},
        }
        if pinner is not None:
            extra["pin_reason"] = pinner.reason
        return flat_stats(self._counters, workers, extra)

    def _stop(self) -> None:
        started, self._started = self._started, None
        if started is not None and started.pinner is not None:
            started.pinner.close()
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None

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
