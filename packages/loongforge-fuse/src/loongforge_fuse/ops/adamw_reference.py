"""The update of ``FusedAdamW`` in plain torch: the oracle of the tests and the path without a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loongforge_fuse.ops.adamw_tables import Slot


def reference_update(
    slots: Sequence[Slot],
    *,
    step: Tensor,
    groups: Sequence[dict[str, Any]],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    max_norm: float | None,
) -> Tensor:
    """Do the update of :class:`FusedAdamW` in plain torch, in place; return the unscaled gradient norm.

    The oracle of the tests and the path without a GPU; it synchronises when a step may be skipped.
    """
    wide = torch.float64 if slots[0].param.dtype == torch.float64 else torch.float32
    factor = torch.ones((), dtype=wide, device=step.device)
    if grad_scale is not None:
        factor = factor / grad_scale.reshape(())
    total = torch.stack([s.grad.detach().to(wide).square().sum() for s in slots]).sum()
    norm = total.sqrt() * factor
    if (found_inf is not None and bool(found_inf.reshape(()) != 0)) or not bool(torch.isfinite(norm)):
        return norm
    if max_norm:
        factor = factor * torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    step += 1
    count = float(step)
    for slot in slots:
        group = groups[slot.group]
        beta1, beta2 = group["betas"]
        lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
        value = slot.param if slot.master is None else slot.master
        g = slot.grad.to(wide) * factor
        m = beta1 * slot.exp_avg.to(wide) + (1 - beta1) * g
        v = beta2 * slot.exp_avg_sq.to(wide) + (1 - beta2) * g * g
        size = lr / (1 - beta1**count)
        new = value.to(wide) * (1 - lr * decay) - size * m / (v.sqrt() / math.sqrt(1 - beta2**count) + eps)
        slot.exp_avg.copy_(m)
        slot.exp_avg_sq.copy_(v)
        if slot.master is not None:
            slot.master.copy_(new)
        slot.param.copy_(new)
    return norm
