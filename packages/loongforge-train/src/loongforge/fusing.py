"""The fuse pillar as a window runner: eager, fused, or replayed from CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from loongforge.batches import Backward
from loongforge.config import SHARDED, TrainConfig
from loongforge.engine import AUTOCAST
from loongforge.errors import ConfigError, require
from loongforge.filling import WindowFiller, cut
from loongforge.ranks import Ranks
from loongforge.staging import AheadPlan
from loongforge.window import EagerWindow, Outcome, Sync, WindowRunner

log = logging.getLogger("loongforge")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FusedWindow:
    """``loongforge_fuse.MicroBatchFuser``, with a graph runner as its executor when graphs are on.

    A replay holds forward and backward, so no backward of our own can run inside it: with graphs the fuser's
    own is used, and gradients are brought together after the window.

    Args:
        fuser: The fuser.
        graph: Whether its executor replays graphs.
        filler: Brings an epoch's last window to the size of the others; None leaves it as it is.
    """

    def __init__(self, fuser: WindowRunner, *, graph: bool, filler: WindowFiller | None = None) -> None:
        self.fuser = fuser
        self._graph = graph
        self._filler = filler

    def run(
        self,
        window: Sequence[Mapping[str, object]],
        *,
        backward: Backward | None = None,
        divisor: float | None = None,
        sync: Sync | None = None,
    ) -> Outcome:
        """Run forward and backward of the window; the batches already hold the model's draws."""
        chosen = None if self._graph else backward
        real, filled = len(window), 0
        # Without a divisor every sample weighs something, so none can be added.
        if self._filler is not None and divisor is not None:
            window, filled = self._filler.fill(window)
        outcome = self.fuser.run(window, backward=chosen, divisor=divisor, sync=sync, drawn=True)  # type: ignore[call-arg]
        return cut(outcome, real, filled) if filled else outcome


def build_runner(
    config: TrainConfig,
    module: nn.Module,
    ranks: Ranks,
    *,
    scaler: torch.amp.GradScaler | None = None,
    foreign_hooks: bool = False,
    counts: bool = True,
) -> WindowRunner:
    """Return the window runner the configuration asks for.

    Args:
        config: The run.
        module: What the forward calls.
        ranks: Agrees about group sizes when there are several.
        scaler: Loss scaler of an fp16 run; a replay multiplies by its scale.
        foreign_hooks: The model had hooks of its own before the pillars put theirs on; fusion then refuses,
            because such hooks would see fewer, larger calls.
        counts: The model knows its valid elements before the forward; otherwise every micro-batch's mean
            weighs the same, as without fusion.
    """
    graph = config.pillars.graph
    if graph and ranks.world_size > 1 and config.strategy in SHARDED:
        log.info(
            "graph: strategy %s gathers weights anew for every layer; passes run eagerly", config.strategy
        )
        graph = False
    if config.pillars.fuse == "off" and not graph:
        return EagerWindow(module)
    if graph and ranks.world_size > 1 and config.pillars.comm == "off":
        msg = (
            "graph is on and comm is off: stock DDP cannot follow a replay; use --comm hybrid, or --no-graph"
        )
        raise ConfigError(msg)
    fuse = require(
        "loongforge_fuse", "loongforge-fuse", "switch fusion and graphs off (--fuse off --no-graph)"
    )
    settings = fuse.FusionConfig(  # type: ignore[attr-defined]
        fusion_batch_size=1 if config.pillars.fuse == "off" else config.pillars.fuse,
        accumulation_steps=config.accumulation,
        hooks="refuse" if foreign_hooks else "allow",
        normalize="elements" if counts else "mean_of_means",
    )
    executor = None
    if graph:
        graphs = fuse.GraphConfig(  # type: ignore[attr-defined]
            hooks="refuse" if foreign_hooks else "allow",
            gradients="accumulate" if keeps_gradients(config, ranks) else "overwrite",
            zero_in_graph=not keeps_gradients(config, ranks),
            weight_gradients="beside" if config.pillars.late_weight_gradients else "in_line",
        )
        executor = fuse.GraphRunner(module, graphs, scaler=scaler)  # type: ignore[attr-defined]

    def agree(values: tuple[int, ...]) -> tuple[int, ...]:
        rows = ranks.gather([float(value) for value in values])
        return tuple(int(max(column)) for column in zip(*rows, strict=True))

    fuser = fuse.MicroBatchFuser(  # type: ignore[attr-defined]
        module, settings, executor=executor, agree=agree if ranks.world_size > 1 else None
    )
    fill = graph and config.pillars.fill_windows
    filler = (
        WindowFiller(module, batch_size=config.batch_size, accumulation=config.accumulation) if fill else None
    )
    return FusedWindow(fuser, graph=graph, filler=filler)


def keeps_gradients(config: TrainConfig, ranks: Ranks) -> bool:
    """Whether gradients stay the same tensors over all steps.

    Whoever reduces gradients after a replay knows their addresses. On one rank a replay may write fresh ones,
    which saves clearing them and adding to them: three passes over all gradients.
    """
    return config.pillars.graph and ranks.world_size > 1


def plan_ahead(config: TrainConfig, model: nn.Module, ranks: Ranks) -> AheadPlan | None:
    """Return how the frozen part of coming windows runs beside the present step, or None (logged) where not.

    Call it before any pillar puts hooks on the model. A replay ends the need for the host, so that the GPU
    works on both at once; without graphs both would wait for the same host.
    """
    pillars, reason = config.pillars, None
    if not pillars.frozen_ahead:
        reason = "pillars.frozen_ahead is off"
    elif not pillars.graph:
        reason = "pillars.graph is off"
    elif pillars.data != "on" or not pillars.device_prefetch:
        reason = "batches are not copied ahead (pillars.data, pillars.device_prefetch)"
    elif ranks.device.type != "cuda":
        reason = f"the device is {ranks.device.type}"
    elif config.strategy in SHARDED:
        reason = f"strategy {config.strategy} gathers weights by hooks of the step itself"
    if reason is not None:
        log.debug("the frozen part stays in its step: %s", reason)
        return None
    fuse = require("loongforge_fuse", "loongforge-fuse", "use --no-graph")
    ahead = fuse.FrozenAhead(  # type: ignore[attr-defined]
        model,
        autocast=AUTOCAST[config.precision],
        hooks="refuse" if has_hooks(model) else "allow",
        split=True,
    )
    if ahead.reason is not None:
        log.info("the frozen part stays in its step: %s", ahead.reason)
        return None
    group = {"off": 1, "auto": config.accumulation}.get(str(pillars.fuse), pillars.fuse)
    return AheadPlan(ahead=ahead, group=min(int(group), config.accumulation))


def has_hooks(model: nn.Module) -> bool:
    """Tell whether any module of the model has hooks."""
    return any(getattr(module, table, None) for module in model.modules() for table in _HOOKS)


def patch_operators(model: nn.Module) -> object:
    """Replace modules by fused operators where the fuse pillar has a checked one; returns its report."""
    fuse = require("loongforge_fuse", "loongforge-fuse", "switch fused operators off (--no-fused-ops)")
    return fuse.apply_fused_ops(model, policy="auto")  # type: ignore[attr-defined]
