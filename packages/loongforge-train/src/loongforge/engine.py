"""The step engine: what happens between two optimizer steps, in the order in which data flows.

``collect`` takes G x N micro-batches from the loader and agrees with the other ranks; ``forward and
backward`` run through the window runner (eager, fused, or replayed); the parallel strategy brings gradients
together beside the backward; then clip, guard, optimizer, schedule, and the step record. Nothing here waits
for the device: times are CUDA events that the recorder reads later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from loongforge.batches import Tally, add_draws, count_valid, move, tally
from loongforge.clock import StepClock
from loongforge.ema import WeightAverage
from loongforge.errors import NonFiniteError
from loongforge.guards import Guard
from loongforge.optim import clips_itself
from loongforge.parallel import Parallel
from loongforge.pillars import MemoryPillar
from loongforge.ranks import Agreement, Ranks, Vote
from loongforge.recorder import PendingStep, Recorder
from loongforge.sources import BatchSource
from loongforge.staging import StagedBatch, host_of, with_frozen_part
from loongforge.window import Outcome, WindowRunner

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of the autocast around a window, by ``precision``."""


@dataclass(kw_only=True)
class Parts:
    """Everything a step touches, built by the session."""

    model: nn.Module
    """The bare model: names of parameters, draws, counts."""
    runner: WindowRunner
    parallel: Parallel
    optimizer: Optimizer
    schedule: LRScheduler
    source: BatchSource
    ranks: Ranks
    memory: MemoryPillar
    recorder: Recorder
    guard: Guard
    accumulation: int
    seed: int = 0
    clip_norm: float | None = None
    autocast: torch.dtype | None = None
    scaler: torch.amp.GradScaler | None = None
    average: WeightAverage | None = None
    drop_ragged: bool = False
    before_optimizer: Callable[[], object] | None = None
    """Called between backward and optimizer: starts work that should run beside the optimizer."""
    documents: dict[str, str] = field(default_factory=dict)
    """JSON texts by file name that travel in the checkpoint, such as the module dependency graph."""
    keep_gradients: bool = False
    """Zero gradients in place instead of dropping them: their addresses stand in captured graphs."""


@dataclass(kw_only=True)
class Position:
    """How far the run is."""

    step: int = 0
    samples: int = 0
    stop_requested: bool = False
    failed: Exception | None = None
    commands: deque[int] = field(default_factory=deque)
    """Control commands that wait for the next vote; appended by the control thread."""
    last_step_ms: float = 0.0
    agreed: Agreement | None = field(default=None, repr=False)


class StepEngine:
    """Runs optimizer steps. ``run_step`` is the whole data flow; the rest of the class are its parts."""

    def __init__(self, parts: Parts, *, epochs: int | None = None) -> None:
        self.parts = parts
        self.epochs = epochs
        self.at = Position()
        self.new_clock: Callable[[torch.device], StepClock] = StepClock
        self.count: Callable[[Sequence[object]], Tally] = tally
        """Counts the host batches of a window for its record."""
        self._rate = 0.0
        self._windows = 0
        self.around: Callable[[int], AbstractContextManager[object]] = lambda step: nullcontext()
        """Context around the work of a step, by its number; the session puts probes here."""
        self.committed: Callable[[], object] = lambda: None
        """Called when weights and step number have moved on together, before the step's record."""
        self.validated: Callable[[int], float | None] = lambda step: None
        """Loss on held-out samples after a step, by its number, or None; the session measures it."""

    def run_step(self) -> bool:
        """Do one optimizer step; return False when the data of the last epoch is used up."""
        parts = self.parts
        clock = self.new_clock(parts.ranks.device)
        window = self._collect()
        if window is None:
            return False
        clock.have_window()
        # Here, not with the record: the vote has just counted the same batches, by the same code.
        counts = self.count([host_of(batch) for batch in window])
        agreed = self._agreed()
        with parts.memory.step(), self.around(self.at.step + 1):
            clock.enter("h2d")
            batches = [self._to_device(batch) for batch in window]
            clock.enter("forward")
            outcome = self._forward_backward(window, batches, clock, agreed)
            del window
            if parts.before_optimizer is not None:
                clock.enter("ahead")
                parts.before_optimizer()
            if parts.parallel.deferred:
                clock.enter("comm")
            parts.parallel.finish()
            clock.enter("optimizer")
            norm, loss, bad = self._update(outcome, agreed)
        clock.finish()
        self.at.step += 1
        self.at.last_step_ms = 1e3 * (clock.ended - clock.began)
        self.committed()
        self._record(counts, outcome, clock, norm=norm, loss=loss, bad=bad)
        parts.parallel.step_end(self.at.step)
        return True

    # -- data --------------------------------------------------------------------------------------

    def _collect(self) -> list[object] | None:
        """Take the next window and agree about it; windows never cross the end of an epoch.

        Everything decided here is decided from what all ranks know alike.
        """
        parts = self.parts
        empty_epochs = 0
        while self.epochs is None or parts.source.epoch < self.epochs:
            window = self._take_window()
            command = self.at.commands.popleft() if self.at.commands else 0
            agreed = self._vote(window, stop=self.at.stop_requested, command=command)
            if command and agreed.command != command:
                self.at.commands.appendleft(command)
            if agreed.failed:
                raise self.at.failed or NonFiniteError("another rank stopped the run; its log says why")
            usable = agreed.micro_batches
            if usable == parts.accumulation or (usable and not parts.drop_ragged):
                if agreed.most > usable:
                    # Some rank has fewer micro-batches left: all do as many as that one, and all count
                    # again (fault C03).
                    window = window[:usable]
                    self._vote(window, stop=agreed.stop, command=agreed.command)
                self._windows += 1
                return window
            if command and agreed.command == command:
                # This vote met the end of an epoch and no step carries the command: it waits for the next.
                self.at.commands.appendleft(command)
            # The first epoch of a resumed run may have nothing left; a second one without a window is
            # an error.
            empty_epochs = 0 if self._windows else empty_epochs + 1
            if empty_epochs > 1:
                parts.guard.no_step_possible(parts.source.taken, parts.accumulation)
            self._windows = 0
            parts.source.next_epoch()
        return None

    def _take_window(self) -> list[object]:
        """Take up to an accumulation of micro-batches of this epoch."""
        window: list[object] = []
        while len(window) < self.parts.accumulation:
            batch = self.parts.source.next_micro_batch()
            if batch is None:
                break
            window.append(batch)
        return window

    def _vote(self, window: list[object], *, stop: bool, command: int) -> Agreement:
        """Agree about a window: how many micro-batches, how many valid elements, whether to stop."""
        agreed = self.parts.ranks.agree(
            Vote(
                micro_batches=len(window),
                valid=count_valid(self.parts.model, [host_of(batch) for batch in window]),
                stop=stop,
                failed=self.at.failed is not None,
                command=command,
                step_ms=self.at.last_step_ms,
            )
        )
        self.at.agreed = agreed
        return agreed

    def _agreed(self) -> Agreement:
        if self.at.agreed is None:
            msg = "a step started without an agreement between the ranks"
            raise RuntimeError(msg)
        return self.at.agreed

    def _to_device(self, batch: object) -> Mapping[str, object]:
        if isinstance(batch, StagedBatch):
            # What the prefetcher did not look into (a mapping that is no dict) is copied here.
            return move(batch.device, self.parts.ranks.device)  # type: ignore[return-value]
        drawn = add_draws(self.parts.model, batch, seed=self.parts.seed, epoch=self.parts.source.epoch)
        return move(drawn, self.parts.ranks.device)  # type: ignore[return-value]

    # -- forward, backward, communication ----------------------------------------------------------

    def _forward_backward(
        self,
        window: list[object],
        batches: list[Mapping[str, object]],
        clock: StepClock,
        agreed: Agreement,
    ) -> Outcome:
        """Run the window; the divisor makes the averaged gradient that of one batch over all ranks."""
        parts, device = self.parts, self.parts.ranks.device.type
        divisor = max(agreed.valid, 1.0) / parts.ranks.world_size if agreed.valid >= 0 else None

        def backward(loss: Tensor) -> None:
            clock.enter("backward")
            with torch.autocast(device, enabled=False):
                (loss if parts.scaler is None else parts.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
            clock.enter("forward")

        def sync(last: bool) -> AbstractContextManager[object]:  # noqa: FBT001 - the contract of the fuser
            together = last and not parts.parallel.deferred
            return nullcontext() if together else parts.parallel.no_sync()

        with self._autocast():
            whole = [with_frozen_part(b, m, parts.ranks.device) for b, m in zip(window, batches, strict=True)]
            return parts.runner.run(whole, backward=backward, divisor=divisor, sync=sync)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        if self.parts.autocast is None:
            yield
            return
        with torch.autocast(self.parts.ranks.device.type, dtype=self.parts.autocast):
            yield

    # -- optimizer ---------------------------------------------------------------------------------

    def _update(self, outcome: Outcome, agreed: Agreement) -> tuple[Tensor, Tensor, Tensor]:
        """Unscale, clip, guard, step; return (gradient norm, global loss, skipped) without reading them."""
        parts, step = self.parts, self.at.step + 1
        loss = torch.as_tensor(outcome.loss, dtype=torch.float32, device=parts.ranks.device)
        loss = parts.ranks.sum(loss.clone()) / parts.ranks.world_size
        parts.ranks.commit()
        parts.parallel.check()
        clipping = clips_itself(parts.optimizer, parts.clip_norm)
        if clipping is not None:
            bad = parts.guard.verdict(loss, None, step=step)
            norm, bad = parts.guard.apply_clipping(bad, clipping)
        else:
            if parts.scaler is not None:
                parts.scaler.unscale_(parts.optimizer)
            norm = parts.parallel.clip(parts.clip_norm)
            bad = parts.guard.verdict(loss, norm, step=step)
            parts.guard.apply(bad, parts.optimizer, parts.scaler)
        self._rate = float(parts.optimizer.param_groups[0]["lr"])
        parts.schedule.step()
        if parts.average is not None:
            parts.average.update(bad)
        parts.optimizer.zero_grad(set_to_none=not parts.keep_gradients)
        return norm, loss, bad

    # -- record ------------------------------------------------------------------------------------

    def _record(
        self,
        counts: Tally,
        outcome: Outcome,
        clock: StepClock,
        *,
        norm: Tensor,
        loss: Tensor,
        bad: Tensor,
    ) -> None:
        parts = self.parts
        samples, tokens, ids = counts
        self.at.samples += samples or 0
        parts.recorder.submit(
            PendingStep(
                step=self.at.step,
                epoch=parts.source.epoch,
                time_unix=time.time(),
                clock=clock,
                loss=loss,
                micro_losses=outcome.micro_losses,
                norm=norm,
                skipped=bad,
                lr=self._rate,
                samples=samples,
                tokens=tokens,
                sample_ids=ids,
                fused=outcome.fused,
                fusion_reason=outcome.reason,
                graph=getattr(outcome, "graph", None),
                graph_reason=getattr(outcome, "graph_reason", None),
                filled=getattr(outcome, "filled", 0),
                validation_loss=self.validated(self.at.step),
                data=parts.source.stats(),
                mem=parts.memory.stats(),
                comm=parts.parallel.stats(),
            )
        )
