"""Composes model, pillars, data and optimizer into the parts of a training step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from loongforge.batches import CountsLoss
from loongforge.config import TrainConfig
from loongforge.ema import WeightAverage
from loongforge.engine import AUTOCAST, Parts
from loongforge.errors import ConfigError
from loongforge.fusing import build_runner, has_hooks, keeps_gradients, patch_operators
from loongforge.guards import Guard
from loongforge.nvml import utilisation_reader
from loongforge.optim import build_schedule, default_groups
from loongforge.parallel import build_parallel
from loongforge.pillars import MemoryPillar, build_memory
from loongforge.ranks import Ranks
from loongforge.recorder import Recorder
from loongforge.sources import BatchSource


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What of a step's parts does not depend on the ranks, and goes on when those change."""

    optimizer: Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler | None
    average: WeightAverage | None
    guard: Guard
    documents: dict[str, str]

    @classmethod
    def of(cls, parts: Parts) -> Self:
        """Take it from parts that are left."""
        return cls(
            optimizer=parts.optimizer,
            schedule=parts.schedule,
            scaler=parts.scaler,
            average=parts.average,
            guard=parts.guard,
            documents=dict(parts.documents),
        )


Groups = Callable[[nn.Module, float], list[dict[str, object]]]


def build_parts(
    config: TrainConfig,
    model: nn.Module,
    source: BatchSource,
    ranks: Ranks,
    *,
    module: nn.Module | None = None,
    groups: Groups = default_groups,
    optimizer: Optimizer | None = None,
    schedule: LRScheduler | None = None,
    memory: MemoryPillar | None = None,
    earlier: Kept | None = None,
) -> Parts:
    """Compose model, pillars and optimizer into the parts of a step.

    Args:
        config: The run.
        model: Bare model, already with its initial weights (equal on all ranks).
        source: Micro-batches of this rank.
        ranks: This process among its peers.
        module: What the forward calls when it is not the model itself (a compiled or adapted one).
        groups: Makes optimizer groups of a model.
        optimizer: A ready optimizer, instead of AdamW over ``groups``.
        schedule: A ready schedule, instead of the configured one.
        memory: The memory pillar, when it had to be made before the model was.
        earlier: What goes on of the same model's training among other ranks.
    """
    memory = memory or build_memory(config.pillars, ranks.device)
    with memory.persistent():
        model.to(ranks.device)
    foreign_hooks = has_hooks(model)
    if config.pillars.fused_ops and earlier is None:
        patch_operators(model)
    called = module if module is not None else model
    if config.compile:
        called = torch.compile(called)  # type: ignore[assignment]
    parallel = build_parallel(model, called, ranks, config)
    if earlier is not None:
        optimizer, schedule = earlier.optimizer, earlier.schedule
    if optimizer is None:
        optimizer = parallel.optimizer(groups(model, config.weight_decay), config)
    if schedule is None:
        schedule = build_schedule(optimizer, config, total_steps(config, source))
    if earlier is None:
        memory.attach(model, optimizer)
    device = ranks.device
    scaler, average, guard = _kept(config, model, device, earlier)
    return Parts(
        model=model,
        runner=build_runner(
            config,
            parallel.module,
            ranks,
            scaler=scaler,
            foreign_hooks=foreign_hooks,
            counts=isinstance(model, CountsLoss),
        ),
        parallel=parallel,
        optimizer=optimizer,
        schedule=schedule,
        source=source,
        ranks=ranks,
        memory=memory,
        recorder=Recorder(device, ranks.rank, gpu_util=utilisation_reader(device)),
        guard=guard,
        accumulation=config.accumulation,
        seed=config.seed,
        clip_norm=config.clip_norm,
        autocast=AUTOCAST[config.precision],
        scaler=scaler,
        average=average,
        drop_ragged=config.drop_ragged,
        before_optimizer=getattr(source.loader, "before_optimizer", None),
        documents=dict(earlier.documents) if earlier is not None else {},
        keep_gradients=keeps_gradients(config, ranks),
    )


def _kept(
    config: TrainConfig, model: nn.Module, device: torch.device, earlier: Kept | None
) -> tuple[torch.amp.GradScaler | None, WeightAverage | None, Guard]:
    """Return loss scaler, moving average and guard, those of the earlier parts where there are any."""
    scaler = torch.amp.GradScaler(device.type) if config.precision == "fp16" else None
    if earlier is not None:
        # A scaler of its own: the earlier one may have been left between unscaling and step.
        if scaler is not None and earlier.scaler is not None:
            scaler.load_state_dict(earlier.scaler.state_dict())
        return scaler, earlier.average, earlier.guard
    average = WeightAverage(model, config.ema_decay) if config.ema_decay is not None else None
    return scaler, average, Guard(config.guards)


def total_steps(config: TrainConfig, source: BatchSource) -> int:
    """Return the optimizer steps of the whole run, by steps or by epochs (ragged windows count)."""
    per_epoch = source.batches_per_epoch()
    by_epochs = None
    if config.epochs is not None and per_epoch is not None:
        windows = per_epoch / config.accumulation
        by_epochs = config.epochs * (math.floor(windows) if config.drop_ragged else math.ceil(windows))
    limits = [limit for limit in (config.steps, by_epochs) if limit is not None]
    if not limits:
        msg = "epochs is set but the loader has no length: pass --steps N as well"
        raise ConfigError(msg)
    return min(limits)


def steps_from(config: TrainConfig, source: BatchSource, *, regular: int | None, step: int) -> int:
    """Return the optimizer steps of the whole run, counted from a step in the middle of it.

    Args:
        config: The run.
        source: Stands where ``step`` ended; its epoch may have been begun by other ranks.
        regular: Micro-batches of an epoch that these ranks begin.
        step: Steps done.
    """
    if config.epochs is None or regular is None:
        return total_steps(config, source)
    left = 0 if source.ended else max(0, (source.batches_per_epoch() or 0) - source.taken)
    later = max(0, config.epochs - source.epoch - 1)
    whole = math.floor if config.drop_ragged else math.ceil
    by_epochs = step + whole(left / config.accumulation) + later * whole(regular / config.accumulation)
    return by_epochs if config.steps is None else min(config.steps, by_epochs)


def total_or_none(config: TrainConfig, source: BatchSource) -> int | None:
    """Return the optimizer steps of the whole run where they can be known."""
    try:
        return total_steps(config, source)
    except ConfigError:
        return config.steps
