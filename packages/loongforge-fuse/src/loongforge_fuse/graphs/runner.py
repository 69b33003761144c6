"""The graph runner: forward and backward (and, asked for, clip and optimizer) as one replay per shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from loongforge_fuse.fusion.execute import Backward, NoSampleLossesError, StepResult, Weighting
from loongforge_fuse.fusion.packing import PackedLayout, fill_packed
from loongforge_fuse.graphs.backend import (
    Backend,
    Chain,
    CudaBackend,
    EmulatedBackend,
    Outputs,
    Recorded,
)
from loongforge_fuse.graphs.config import GraphConfig
from loongforge_fuse.graphs.entry import GraphEntry, LiveParameters
from loongforge_fuse.graphs.key import BatchSignature, describe
from loongforge_fuse.graphs.ledger import GraphStats, PassCounters, ShapeLedger, describe_key
from loongforge_fuse.graphs.passes import StepPass, numeric_modes
from loongforge_fuse.graphs.pointers import ModelPointers
from loongforge_fuse.graphs.reasons import GraphReason, root_cause
from loongforge_fuse.graphs.regional import CompiledRegions, compile_regions
from loongforge_fuse.protocol import Batch, batch_size

_NEEDS_WARM_UP = frozenset({"requires_grad", "modules", "optimizer_state"})
"""Changes that an eager pass must follow: other parameters may receive gradients, or a loaded optimizer makes
state at its next step, which inside a recording every replay would make anew.
"""

_MOVES_FOR_PARTS = 2


class GraphRunner:
    """Replays training passes; every shape that cannot be replayed runs eagerly, with the reason.

    It is an executor for :class:`~loongforge_fuse.fusion.fuser.MicroBatchFuser` and works alone through
    :meth:`run`. Gradients stay in ``p.grad``: with ``gradients="accumulate"`` they are the same tensors
    over all replays, so anything that reduces existing gradients can follow a replay.

    Args:
        model: Module that follows :mod:`loongforge_fuse.protocol`; its draws are part of the batch.
        config: Settings.
        optimizer: Run inside the last pass of a window. Must be capturable (``capturable=True`` or
            ``fused=True`` on CUDA); its learning rates become device tensors. Default: the caller steps.
        scaler: Loss scaler whose scale multiplies the differentiated loss. Default none.
        backend: Replaces the backend that ``config.mode`` would choose.

    Raises:
        ValueError: ``max_norm`` without an optimizer, or ``scaler`` with one (its ``step`` decides on the
            host).
    """

    def __init__(
        self,
        model: nn.Module,
        config: GraphConfig | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        scaler: torch.amp.GradScaler | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.config = config or GraphConfig()
        self.model = model
        if self.config.max_norm is not None and optimizer is None:
            message = "max_norm clips inside the graph and needs optimizer=; without it clip after run()"
            raise ValueError(message)
        if scaler is not None and optimizer is not None:
            message = "a GradScaler decides on the host whether to step; pass either scaler= or optimizer="
            raise ValueError(message)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._pass = StepPass(model, self.config, optimizer=optimizer, scaler=scaler, device=self._device)
        self._pointers = ModelPointers(model)
        self._live = LiveParameters(model)
        self._backend, self._unavailable = self._choose_backend(backend)
        self._regions: CompiledRegions | None = compile_regions(model) if self.config.compile else None
        self._entries: OrderedDict[tuple[Hashable, ...], GraphEntry] = OrderedDict()
        self._ledger = ShapeLedger(self.config.warmup_steps)
        self._count = PassCounters()
        self._held = 0
        self.before_optimizer: Callable[[], None] | None = None
        """Called between the replays of backward and optimizer, where these are two: with FusedAdamW and
        ``gradients="overwrite"``. For work that should run beside the optimizer."""

    def _choose_backend(self, backend: Backend | None) -> tuple[Backend | None, GraphReason | None]:
        if self.config.mode == "off":
            return None, GraphReason.OFF
        if backend is not None:
            return backend, None
        if self.config.mode == "emulated":
            return EmulatedBackend(self._live.all_trainable), None
        if self._device.type == "cuda":
            return CudaBackend(self._device), None
        return None, GraphReason.NO_DEVICE

    def run(self, batch: Batch, weights: Tensor | None = None) -> StepResult:
        """Run one batch as a window of its own.

        Args:
            batch: A batch with its draws.
            weights: ``(B,)`` or ``(1,)`` factors on the per-sample loss sums. Default: one over the batch's
                valid elements.
        """
        sizes = (batch_size(batch),)
        if weights is None:
            weighting = Weighting(kind="own_count", sizes=sizes)
        else:
            weighting = Weighting(kind="given", sizes=sizes, weights=weights)
        return self.execute(batch, weighting, backward=None, first=True, last=True)

    def execute(
        self, batch: Batch, weighting: Weighting, *, backward: Backward | None, first: bool, last: bool
    ) -> StepResult:
        """Run one pass of a window: replay where a graph fits, else eagerly with the reason.

        Args:
            batch: The batch of the pass.
            weighting: How its losses enter the window's loss.
            backward: A caller's own backward forces an eager pass.
            first: First pass of the window (gradients are fresh).
            last: Last pass of the window (the optimizer follows, when the runner has it).
        """
        batch = self._in_bucket(batch)
        blocked = self._blocked(batch, backward)
        if blocked is not None:
            return self._run_eagerly(batch, weighting, blocked, backward, first=first, last=last)
        if any(isinstance(value, PackedLayout) for value in batch.values()):
            batch = fill_packed(batch, self.config.packed_rows)
        signature = describe(batch)
        key = self._key(signature, weighting, first=first, last=last)
        entry = self._entries.get(key)
        if entry is not None and not self._usable(key, entry):
            entry = None
        if entry is None:
            why = self._ledger.why_eager(key)
            if why is None and not self._live.knows(key):
                # What another shape's recording met made everything be forgotten, this shape's gradients too.
                why = GraphReason.WARM_UP
            if why is None:
                entry, why = self._record(key, signature, batch, weighting, first=first, last=last)
            if entry is None:
                return self._run_eagerly(batch, weighting, why, None, first=first, last=last, key=key)
        self._entries.move_to_end(key)
        return self._replay(entry, signature, weighting, first=first)

    def _in_bucket(self, batch: Batch) -> Batch:
        """Pad a batch to the sizes of the bucket plan, where there is one."""
        if self.config.buckets is None:
            return batch
        padded = self.config.buckets.apply(batch)
        self._count.padded += any(padded[name] is not batch[name] for name in padded)
        return padded

    def _blocked(self, batch: Batch, backward: Backward | None) -> GraphReason | None:
        """Return why this pass cannot be a replay whatever its shape, or None."""
        if self._unavailable is not None and backward is None:
            return self._unavailable
        if backward is not None:
            return GraphReason.CUSTOM_BACKWARD
        if not torch.is_grad_enabled():
            return GraphReason.WITHOUT_GRADIENTS
        if self.config.hooks == "refuse" and (self._pointers.hooked() or self._pass.hooked()):
            return GraphReason.HOOKS
        if not self.config.packed_rows and any(isinstance(v, PackedLayout) for v in batch.values()):
            return GraphReason.PACKED
        return None

    def _key(
        self, signature: BatchSignature, weighting: Weighting, *, first: bool, last: bool
    ) -> tuple[Hashable, ...]:
        shape = None if weighting.weights is None else tuple(weighting.weights.shape)
        how = (weighting.kind, weighting.sizes, shape, weighting.factor, weighting.samples_only)
        return (signature.key, how, first, last, numeric_modes(self._device.type))

    def _usable(self, key: tuple[Hashable, ...], entry: GraphEntry) -> bool:
        """Whether a recording still computes with the model as it is; a stale one is given up."""
        # Gradients that a backward pass makes as views are parts too, but new ones each time: after a few
        # captures for their sake they are copied instead.
        parts = self._count.moved["gradients"] < _MOVES_FOR_PARTS
        owned = frozenset() if entry.overwrites else self._owned_gradients()
        moved = self._pointers.changed(entry.pointers) or entry.gradients_moved(owned, parts=parts)
        moved = moved or self._pass.hyper_changed(entry.hyper)
        if moved is None:
            return True
        self._count.moved[moved] += 1
        if moved == "gradients":
            self._live.forget_tensors()
        if moved in _NEEDS_WARM_UP:
            self._live.forget()
            self._pointers.walk(self.model)
        self._ledger.stale(key, moved=moved, replays=entry.replays, warm_up=moved in _NEEDS_WARM_UP)
        self._drop(key)
        return False

    def _run_eagerly(
        self,
        batch: Batch,
        weighting: Weighting,
        reason: GraphReason | None,
        backward: Backward | None,
        *,
        first: bool,
        last: bool,
        key: tuple[Hashable, ...] | None = None,
    ) -> StepResult:
        """Run the very same pass without a graph; with a key, note which parameters it reaches."""
        code = str(reason or GraphReason.CAPTURE_FAILED)
        self._count.eager[code] += 1
        work = self._pass.bind(batch, weighting, first=first, last=last, backward=backward)
        self._pass.refresh()
        if self._backend is None or backward is not None:
            outputs = work()
        else:
            with nullcontext() if key is None else self._live.watched(key):
                outputs = self._backend.eager(work)
        return self._pass.result(
            outputs, weighting, graph=False, reason=code, stepped=self._pass.steps(last=last)
        )

    def _record(
        self,
        key: tuple[Hashable, ...],
        signature: BatchSignature,
        batch: Batch,
        weighting: Weighting,
        *,
        first: bool,
        last: bool,
    ) -> tuple[GraphEntry | None, GraphReason | None]:
        """Capture one shape; on failure put everything back and remember why."""
        backend = self._backend
        if backend is None:
            return None, self._unavailable
        self._make_room(len(self._entries) + 1 - self.config.max_graphs)
        guarded = not self._pointers.compiled()
        entry = GraphEntry.prepare(signature, batch, weighting, self._device, guarded=guarded)
        entry.overwrites = self._pass.overwrites(first=first, last=last)
        entry.stepped = self._pass.steps(last=last)
        if not entry.overwrites:
            entry.gradients = self._live.static_gradients(key, self._owned_gradients())
        entry.fill(signature, weighting)
        kept = self._live.gradients()
        try:
            entry.attach(zero=False)
            entry.unreached = self._live.without(entry.gradients)
            entry.reads_unreached = self._pass.reads_gradients(first=first, last=last)
            with self._live.watched(key):
                recording = self._capture(backend, entry, first=first, last=last)
        except NoSampleLossesError:
            self._live.restore(kept)
            raise
        except Exception as error:
            self._live.restore(kept)
            self._ledger.failed(key, GraphReason.CAPTURE_FAILED, root_cause(error))
            return None, GraphReason.CAPTURE_FAILED
        if not entry.overwrites and len(self._live.live(key)) > len(entry.gradients):
            # It reaches parameters that no watched pass of this shape reached, such as those that were frozen
            # then: a replay would lose their gradients.
            self._live.restore(kept)
            recording.release()
            if not self._entries:
                backend.renew()
            self._ledger.again(key)
            return None, GraphReason.WARM_UP
        if entry.overwrites:
            entry.gradients = [(p, g) for p, g in self._live.gradients() if g is not None]
            entry.unreached = self._live.without(entry.gradients)
        entry.keep = self._pass.keep()
        entry.finish(recording, self._pointers.snapshot(), self._pass.hyper())
        self._live.restore(kept)
        self._count.captures += 1
        self._count.recaptures += self._ledger.captured(key)
        self._entries[key] = entry
        self._held = self._measure()
        return self._within_cap(key)

    def _owned_gradients(self) -> frozenset[int]:
        """Return the ids of gradient tensors that overwriting recordings own."""
        return frozenset(id(g) for e in self._entries.values() if e.overwrites for _, g in e.gradients)

    def _capture(self, backend: Backend, entry: GraphEntry, *, first: bool, last: bool) -> Recorded:
        """Record the pass over an entry's static buffers."""
        # An optimizer that keeps a table of addresses cannot make it inside a capture for gradients that only
        # exist since that capture: forward and backward are recorded first, then the step on their gradients.
        apart = entry.overwrites and entry.stepped and self._pass.splits
        work = self._pass.bind(
            entry.batch, entry.weighting, first=first, last=last, static=True, with_optimizer=not apart
        )
        rehearsal = self._pass.bind(
            entry.batch, entry.weighting, first=first, last=last, static=True, with_optimizer=False
        )
        self._pass.refresh()
        recording = backend.capture(work, rehearsal)
        if not apart:
            return recording
        self._pass.prime()
        step = self._pass.tail(recording.outputs)
        tail = backend.capture(step, lambda: (recording.outputs[0][1].clone(),))
        return Chain(recording, tail, between=self._between)

    def _between(self) -> None:
        if self.before_optimizer is not None:
            self.before_optimizer()

    def _within_cap(self, key: tuple[Hashable, ...]) -> tuple[GraphEntry | None, GraphReason | None]:
        """Evict the oldest recordings until the memory cap holds."""
        cap = self.config.memory_cap_gb
        if cap is None:
            return self._entries[key], None
        alone = len(self._entries) == 1
        while self._held > cap * 2**30 and len(self._entries) > 1:
            self._evict_oldest()
        if self._held <= cap * 2**30:
            return self._entries[key], None
        if alone:
            error = f"needs {self._held / 2**30:.2f} GiB, memory_cap_gb is {cap}"
            self._ledger.failed(key, GraphReason.MEMORY_CAP, error)
        else:
            # A shared pool keeps what evicted recordings left behind until the last one is gone.
            self._ledger.again(key)
        self._drop(key)
        return None, GraphReason.MEMORY_CAP

    def _replay(
        self, entry: GraphEntry, signature: BatchSignature, weighting: Weighting, *, first: bool
    ) -> StepResult:
        entry.fill(signature, weighting)
        self._pass.refresh()
        self._count.adopted += entry.attach(zero=not (first and self._pass.clears))
        entry.recording.replay()
        entry.replays += 1
        self._count.replays += 1
        # Static outputs live until the next replay only.
        outputs: Outputs = tuple(o.clone() for o in entry.recording.outputs)
        return self._pass.result(outputs, weighting, graph=True, reason=None, stepped=entry.stepped)

    def _measure(self) -> int:
        """Return the device memory of all recordings together, by the backend where it can tell."""
        entries = self._entries.values()
        pool = None if self._backend is None else self._backend.held()
        if pool is None:
            pool = sum(entry.recording.bytes for entry in entries)
        return pool + sum(entry.input_bytes for entry in entries)

    def _make_room(self, count: int) -> None:
        for _ in range(max(count, 0)):
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        key = next(iter(self._entries))
        self._count.evictions += 1
        self._ledger.evicted(key)
        self._drop(key)

    def _drop(self, key: tuple[Hashable, ...]) -> None:
        self._entries.pop(key).release()
        self._held = self._measure() if self._entries else 0
        if not self._entries and self._backend is not None:
            # torch refuses a capture into a pool whose last graph is gone while tensors of it still live.
            self._backend.renew()

    def invalidate(self) -> None:
        """Give up all recordings, for example after a change of the model; shapes are captured anew."""
        for key in list(self._entries):
            self._ledger.stale(key, moved="model", replays=self._entries[key].replays, warm_up=True)
            self._drop(key)
        self._live.forget()
        self._pointers.walk(self.model)

    def release(self) -> None:
        """Give up all graphs, their memory and compiled regions. Call before the process group is destroyed.

        Afterwards passes run eagerly with reason ``released``. May be called twice.
        """
        self.invalidate()
        if self._backend is not None:
            self._backend.release()
        self._backend, self._unavailable = None, GraphReason.RELEASED
        if self._regions is not None:
            self._regions.undo()
            self._regions = None

    def __enter__(self) -> GraphRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def stats(self) -> GraphStats:
        """Return the counters."""
        count, (late, in_line) = self._count, self._pass.late
        return GraphStats(
            replays=count.replays,
            captures=count.captures,
            recaptures=count.recaptures,
            evictions=count.evictions,
            graphs=len(self._entries),
            graph_bytes=self._held,
            shapes=len(self._ledger),
            eager=dict(count.eager),
            moved=dict(count.moved),
            failures={describe_key(key): why for key, why in self._ledger.failures().items()},
            padded=count.padded,
            adopted=count.adopted,
            late_gradients=late,
            in_line_gradients=in_line,
        )
