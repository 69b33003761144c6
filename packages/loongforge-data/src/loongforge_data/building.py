"""From a loader's arguments to the pipeline that delivers its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from loongforge_data.cache import CacheConfig
from loongforge_data.collate import torch_available
from loongforge_data.inline import InlinePipeline
from loongforge_data.layout import ImageLayoutLike, batch_layout
from loongforge_data.order import DEFAULT_GROUP
from loongforge_data.pinning import SlotPinner
from loongforge_data.pipeline import RingPipeline, RingSettings
from loongforge_data.prefetch import MODES, Mode
from loongforge_data.sizing import RingSize, available_bytes, ring_size
from loongforge_data.startup import DECODES, Decode, MapDataset, check_range, following, threads_per_worker
from loongforge_data.telemetry import LoaderCounters, Stat
from loongforge_data.workers.crew import START_METHODS, choose_method
from loongforge_data.workers.loop import WorkerSpec

_TABLE_BYTES = 1 << 20
NO_FACTS: Mapping[str, Stat] = dict.fromkeys(
    (
        "decode",
        "decode_reason",
        "start_method",
        "start_method_reason",
        "pin_reason",
        "slot_bytes",
        "slots_reason",
    )
)
"""What is known of a pipeline that was not started."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """What a pipeline is made from; the arguments of `ADFEDataLoader` under their names there.

    Raises:
        ValueError: A value is outside of what it names.
    """

    dataset: MapDataset
    """Map-style data set."""
    collate_fn: Callable[[list[object]], object] | None
    """Makes a batch of a list of samples; None stacks arrays and lists strings."""
    images: Mapping[str, ImageLayoutLike] = field(default_factory=dict)
    """Picture shapes of a data set that lists its frames; empty for others."""
    video: bool
    """True for a data set that lists its frames."""
    batch_size: int
    """Samples per batch."""
    num_workers: int
    """Worker processes; 0 loads in the trainer's process."""
    prefetch_factor: int
    """Batches ahead per worker, at least."""
    pin_memory: bool
    """Page-lock slots."""
    lookahead: bool
    """Go on with the next epoch while one ends."""
    slots: int | Literal["auto"] | None
    """Slots of the ring; None fits the budget, "auto" also follows measured step times."""
    slot_mb: int
    """MiB of a slot of unknown fill; eight of them are the ring's budget."""
    threads_per_worker: int | None
    """Threads of a worker; None shares the cores out."""
    cache: CacheConfig | None
    """Frame cache."""
    readahead: Mode
    """How bytes are asked for ahead."""
    multiprocessing_context: str | None
    """How worker processes are started; None chooses."""
    timeout: float
    """Seconds after which a job counts as hung."""
    decode: Decode
    """Where video is decoded."""
    niceness: int
    """How much worker processes give way to the trainer, 0 (as equals) to 19."""

    def __post_init__(self) -> None:
        check_range("num_workers", self.num_workers, 0, 1024)
        check_range("prefetch_factor", self.prefetch_factor, 1, 1024)
        check_range("slot_mb", self.slot_mb, 1, 1 << 20)
        if isinstance(self.slots, int):
            check_range("slots", self.slots, 2, 4096)
        if self.decode not in DECODES:
            msg = f"decode is {self.decode!r}, allowed are {DECODES}"
            raise ValueError(msg)
        check_range("niceness", self.niceness, 0, 19)
        if self.readahead not in MODES:
            msg = f"readahead is {self.readahead!r}, allowed are {MODES}"
            raise ValueError(msg)
        if not self.timeout > 0:
            msg = f"timeout is {self.timeout}, allowed is a number of seconds above 0"
            raise ValueError(msg)
        if self.multiprocessing_context not in (None, *START_METHODS):
            msg = (
                f"multiprocessing_context is {self.multiprocessing_context!r}, allowed are {START_METHODS} "
                "or None"
            )
            raise ValueError(msg)

    @property
    def batch_bytes(self) -> int | None:
        """Bytes of a batch in its slot where they are known beforehand."""
        if not self.video:
            return None
        pictures = batch_layout(self.images, self.batch_size).table_offset
        # The collate function's result lies in the slot too and may hold the pictures once more, as floats.
        return pictures + _TABLE_BYTES + (pictures * 5 if self.collate_fn is not None else 0)

    def ring_size(self, *, available: int, least: int) -> RingSize:
        """Return the ring's size for an amount of free memory and a least number of slots."""
        return ring_size(
            batch_bytes=self.batch_bytes,
            slots=self.slots if isinstance(self.slots, int) else None,
            slot_mb=self.slot_mb,
            least=least,
            available=available,
        )

    def default_group(self) -> int:
        """Return the samples that half a ring of the standard budget holds; decides the block shuffle's
        order, so it is a function of the arguments alone.
        """
        if self.batch_bytes is None:
            return DEFAULT_GROUP
        planned = self.ring_size(available=1 << 50, least=5)
        return min(DEFAULT_GROUP, max(1, planned.slots // 2) * self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Started:
    """A running pipeline and how it came about."""

    pipeline: RingPipeline | InlinePipeline
    """Delivers batches."""
    pinner: SlotPinner | None = None
    """Page-locks slots, or None."""
    facts: Mapping[str, Stat] = field(default_factory=lambda: dict(NO_FACTS))
    """Start method, ring size and the reasons for them, under their names in the statistics."""


def start_pipeline(
    options: PipelineOptions, *, seed: int, skip_errors: bool, counters: LoaderCounters
) -> Started:
    """Start workers, or make batches in this process when there are none.

    Raises:
        ValueError: The ring does not fit into memory, or the data set cannot be sent to workers.
        WorkerError: Workers cannot be started.
    """
    workers = options.num_workers
    gpu, refusal = _on_gpu(options)
    spec = WorkerSpec(
        dataset=options.dataset,
        collate_fn=options.collate_fn,
        images=options.images,
        seed=seed,
        skip_errors=skip_errors,
        threads=options.threads_per_worker or threads_per_worker(workers, video=options.video),
        cache=options.cache,
        readahead=options.readahead,
        niceness=options.niceness,
        gpu=gpu,
    )
    where: dict[str, Stat] = {"decode": "cuda" if gpu else "cpu", "decode_reason": refusal}
    if workers == 0:
        return Started(pipeline=InlinePipeline(spec), facts={**NO_FACTS, **where})
    size = options.ring_size(available=available_bytes(), least=options.prefetch_factor * workers + 3)
    method, method_reason, payload = choose_method(options.multiprocessing_context, spec)
    settings = RingSettings(
        slots=size.slots,
        slot_bytes=size.slot_bytes,
        workers=workers,
        method=method,
        payload=payload,
        timeout=options.timeout,
        chunk=max(1, size.slots // 2),
        batch_size=options.batch_size,
        shrink=not options.pin_memory,
    )
    ring = RingPipeline(spec, settings, counters, following if options.lookahead else None)
    pinner, pin_reason = _pinner(ring) if options.pin_memory else (None, None)
    facts: dict[str, Stat] = {
        **where,
        "start_method": method,
        "start_method_reason": method_reason,
        "pin_reason": pin_reason,
        "slot_bytes": size.slot_bytes,
        "slots_reason": size.reason,
    }
    return Started(pipeline=ring, pinner=pinner, facts=facts)


def _on_gpu(options: PipelineOptions) -> tuple[bool, str | None]:
    """Return whether video is decoded on the GPU, and why not where that was asked for."""
    if options.decode == "cpu":
        return False, None
    from loongforge_data.video.hardware import Refusal, probe

    refusal = probe() if options.video else Refusal.NO_VIDEO
    return refusal is None, None if refusal is None else str(refusal)


def _pinner(ring: RingPipeline) -> tuple[SlotPinner | None, str | None]:
    """Return what page-locks slots, or None with a reason."""
    if not torch_available():
        return None, "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return None, "torch sees no CUDA device"
    return SlotPinner(ring.ring), None
