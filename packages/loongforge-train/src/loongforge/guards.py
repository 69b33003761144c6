"""What protects a run from itself: not-finite losses and gradients, loss spikes, windows that never fill.

The verdict is a tensor on the device, computed from values that are equal on all ranks (the averaged
gradient's norm and the summed loss), so all ranks decide alike without asking each other again. Counting
happens later, when the step record is read.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from loongforge.config import GuardConfig
from loongforge.errors import DataExhaustedError, LoongForgeError, NonFiniteError, SpikeError
from loongforge.optim import ClippingOptimizer
from loongforge.records import StepRecord

READ_LAG = 16
"""Steps after which every rank has certainly read a loss (the recorder has at most one less unread): the
spike limit uses no newer one and is equal on all ranks."""
SPIKE_WINDOW, SPIKE_LEAST = 64, 16


class Guard:
    """Judges each step and counts what was skipped.

    Args:
        config: Policies and limits.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.skipped_in_row = 0
        self.skipped_total = 0
        self.spikes = 0
        self.failure: LoongForgeError | None = None
        self._losses: dict[int, float] = {}

    def verdict(self, loss: Tensor, norm: Tensor | None, *, step: int) -> Tensor:
        """Return 1.0 on the device when the update must be skipped, else 0.0.

        Without a ``norm`` only the loss is judged; see :meth:`apply_clipping`.
        """
        bad = torch.zeros((), dtype=torch.float32, device=loss.device)
        if self.config.nonfinite != "off":
            good = torch.isfinite(loss)
            bad = (~(good if norm is None else good & torch.isfinite(norm.to(loss.device)))).float()
        limit = self.spike_limit(step)
        if limit is not None and self.config.spike_action != "warn":
            bad = torch.maximum(bad, (loss > limit).float())
        return bad

    def spike_limit(self, step: int) -> float | None:
        """Return the loss above which this step is a spike, or None while there is too little history."""
        if self.config.spike_factor is None:
            return None
        recent = [
            self._losses[s]
            for s in range(step - READ_LAG - SPIKE_WINDOW, step - READ_LAG + 1)
            if s in self._losses
        ]
        if len(recent) < SPIKE_LEAST:
            return None
        return self.config.spike_factor * statistics.median(recent)

    def apply(self, bad: Tensor, optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
        """Step the optimizer unless ``bad``.

        A fused optimizer on the GPU takes the flag as ``found_inf`` and skips on the device; any other
        optimizer on the GPU costs one host read a step.
        """
        if self.config.nonfinite == "off" and self.config.spike_factor is None:
            (optimizer.step() if scaler is None else scaler.step(optimizer))
        elif scaler is None and bad.is_cuda and takes_flag(optimizer):
            optimizer.grad_scale, optimizer.found_inf = None, bad  # type: ignore[attr-defined]
            optimizer.step()
        elif not bool(bad.item()):
            (optimizer.step() if scaler is None else scaler.step(optimizer))
        if scaler is not None:
            scaler.update()

    def apply_clipping(self, bad: Tensor, optimizer: ClippingOptimizer) -> tuple[Tensor, Tensor]:
        """Step an optimizer that clips and judges the gradients' norm itself, unless ``bad``.

        Returns:
            The norm before clipping, and whether the update was skipped, with the norm's verdict in it.
        """
        optimizer.step(found_inf=bad)
        if optimizer.grad_norm is None:
            return torch.zeros_like(bad), bad
        # The optimizer writes its next norm into the same tensor, and this one is read later.
        norm = optimizer.grad_norm.detach().clone().reshape(())
        return norm, torch.maximum(bad, (~torch.isfinite(norm)).float())

    def observe(self, record: StepRecord, sample_ids: Sequence[Sequence[int]]) -> None:
        """Count a read step; sets :attr:`failure` when the policy says stop."""
        limit = self.spike_limit(record.step)
        if limit is not None and record.loss is not None and record.loss > limit:
            record.spike = True
            self.spikes += 1
            if self.config.spike_action == "stop" and self.failure is None:
                self.failure = SpikeError(
                    f"step {record.step}: the loss is {record.loss:.4g}, above {limit:.4g} "
                    f"({self.config.spike_factor} x the running median); samples of this rank: "
                    f"{_named(sample_ids)}. Look at these samples, lower the learning rate, or set "
                    "guards.spike_action to skip"
                )
        elif record.loss is not None and not record.skipped:
            self._losses[record.step] = record.loss
            self._losses.pop(record.step - 2 * (SPIKE_WINDOW + READ_LAG), None)
        if not record.skipped:
            self.skipped_in_row = 0
            return
        self.skipped_in_row += 1
        self.skipped_total += 1
        most = 1 if self.config.nonfinite == "stop" else self.config.max_skips
        # Of several steps that were read together, the first one that is too many says why.
        if self.skipped_in_row >= most and not record.spike and self.failure is None:
            suspects = [
                ids
                for ids, loss in zip(sample_ids, record.micro_losses or [], strict=False)
                if loss is None or loss != loss or abs(loss) == float("inf")
            ]
            self.failure = NonFiniteError(
                f"step {record.step}: loss or gradient not finite in {self.skipped_in_row} step(s) in a row "
                f"(allowed: fewer than {most}); samples of this rank with such a loss: {_named(suspects)}, "
                f"all samples of the window: {_named(sample_ids)}. The weights are those of the last good "
                "step"
            )

    def no_step_possible(self, batches: int, accumulation: int) -> NoReturn:
        """Fail because no optimizer step could ever happen (fault T10)."""
        message = (
            f"an epoch has {batches} micro-batches on this rank and a step needs {accumulation}: no "
            "optimizer step could ever happen. Add data, lower batch size or accumulation, keep ragged ones"
        )
        raise DataExhaustedError(message)

    def state_dict(self) -> dict[str, object]:
        """Return the counters and the recent losses."""
        return {
            "skipped_in_row": self.skipped_in_row,
            "skipped_total": self.skipped_total,
            "spikes": self.spikes,
            "losses": {str(step): loss for step, loss in self._losses.items()},
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take over stored counters."""
        self.skipped_in_row = int(str(state.get("skipped_in_row", 0)))
        self.skipped_total = int(str(state.get("skipped_total", 0)))
        self.spikes = int(str(state.get("spikes", 0)))
        losses = state.get("losses")
        if isinstance(losses, dict):
            self._losses = {int(step): float(loss) for step, loss in losses.items()}


def takes_flag(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer skips on the device when ``found_inf`` is set (torch's fused optimizers)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and all(
        group.get("fused") for group in optimizer.param_groups
    )


def _named(ids: Sequence[Sequence[int]]) -> str:
    flat = [str(value) for group in ids for value in group]
    return ", ".join(flat[:64]) if flat else "unknown (the batch has no `index`)"
