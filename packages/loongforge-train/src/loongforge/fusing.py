"""The fuse pillar as a window runner: eager, fused, or replayed from CUDA graphs."""

from __future__ import annotations

from torch import nn

from loongforge.config import TrainConfig
from loongforge.errors import require
from loongforge.ranks import Ranks
from loongforge.window import EagerWindow, WindowRunner


def build_runner(config: TrainConfig, module: nn.Module, ranks: Ranks) -> WindowRunner:
    """Return the window runner the configuration asks for."""
    if config.pillars.fuse == "off" and not config.pillars.graph:
        return EagerWindow(module)
    fuse = require(
        "loongforge_fuse", "loongforge-fuse", "switch fusion and graphs off (--fuse off --no-graph)"
    )
    size = 1 if config.pillars.fuse == "off" else config.pillars.fuse
    settings = fuse.FusionConfig(fusion_batch_size=size, accumulation_steps=config.accumulation)  # type: ignore[attr-defined]
    executor = None
    if config.pillars.graph and ranks.device.type == "cuda":
        executor = fuse.GraphRunner(module, fuse.GraphConfig())  # type: ignore[attr-defined]

    def agree(values: tuple[int, ...]) -> tuple[int, ...]:
        rows = ranks.gather([float(value) for value in values])
        return tuple(int(max(column)) for column in zip(*rows, strict=True))

    return fuse.MicroBatchFuser(  # type: ignore[attr-defined]
        module, settings, executor=executor, agree=agree if ranks.world_size > 1 else None
    )
