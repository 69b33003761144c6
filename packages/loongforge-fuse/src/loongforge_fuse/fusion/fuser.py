"""The fuser: G micro-batches of an accumulation window in one forward and one backward."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from loongforge_fuse.fusion.config import FusionConfig
from loongforge_fuse.fusion.debug import DebugExecutor
from loongforge_fuse.fusion.execute import (
    Backward,
    EagerExecutor,
    Executor,
    ForwardOutOfMemoryError,
    NoSampleLossesError,
    StepResult,
    Weighting,
)
from loongforge_fuse.fusion.plan import Agree, FreeBytes, Group, WindowPlanner
from loongforge_fuse.fusion.reasons import RefusalReason
from loongforge_fuse.fusion.refusal import Refusal
from loongforge_fuse.fusion.trace import FusionTrace, GroupRecord
from loongforge_fuse.protocol import Batch, batch_size, count_method, draw

Sync = Callable[[bool], AbstractContextManager[object]]
"""Called with True for the window's last backward, False before: gradient synchronisation on or off."""


@dataclass(frozen=True, kw_only=True)
class WindowOutcome:
    """Result of one accumulation window.

    Attributes:
        micro_losses: Mean loss of every micro-batch, scalar tensors on the model's device, in window order.
        micro_counts: Valid elements of every micro-batch, likewise.
        loss: The window's loss: the scalar whose gradient is now in ``p.grad`` (before any loss scale).
        fused: Whether every group ran as one pass.
        reason: First refusal code met, None when all was fused.
        detail: What exactly was found.
        groups: Forward/backward passes run.
        samples: Samples in the window.
        factor: Micro-batches per fused pass that was aimed at.
        graph: Whether every pass replayed a graph; None when no graph runner is attached.
        graph_reason: First reason why not.
        padded_share: Largest share of fill over the groups.
        finite: 1 where all losses (and what else was checked) were finite, a device scalar; None unchecked.
        stepped: Whether the optimizer's step was part of the passes.
        reduced: Whether the last backward ran with synchronisation on. False with a graph runner: reduce the
            gradients after ``run``.
        micro_gradients: With ``debug_gradients``: for each micro-batch, parameter name -> its own gradient.
    """

    micro_losses: list[Tensor]
    micro_counts: list[Tensor]
    loss: Tensor
    fused: bool
    reason: str | None
    detail: str | None
    groups: int
    samples: int
    factor: int
    graph: bool | None
    graph_reason: str | None
    padded_share: float
    finite: Tensor | None
    stepped: bool
    reduced: bool
    micro_gradients: list[dict[str, Tensor]] = field(default_factory=list)


class MicroBatchFuser:
    """Runs accumulation windows, fused where that is allowed and gives the same result.

    Args:
        model: Module that follows :mod:`loongforge_fuse.protocol`.
        config: Settings.
        executor: Runs one pass; a :class:`~loongforge_fuse.graphs.runner.GraphRunner` replays graphs. Default
            plain eager execution.
        agree: Element-wise maximum over ranks, for example an all-reduce. Called exactly once per window on
            every rank, so that all of them take the same decision. Default: this rank alone.
        free_bytes: Returns the free bytes on the model's device, or None for no limit. Default: asks CUDA;
            None on the CPU.
        generator: Handed to the model's ``draw``. Default None, the default generator.
    """

    def __init__(
        self,
        model: nn.Module,
        config: FusionConfig | None = None,
        *,
        executor: Executor | None = None,
        agree: Agree | None = None,
        free_bytes: FreeBytes | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.config = config or FusionConfig()
        self.model = model
        self.trace = FusionTrace(self.config.trace_length)
        self._executor = executor
        self._eager = EagerExecutor(model=model)
        self._planner = WindowPlanner(model, self.config, agree=agree, available=free_bytes)
        self._generator = generator
        self._windows = 0
        self._debug: DebugExecutor | None = None
        if self.config.debug_gradients:
            if executor is not None:
                message = "debug_gradients runs eagerly; drop executor= or switch debug_gradients off"
                raise ValueError(message)
            self._debug = DebugExecutor(model)

    def run(
        self,
        window: Sequence[Batch],
        *,
        backward: Backward | None = None,
        divisor: float | None = None,
        sync: Sync | None = None,
        drawn: bool = False,
    ) -> WindowOutcome:
        """Run forward and backward of all micro-batches of one window; gradients accumulate in ``p.grad``.

        Args:
            window: The micro-batches. A window shorter than the accumulation steps (the last of an epoch) is
                normalised by its own size.
            backward: Replaces ``loss.backward()``, for example ``lambda loss:
                scaler.scale(loss).backward()``.
            divisor: Replaces the number of valid elements (or of micro-batches with ``mean_of_means``).
                Across ranks whose gradients are averaged, pass the global number divided by the number of
                ranks.
            sync: Context for each backward, told whether it is the window's last.
            drawn: The micro-batches already hold the model's random draws; otherwise ``model.draw`` is
                called for each of them here, in window order. Default False.

        Returns:
            Losses per micro-batch and how they were computed. Nothing on it has waited for the device.

        Raises:
            ValueError: Empty window; ``fusion_batch_size`` does not divide the accumulation steps;
                ``divisor`` not positive; or the valid elements must be known before the first backward and
                are not.
        """
        factor = self._check(window, divisor)
        if not drawn:
            window = [draw(self.model, batch, self._generator) for batch in window]
        groups = self._planner.plan(window, factor)
        weigh = self._weigher(window, groups, divisor)
        results: list[StepResult] = []
        refusal: Refusal | None = None
        for group in groups:
            started = time.perf_counter_ns()
            done, refused = self._run_group(
                group,
                weigh,
                backward,
                sync or _no_sync,
                first_group=group is groups[0],
                last_group=group is groups[-1],
            )
            refusal = refusal or refused
            self._record(group, done, refused, started)
            results.extend(done)
        self._windows += 1
        return self._outcome(window, results, refusal, factor, groups)

    def _check(self, window: Sequence[Batch], divisor: float | None) -> int:
        """Check the arguments and return the fusion factor."""
        if not window:
            message = "the window holds no micro-batch; call run() with at least one"
            raise ValueError(message)
        if divisor is not None and not divisor > 0:
            message = f"divisor is {divisor}, it must be positive"
            raise ValueError(message)
        return self._planner.factor(window)

    def _weigher(
        self, window: Sequence[Batch], groups: Sequence[Group], divisor: float | None
    ) -> Callable[[tuple[int, ...]], Weighting]:
        """Return the function that gives each pass, by its micro-batch sizes, its weighting."""
        if self.config.normalize == "mean_of_means":
            factor = 1.0 / (divisor if divisor is not None else len(window))
            return lambda sizes: Weighting(kind="own_means", sizes=sizes, factor=factor)
        if divisor is not None:
            weights = torch.full((1,), 1.0 / divisor, device=_device(self.model))
            return lambda sizes: Weighting(kind="given", sizes=sizes, weights=weights)
        if len(groups) == 1 and (groups[0].joined is not None or len(window) == 1):
            # A fused pass that fails before its backward is run again in parts: they need the window's count.
            whole = len(window)
            return lambda sizes: (
                Weighting(kind="own_count", sizes=sizes)
                if len(sizes) == whole
                else self._by_count(window)(sizes)
            )
        return self._by_count(window)

    def _by_count(self, window: Sequence[Batch]) -> Callable[[tuple[int, ...]], Weighting]:
        """Weigh by the window's valid elements, counted before the forward passes, or by its samples."""
        counter = count_method(self.model)
        if counter is not None:
            total = torch.stack([counter(batch).detach().float().sum() for batch in window]).sum()
            known = total.clamp(min=1.0).reciprocal().reshape(1)
            return lambda sizes: Weighting(kind="given", sizes=sizes, weights=known)
        samples = sum(batch_size(batch) for batch in window)
        even = torch.full((1,), 1.0 / samples, device=_device(self.model))
        return lambda sizes: Weighting(kind="given", sizes=sizes, weights=even, samples_only=True)

    def _run_group(
        self,
        group: Group,
        weigh: Callable[[tuple[int, ...]], Weighting],
        backward: Backward | None,
        sync: Sync,
        *,
        first_group: bool,
        last_group: bool,
    ) -> tuple[list[StepResult], Refusal | None]:
        """Run one group: fused, or its micro-batches one by one. Return one result per pass."""
        refusal = group.refusal
        if group.joined is not None:
            weighting = weigh(group.joined.sizes)
            try:
                done = self._execute(
                    group.joined.batch, weighting, backward, sync, first=first_group, last=last_group
                )
                return [done], None
            except NoSampleLossesError as error:
                refusal = self._planner.lasting = Refusal(
                    reason=RefusalReason.NO_SAMPLE_LOSSES, detail=str(error)
                )
            except ForwardOutOfMemoryError as error:
                refusal = Refusal(reason=RefusalReason.MEMORY_CAUGHT, detail=str(error))
        results = []
        for index, batch in enumerate(group.batches):
            first = first_group and index == 0
            last = last_group and index == len(group.batches) - 1
            results.append(
                self._execute(batch, weigh((batch_size(batch),)), backward, sync, first=first, last=last)
            )
        return results, refusal

    def _execute(
        self,
        batch: Batch,
        weighting: Weighting,
        backward: Backward | None,
        sync: Sync,
        *,
        first: bool,
        last: bool,
    ) -> StepResult:
        """Run one pass; with a graph runner nothing synchronises inside it, the caller reduces afterwards."""
        if self._executor is None:
            with sync(last):
                return (self._debug or self._eager).execute(
                    batch, weighting, backward=backward, first=first, last=last
                )
        with sync(False):
            return self._executor.execute(batch, weighting, backward=backward, first=first, last=last)

    def _record(
        self, group: Group, done: Sequence[StepResult], refused: Refusal | None, started: int
    ) -> None:
        """Write the group into the trace."""
        fused = len(done) == 1 and len(group.batches) > 1
        graph_reasons = [r.reason for r in done if r.reason is not None]
        self.trace.add(
            GroupRecord(
                window=self._windows,
                first=group.first,
                sizes=tuple(batch_size(batch) for batch in group.batches),
                fused=fused,
                layout=group.joined.layout if fused and group.joined else "separate",
                reason=None if fused or refused is None else str(refused.reason),
                detail=None if fused or refused is None else refused.detail,
                padded_share=group.joined.padded_share if fused and group.joined else 0.0,
                start_ns=started,
                end_ns=time.perf_counter_ns(),
                graph=all(r.graph for r in done),
                graph_reason=graph_reasons[0] if graph_reasons else None,
                losses=torch.cat([_means(r) for r in done]),
            )
        )

    def _outcome(
        self,
        window: Sequence[Batch],
        results: Sequence[StepResult],
        refusal: Refusal | None,
        factor: int,
        groups: Sequence[Group],
    ) -> WindowOutcome:
        """Gather what the passes left."""
        reasons = [r.reason for r in results if r.reason is not None]
        flags = [r.finite for r in results if r.finite is not None]
        return WindowOutcome(
            micro_losses=list(torch.cat([_means(r) for r in results]).unbind()),
            micro_counts=list(torch.cat([r.counts for r in results]).unbind()),
            loss=torch.stack([r.total for r in results]).sum(),
            fused=len(results) == len(groups) and refusal is None,
            reason=None if refusal is None else str(refusal.reason),
            detail=None if refusal is None else refusal.detail,
            groups=len(results),
            samples=sum(batch_size(batch) for batch in window),
            factor=factor,
            graph=all(r.graph for r in results) if self._executor is not None else None,
            graph_reason=reasons[0] if reasons else None,
            padded_share=max((g.joined.padded_share for g in groups if g.joined is not None), default=0.0),
            finite=torch.stack(flags).amin() if flags else None,
            stepped=any(r.stepped for r in results),
            reduced=self._executor is None,
            micro_gradients=self._debug.take() if self._debug is not None else [],
        )


@contextlib.contextmanager
def _no_sync(last: bool) -> Iterator[None]:  # noqa: FBT001 - the signature of Sync
    """Gradients are not synchronised by anybody."""
    del last
    yield


def _device(model: nn.Module) -> torch.device:
    """Return the device of the first parameter, the CPU for a model without any."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _means(result: StepResult) -> Tensor:
    return result.sums / result.counts.clamp(min=1.0)
