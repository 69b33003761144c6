"""Parallel strategies: one rank, DDP-like (our scheduler or stock DDP), ZeRO-1, FSDP2 and HSDP.

Each says which module the forward calls, how gradients come together, and how model and optimizer state are
collected under the model's own parameter names, so that a checkpoint does not depend on the strategy.
"""

from __future__ import annotations

from torch import nn

from loongforge.config import SHARDED, TrainConfig
from loongforge.errors import ConfigError
from loongforge.parallel.protocol import Groups, Parallel
from loongforge.parallel.replicated import Scheduled, Single, StockDDP, Zero1
from loongforge.parallel.sharded import Sharded
from loongforge.ranks import Ranks

__all__ = ["Groups", "Parallel", "Scheduled", "Sharded", "Single", "StockDDP", "Zero1", "build_parallel"]


def build_parallel(model: nn.Module, module: nn.Module, ranks: Ranks, config: TrainConfig) -> Parallel:
    """Return the strategy the configuration asks for; on one rank every strategy is :class:`Single`."""
    if ranks.world_size == 1:
        return Single(model, module, ranks)
    if config.strategy in SHARDED:
        if config.precision == "fp16":
            msg = "precision fp16 with a sharded strategy: allowed are fp32 and bf16 (no sharded scaler)"
            raise ConfigError(msg)
        return Sharded(model, module, ranks, config)
    base = (
        StockDDP(model, module, ranks)
        if config.pillars.comm == "off"
        else Scheduled(model, module, ranks, config)
    )
    return Zero1(base) if config.strategy == "zero1" else base  # type: ignore[return-value]
