"""Debug execution: the weight gradients of every micro-batch beside their sum."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loongforge_fuse.fusion.execute import (
    Backward,
    StepResult,
    Weighting,
    checked_forward,
    per_micro_batch,
    result_of,
    weighted_total,
)
from loongforge_fuse.protocol import Batch, SampleLosses


class DebugExecutor:
    """Runs a pass and keeps each micro-batch's own gradients.

    One fused backward only holds their sum, so this calls one more backward per micro-batch through the same
    forward pass. Those extra ones touch no ``p.grad`` and fire no hooks.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.taken: list[dict[str, Tensor]] = []

    def execute(
        self, batch: Batch, weighting: Weighting, *, backward: Backward | None, first: bool, last: bool
    ) -> StepResult:
        """Run one pass; ``taken`` grows by one entry per micro-batch."""
        del first, last
        losses = checked_forward(self._model, batch, weighting)
        total = weighted_total(losses, weighting)
        named = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        for part in parts(losses, weighting):
            gradients = torch.autograd.grad(part, [p for _, p in named], retain_graph=True, allow_unused=True)
            self.taken.append({n: g for (n, _), g in zip(named, gradients, strict=True) if g is not None})
        if backward is None:
            total.backward()  # type: ignore[no-untyped-call]
        else:
            backward(total)
        return result_of(losses, total, weighting)

    def take(self) -> list[dict[str, Tensor]]:
        """Return what was kept since the last call."""
        taken, self.taken = self.taken, []
        return taken


def parts(losses: SampleLosses, weighting: Weighting) -> list[Tensor]:
    """Split the differentiated total by micro-batch; the parts add up to it."""
    sums = losses.sums if losses.sums.dtype == torch.float64 else losses.sums.float()
    if weighting.kind == "given" and weighting.weights is not None:
        values = per_micro_batch(sums * weighting.weights.to(sums.dtype), weighting.sizes)
    elif weighting.kind == "own_count":
        values = (
            per_micro_batch(sums, weighting.sizes) / losses.counts.sum().clamp(min=1.0) * weighting.factor
        )
    else:
        counts = per_micro_batch(losses.counts, weighting.sizes).clamp(min=1.0)
        values = per_micro_batch(sums, weighting.sizes) / counts * weighting.factor
    return list(values.unbind())
