"""What ``FusedAdamW`` accepts as settings of a group, and how a saved state comes back without loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

Group = Mapping[str, Any]

_FLOATS = (torch.bfloat16, torch.float16)
_ABSENT = ("amsgrad", "maximize")


def check_group(group: Group, others: Sequence[Group]) -> None:
    """Check the settings of a group, alone and beside the groups that are there.

    Raises:
        ValueError: A setting is out of range, missing or not one of this optimizer, or betas and eps differ
            between groups: they are numbers of the kernel, one for all.
    """
    missing = [name for name in ("lr", "weight_decay", "betas", "eps") if name not in group]
    if missing:
        message = f"a group has no {', '.join(missing)}: is its state that of another optimizer than AdamW?"
        raise ValueError(message)
    lr, decay, eps, betas = group["lr"], group["weight_decay"], group["eps"], tuple(group["betas"])
    if not all(0.0 <= b < 1.0 for b in betas):
        message = f"betas must be in [0, 1), got {betas}"
        raise ValueError(message)
    if (isinstance(lr, float | int) and lr < 0) or decay < 0 or eps < 0:
        message = f"lr, eps and weight_decay must not be negative, got {lr}, {eps}, {decay}"
        raise ValueError(message)
    asked = [name for name in _ABSENT if group.get(name)]
    if asked:
        message = f"FusedAdamW has no {' and no '.join(asked)}, which this group asks for; use torch's AdamW"
        raise ValueError(message)
    shared = {(betas, eps), *((tuple(g["betas"]), g["eps"]) for g in others)}
    if len(shared) > 1:
        message = f"betas and eps must be the same in all groups, got {sorted(shared)}"
        raise ValueError(message)


def check_parameter(param: Tensor) -> None:
    """Refuse a parameter that has no update here.

    Raises:
        ValueError: A sparse gradient, or complex numbers.
    """
    if param.grad is not None and param.grad.is_sparse:
        message = "FusedAdamW takes dense gradients only; use torch.optim.SparseAdam for this parameter"
        raise ValueError(message)
    if param.is_complex():
        message = f"FusedAdamW takes real parameters only, got {param.dtype}; use torch's AdamW for it"
        raise ValueError(message)


def restore_values(
    saved: Mapping[str, Any],
    groups: Sequence[Group],
    state: Mapping[Tensor, dict[str, Tensor]],
    *,
    kind: torch.dtype | None,
    masters: bool,
) -> None:
    """Put saved moments and masters back as they were saved; torch casts them to the parameter's type.

    Args:
        saved: The state dict that was loaded.
        groups: The optimizer's groups, in the order of the saved ones.
        state: The optimizer's state, as torch left it.
        kind: Type of the moments, or None for the parameter's.
        masters: Whether half parameters have float32 masters; one that was saved without gets it from its
            value.
    """
    indices = chain.from_iterable(group["params"] for group in saved["param_groups"])
    params = chain.from_iterable(group["params"] for group in groups)
    for index, param in zip(indices, params, strict=True):
        values, now = saved["state"].get(index), state.get(param)
        if not values or not now or "exp_avg" not in now:
            continue
        for name in ("exp_avg", "exp_avg_sq"):
            now[name] = _laid_out(values[name], param, kind or param.dtype)
        master = now.pop("master", None)
        if masters and param.dtype in _FLOATS:
            now["master"] = _laid_out(param if master is None else values["master"], param, torch.float32)


def _laid_out(value: Tensor, param: Tensor, kind: torch.dtype) -> Tensor:
    """Return a value on the device and in the memory order of a parameter: kernels walk through memory."""
    found = value.detach().to(device=param.device, dtype=kind)
    if found.stride() == param.stride():
        return found
    return torch.empty_like(param, dtype=kind, memory_format=torch.preserve_format).copy_(found)


def largest_step(states: Sequence[Mapping[str, Any]], device: torch.device) -> Tensor:
    """Return the largest step count of some states as a float32 tensor of its own, 0 where there is none."""
    known = {id(s["step"]): s["step"] for s in states if "step" in s}
    counts = [torch.as_tensor(c).detach().reshape(()).to(device, torch.float32) for c in known.values()]
    return torch.stack(counts).amax() if counts else torch.zeros((), device=device)
