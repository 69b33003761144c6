"""Optimizer, learning-rate schedule, and optimizer state keyed by parameter name (faults T13, T14, T23)."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from loongforge.config import TrainConfig
from loongforge.errors import CheckpointError, ConfigError, require

log = logging.getLogger(__name__)

OPTIMIZER_FORMAT = 1
_IDENTITY = {"params", "names", "param_names"}
"""Keys of a group that say which parameters it holds; not settings."""


@runtime_checkable
class ClippingOptimizer(Protocol):
    """An optimizer that clips the gradients' norm and leaves out bad steps itself, all on the device."""

    max_grad_norm: float | None
    grad_norm: Tensor | None
    """Norm before clipping, of the last step; not finite where that step was left out for it."""

    def step(self, *, found_inf: Tensor) -> object:
        """Update, unless ``found_inf`` or the gradients' norm forbids it."""
        ...


def clips_itself(optimizer: Optimizer, clip_norm: float | None) -> ClippingOptimizer | None:
    """Return the optimizer when it clips to just this norm, None when somebody else has to."""
    if isinstance(optimizer, ClippingOptimizer) and optimizer.max_grad_norm == clip_norm:
        return optimizer
    return None


def build_optimizer(
    groups: Sequence[Mapping[str, object]], config: TrainConfig, device: torch.device
) -> Optimizer:
    """Return AdamW with the configured settings: in one pass where that is asked for and possible.

    torch's own is fused on CUDA, where it also skips bad steps by itself.
    """
    plain = [dict(group) for group in groups]
    if config.pillars.fused_optimizer:
        reason = not_in_one_pass(config)
        if reason is None:
            fuse = require("loongforge_fuse", "loongforge-fuse", "use torch's AdamW (--no-fused-optimizer)")
            settings = {name: v for name, v in optimizer_settings(config, device).items() if name != "fused"}
            optimizer = fuse.FusedAdamW(plain, **settings, max_grad_norm=config.clip_norm)  # type: ignore[attr-defined]
            return cast(Optimizer, optimizer)
        log.info("torch's AdamW runs in place of the fused one: %s", reason)
    return AdamW(plain, **optimizer_settings(config, device))  # type: ignore[arg-type]


def not_in_one_pass(config: TrainConfig) -> str | None:
    """Return why clipping and update cannot be one pass in this run, or None."""
    if config.precision == "fp16":
        return "precision is fp16, whose loss scaler decides on the host"
    if config.guards.nonfinite == "off":
        return "guards.nonfinite is off, and it never applies a gradient that is not finite"
    if config.strategy != "ddp":
        return f"strategy {config.strategy} keeps parts of weights or moments on each rank"
    return None


def optimizer_settings(config: TrainConfig, device: torch.device) -> dict[str, object]:
    """Return AdamW's keyword arguments."""
    return {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "fused": device.type == "cuda",
    }


def default_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return two groups: matrices with weight decay, vectors (biases, norms) without; none of frozen ones."""
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups: list[dict[str, object]] = [
        {"params": decay, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    kept = [group for group in groups if group["params"]]
    if not kept:
        msg = "the model has no trainable parameter: allowed is at least one; unfreeze something"
        raise ConfigError(msg)
    return kept


class PlannedSchedule(LambdaLR):
    """The configured schedule over a known number of steps."""


def build_schedule(optimizer: Optimizer, config: TrainConfig, total_steps: int) -> PlannedSchedule:
    """Return a warm-up followed by a cosine, linear or constant rate; it advances once per optimizer step."""
    warmup = math.ceil(config.warmup_ratio * total_steps) if config.schedule != "constant" else 0

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1 - done

    return PlannedSchedule(optimizer, factor)


def go_on_schedule(
    optimizer: Optimizer, config: TrainConfig, total_steps: int, state: Mapping[str, object]
) -> PlannedSchedule:
    """Return the schedule at a stored position, for a run whose number of steps may have changed since."""
    schedule = build_schedule(optimizer, config, total_steps)
    schedule.load_state_dict(dict(state))
    for group, base, factor in zip(
        optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(schedule.last_epoch)
    return schedule


def names_of(model: nn.Module) -> dict[int, str]:
    """Return parameter names by identity; a tied parameter has its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def named_state(
    optimizer: Optimizer, model: nn.Module, *, state_dict: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return the optimizer's state keyed by parameter name: ``{"format", "state", "param_groups"}``.

    Args:
        optimizer: Its parameters must belong to ``model``.
        model: Gives the names.
        state_dict: A state dict keyed by position to convert; the optimizer's own by default.
    """
    stored = dict(state_dict if state_dict is not None else optimizer.state_dict())
    order = ordered_names(optimizer, model)
    groups, position = [], 0
    for group in _groups(stored):
        size = len(list(group["params"]))  # type: ignore[call-overload]
        settings = {key: value for key, value in group.items() if key not in _IDENTITY}
        groups.append({**settings, "params": order[position : position + size]})
        position += size
    state = stored["state"]
    if not isinstance(state, Mapping):
        msg = "the optimizer's state_dict has no mapping `state`: this optimizer cannot be saved"
        raise CheckpointError(msg)
    return {
        "format": OPTIMIZER_FORMAT,
        "state": {order[int(index)]: dict(values) for index, values in state.items()},
        "param_groups": groups,
    }


def ordered_names(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Return the names of the optimizer's parameters in its own order."""
    names, order = names_of(model), []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                message = (
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model does "
                    "not have: build the optimizer from model.parameters() after the model is final"
                )
                raise CheckpointError(message)
            order.append(names[id(parameter)])
    return order


def load_named_state(optimizer: Optimizer, model: nn.Module, stored: Mapping[str, object]) -> None:
    """Restore a state keyed by name, wherever each parameter stands now.

    Tensors follow the device of their parameter and keep their own dtype (float32 moments of bfloat16 weights
    stay float32). Settings of the groups (rates, decay) come from the checkpoint by the group of each name.

    Raises:
        CheckpointError: Names or shapes differ; the message lists them.
    """
    if stored.get("format") != OPTIMIZER_FORMAT:
        msg = f"optimizer state has format {stored.get('format')!r}: allowed is {OPTIMIZER_FORMAT}"
        raise CheckpointError(msg)
    order = ordered_names(optimizer, model)
    groups = _groups(stored)
    _check_names(order, groups)
    state = stored["state"]
    if not isinstance(state, Mapping):
        msg = "the optimizer state in the checkpoint is not a mapping: the file is damaged"
        raise CheckpointError(msg)
    parameters = dict(model.named_parameters())
    _check_shapes(state, parameters)
    positional_groups = _positional_groups(optimizer, order, groups)
    positional = {order.index(str(name)): dict(values) for name, values in state.items()}
    optimizer.load_state_dict({"state": positional, "param_groups": positional_groups})
    _restore_dtypes(optimizer, parameters, state)


def load_group_settings(optimizer: Optimizer, model: nn.Module, stored: Mapping[str, object]) -> None:
    """Restore the settings of the groups alone (rates, decay), by the names of their parameters.

    Raises:
        CheckpointError: Names differ; the message lists them.
    """
    order = ordered_names(optimizer, model)
    groups = _groups(stored)
    _check_names(order, groups)
    for group, settings in zip(
        optimizer.param_groups, _positional_groups(optimizer, order, groups), strict=True
    ):
        group.update({key: value for key, value in settings.items() if key not in _IDENTITY})


def _check_names(order: Sequence[str], groups: Sequence[Mapping[str, object]]) -> None:
    known = [str(name) for group in groups for name in group["params"]]  # type: ignore[attr-defined]
    missing, extra = sorted(set(order) - set(known)), sorted(set(known) - set(order))
    if missing or extra:
        message = (
            f"optimizer state does not fit the model: not in the checkpoint {_some(missing)}; only in the "
            f"checkpoint {_some(extra)}. Train the model the checkpoint was written with, or start with "
            "fresh moments"
        )
        raise CheckpointError(message)


def _positional_groups(
    optimizer: Optimizer, order: Sequence[str], groups: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Return the optimizer's own groups by position, with the stored settings of their first parameter.

    Settings that the checkpoint does not have stay: another optimizer may have written it.
    """
    group_of = {str(name): group for group in groups for name in group["params"]}  # type: ignore[attr-defined]
    position, result = 0, []
    for group in optimizer.param_groups:
        source = group_of[order[position]] if group["params"] else group
        size = len(group["params"])
        settings = {key: value for key, value in source.items() if key not in _IDENTITY}
        here = {key: value for key, value in group.items() if key not in settings}
        result.append({**settings, **here, "params": list(range(position, position + size))})
        position += size
    return result


def _restore_dtypes(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, object]
) -> None:
    """Put back the stored dtype: torch casts floating state to the parameter's when it loads."""
    for name, values in state.items():
        present = optimizer.state.get(parameters[name])
        if present is None or not isinstance(values, Mapping):
            continue
        for key, value in values.items():
            now = present.get(key)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                present[key] = value.to(device=now.device, copy=True)


def _check_shapes(state: Mapping[str, object], parameters: Mapping[str, nn.Parameter]) -> None:
    wrong = []
    for name, values in state.items():
        shape = tuple(parameters[name].shape)
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            value = dict(values).get(key)  # type: ignore[call-overload]
            if isinstance(value, Tensor) and tuple(value.shape) != shape:
                wrong.append(f"{name}.{key} {tuple(value.shape)} for a parameter {shape}")
    if wrong:
        msg = f"optimizer state has other shapes than the model: {_some(wrong)}"
        raise CheckpointError(msg)


def _groups(stored: Mapping[str, object]) -> list[dict[str, object]]:
    groups = stored.get("param_groups")
    if not isinstance(groups, list):
        msg = "the optimizer state has no list `param_groups`: the file is damaged"
        raise CheckpointError(msg)
    return groups


def _some(names: Sequence[str], most: int = 8) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
