"""Forward and backward of one window, micro-batch by micro-batch: what runs when fusion is off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from loongforge.batches import Backward

Sync = Callable[[bool], AbstractContextManager[object]]


class Outcome(Protocol):
    """What a window runner reports. ``loss`` and ``micro_losses`` may still be on the device."""

    @property
    def micro_losses(self) -> Sequence[float | Tensor]:
        """Mean loss of each micro-batch: tensors that no later window writes into."""
        ...

    @property
    def loss(self) -> float | Tensor:
        """What was differentiated."""
        ...

    @property
    def fused(self) -> bool:
        """Whether micro-batches were fused."""
        ...

    @property
    def reason(self) -> str | None:
        """Why they were not."""
        ...


class WindowRunner(Protocol):
    """Runs forward and backward of a window; gradients accumulate in ``p.grad``."""

    def run(
        self,
        window: Sequence[Mapping[str, object]],
        *,
        backward: Backward | None = None,
        divisor: float | None = None,
        sync: Sync | None = None,
    ) -> Outcome:
        """Run forward and backward of the window."""
        ...


@dataclass(frozen=True, kw_only=True)
class WindowOutcome:
    """Losses of a window, on the device."""

    micro_losses: Sequence[Tensor]
    """Mean loss of each micro-batch."""
    loss: Tensor
    """What was differentiated: the sum of the window's scaled losses."""
    fused: bool = False
    reason: str | None = "off"


class EagerWindow:
    """One forward and backward per micro-batch.

    With a divisor the loss of a micro-batch is ``sum(loss_sum) / divisor``, so that the window's gradient is
    that of one big batch even when micro-batches differ in valid elements (fault F13). Without one, each
    micro-batch's mean counts ``1 / len(window)`` (fault T10: the real number, not the configured one).
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def run(
        self,
        window: Sequence[Mapping[str, object]],
        *,
        backward: Backward | None = None,
        divisor: float | None = None,
        sync: Sync | None = None,
    ) -> WindowOutcome:
        """Run the window; ``sync(last)`` wraps forward and backward of each micro-batch."""
        losses: list[Tensor] = []
        total: Tensor | None = None
        for number, batch in enumerate(window):
            last = number == len(window) - 1
            with sync(last) if sync is not None else nullcontext():
                output = self._module(batch)
                loss, mean = scaled_loss(output, divisor=divisor, window=len(window))
                (backward or Tensor.backward)(loss)
            # A loss of the module's own may lie where its next call writes, as behind a captured graph.
            losses.append(mean.detach().clone() if mean is output.get("loss") else mean.detach())
            total = loss.detach() if total is None else total + loss.detach()
        if total is None:
            msg = "the window has 0 micro-batches: allowed is at least one; skip the step instead"
            raise ValueError(msg)
        return WindowOutcome(micro_losses=losses, loss=total)


def scaled_loss(output: Mapping[str, Tensor], *, divisor: float | None, window: int) -> tuple[Tensor, Tensor]:
    """Return (loss to differentiate, mean loss of the micro-batch)."""
    if divisor is None or "loss_sum" not in output:
        return output["loss"] / window, output["loss"]
    total = output["loss_sum"].sum()
    count = output["loss_count"].sum() if "loss_count" in output else None
    mean = total / count.clamp(min=1) if count is not None else output["loss"]
    return total / divisor, mean
