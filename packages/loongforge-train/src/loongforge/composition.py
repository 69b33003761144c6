"""Composes model, pillars, data and optimizer into the parts of a training step."""

from __future__ import annotations

import math
from collections.abc import Callable

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
    """
    memory = memory or build_memory(config.pillars, ranks.device)
    with memory.persistent():
        model.to(ranks.device)
    foreign_hooks = has_hooks(model)
    if config.pillars.fused_ops:
        patch_operators(model)
    called = module if module is not None else model
    if config.compile:
        called = torch.compile(called)  # type: ignore[assignment]
    parallel = build_parallel(model, called, ranks, config)
    if optimizer is None:
        optimizer = parallel.optimizer(groups(model, config.weight_decay), config)
    if schedule is None:
        schedule = build_schedule(optimizer, config, total_steps(config, source))
    memory.attach(model, optimizer)
    device = ranks.device
    scaler = torch.amp.GradScaler(device.type) if config.precision == "fp16" else None
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
        guard=Guard(config.guards),
        accumulation=config.accumulation,
        seed=config.seed,
        clip_norm=config.clip_norm,
        autocast=AUTOCAST[config.precision],
        scaler=scaler,
        average=WeightAverage(model, config.ema_decay) if config.ema_decay is not None else None,
        drop_ragged=config.drop_ragged,
        before_optimizer=getattr(source.loader, "before_optimizer", None),
        keep_gradients=keeps_gradients(config, ranks),
    )


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


def total_or_none(config: TrainConfig, source: BatchSource) -> int | None:
    """Return the optimizer steps of the whole run where they can be known."""
    try:
        return total_steps(config, source)
    except ConfigError:
        return config.steps
