"""One forward and backward over a (fused) batch, with the window's loss weights applied inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from loongforge_fuse.protocol import Batch, SampleLosses, batch_size, read_losses

Backward = Callable[[Tensor], None]


class NoSampleLossesError(Exception):
    """A fused forward pass returned one loss for several micro-batches; nothing was accumulated."""


class ForwardOutOfMemoryError(Exception):
    """A fused forward pass ran out of memory; nothing was accumulated."""


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """How the per-sample sums of a forward pass become the part of the window's loss that is differentiated.

    Attributes:
        kind: ``"given"``: ``sum_i sums_i * weights_i``. ``"own_count"``: sum of all sums over the number of
            valid elements of this very pass (a window that is one group). ``"own_means"``: ``factor`` times
            the sum of the micro-batches' means.
        weights: ``(B,)`` or ``(1,)`` float32 for ``"given"``, else None.
        factor: Factor on the result for the other kinds. Default 1.
        sizes: Samples of each micro-batch in the pass.
        samples_only: The weights count samples, because the valid elements are not known before the forward
            pass; wrong, and refused, for a model that turns out to report elements.
    """

    kind: Literal["given", "own_count", "own_means"]
    sizes: tuple[int, ...]
    weights: Tensor | None = None
    factor: float = 1.0
    samples_only: bool = False


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What is left of a forward/backward: detached tensors on the model's device.

    Attributes:
        sums: ``(G,)`` masked loss sum of each micro-batch.
        counts: ``(G,)`` valid elements of each micro-batch.
        total: Scalar that was differentiated (before any loss scale).
        graph: Whether a graph was replayed.
        reason: Why no graph was used, None when one was or none was asked for.
        finite: 1 where the loss (and what else was checked) was finite, a scalar on the device; None
            unchecked.
        stepped: Whether the pass contained the optimizer's step.
    """

    sums: Tensor
    counts: Tensor
    total: Tensor
    graph: bool = False
    reason: str | None = None
    finite: Tensor | None = None
    stepped: bool = False


class Executor(Protocol):
    """Runs forward and backward of one batch; gradients accumulate in ``p.grad``."""

    def execute(
        self, batch: Batch, weighting: Weighting, *, backward: Backward | None, first: bool, last: bool
    ) -> StepResult:
        """Run one pass, told whether it is the first and the last of its window; return its losses."""
        ...


def per_micro_batch(values: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Sum per-sample ``values`` (B,) within each micro-batch: ``(G,)``. A ``(1,)`` input stays as it is."""
    if len(sizes) == 1:
        return values.sum().reshape(1)
    if len(set(sizes)) == 1:
        return values.reshape(len(sizes), -1).sum(dim=1)
    return torch.stack([part.sum() for part in torch.split(values, list(sizes))])


def weighted_total(losses: SampleLosses, weighting: Weighting) -> Tensor:
    """Return the scalar to differentiate, in float32 at least."""
    if weighting.samples_only and losses.per_sample:
        message = (
            "the model reports loss_count per sample, so the window's valid elements must be known before "
            "its first backward: give the model a method loss_count(batch), or pass divisor=, or set "
            "normalize='mean_of_means', or fuse the whole window"
        )
        raise ValueError(message)
    sums = losses.sums if losses.sums.dtype == torch.float64 else losses.sums.float()
    if weighting.kind == "given":
        if weighting.weights is None:
            message = "a Weighting of kind 'given' needs weights"
            raise ValueError(message)
        return (sums * weighting.weights.to(sums.dtype)).sum()
    if weighting.kind == "own_count":
        return sums.sum() / losses.counts.sum().clamp(min=1.0) * weighting.factor
    means = per_micro_batch(sums, weighting.sizes) / per_micro_batch(losses.counts, weighting.sizes).clamp(
        min=1.0
    )
    return means.sum() * weighting.factor


def forward_losses(model: nn.Module, batch: Batch, samples: int | None = None) -> SampleLosses:
    """Call the model and read its losses; ``samples`` defaults to what the batch shows."""
    return read_losses(model(batch), batch_size(batch) if samples is None else samples)


@dataclass(frozen=True, kw_only=True)
class EagerExecutor:
    """The plain executor: call the model, weigh, call backward."""

    model: nn.Module

    def execute(
        self, batch: Batch, weighting: Weighting, *, backward: Backward | None, first: bool, last: bool
    ) -> StepResult:
        """Run one batch; ``backward`` replaces ``total.backward()`` (a loss scaler's, for example)."""
        del first, last
        losses = checked_forward(self.model, batch, weighting)
        total = weighted_total(losses, weighting)
        if backward is None:
            total.backward()  # type: ignore[no-untyped-call]
        else:
            backward(total)
        return result_of(losses, total, weighting)


def checked_forward(model: nn.Module, batch: Batch, weighting: Weighting) -> SampleLosses:
    """Run the forward pass; what fails here has not touched any gradient.

    Raises:
        ForwardOutOfMemoryError: A fused pass ran out of memory.
        NoSampleLossesError: A fused pass came back as one loss.
    """
    samples = sum(weighting.sizes)
    if len(weighting.sizes) == 1:
        return forward_losses(model, batch, samples)
    failure: str | None = None
    losses: SampleLosses | None = None
    try:
        losses = forward_losses(model, batch, samples)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        failure = str(error).splitlines()[0]
    if losses is None:
        # Outside the except block: the traceback no longer holds the activations of the failed pass.
        raise ForwardOutOfMemoryError(failure)
    check_per_sample(losses, weighting)
    return losses


def check_per_sample(losses: SampleLosses, weighting: Weighting) -> None:
    """Raise NoSampleLossesError when several micro-batches came back as one loss."""
    if len(weighting.sizes) > 1 and not losses.per_sample:
        message = (
            "the model returns no loss_sum and loss_count per sample, so fused losses could not be told apart"
        )
        raise NoSampleLossesError(message)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is an out-of-memory error of torch or of a pluggable allocator."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def result_of(losses: SampleLosses, total: Tensor, weighting: Weighting) -> StepResult:
    """Detach what a caller may keep."""
    return StepResult(
        sums=per_micro_batch(losses.sums.detach().float(), weighting.sizes),
        counts=per_micro_batch(losses.counts, weighting.sizes),
        total=total.detach(),
    )
