"""Strategies that keep whole weights on every rank: one rank, DDP (ours or torch's), and ZeRO-1."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from loongforge.config import TrainConfig
from loongforge.errors import CheckpointError, ConfigError, require
from loongforge.optim import build_optimizer, load_named_state, named_state, optimizer_settings
from loongforge.parallel.protocol import Groups
from loongforge.parallel.tensors import clip_gradients
from loongforge.pillars import numeric
from loongforge.ranks import Ranks


class Single:
    """One rank: stock PyTorch, and the base of the strategies that keep whole weights on every rank."""

    deferred = False
    sharded = False

    def __init__(self, model: nn.Module, module: nn.Module, ranks: Ranks) -> None:
        self.model = model
        self.module = module
        self.ranks = ranks

    def no_sync(self) -> AbstractContextManager[object]:
        """Return a context in which gradients only accumulate."""
        return nullcontext()

    def finish(self) -> None:
        """Bring gradients together where the backward has not done so."""

    def check(self) -> None:
        """Raise when a rank was lost since."""

    def step_end(self, step: int) -> None:
        """Border between two steps."""

    def clip(self, limit: float | None) -> Tensor:
        """Return the global gradient norm and scale gradients down to ``limit``."""
        return clip_gradients(self.model, limit, self.ranks.device)

    def stats(self) -> dict[str, float]:
        """Return the communication counters."""
        return {}

    def switch(self, strategy: str) -> None:
        """Refuse: there is nothing to switch."""
        msg = f"strategy {strategy!r} asked for, but the gradient scheduler is off or there is one rank"
        raise ConfigError(msg)

    def optimizer(self, groups: Groups, config: TrainConfig) -> Optimizer:
        """Build the optimizer that fits the strategy."""
        return build_optimizer(groups, config, self.ranks.device)

    def model_state(self) -> dict[str, Tensor]:
        """Return the whole state dict (on rank 0; may be empty elsewhere)."""
        return dict(self.model.state_dict())

    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a whole state dict strictly, in place (addresses stay, fault F16)."""
        outcome = self.model.load_state_dict(dict(state), strict=False)
        if outcome.missing_keys or outcome.unexpected_keys:
            message = (
                f"weights do not fit the model: not in the checkpoint {outcome.missing_keys[:8]}; "
                f"only in the checkpoint {outcome.unexpected_keys[:8]}"
            )
            raise CheckpointError(message)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, object]:
        """Return the optimizer's state by parameter name (on rank 0)."""
        return named_state(optimizer, self.model)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, object]) -> None:
        """Restore the optimizer's state by parameter name."""
        load_named_state(optimizer, self.model, state)

    def gather(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state as it is: every rank has all of it."""
        return dict(state)

    def make_moments(self, optimizer: Optimizer) -> None:
        """Nothing to do: state is loaded by name, not in place."""

    def plans(self) -> dict[str, str]:
        """Return what the communication pillar wants in the checkpoint: file name -> JSON text."""
        return {}

    def load_plans(self, plans: Mapping[str, str]) -> None:
        """Take over stored plans."""

    def close(self) -> None:
        """Release groups and hooks."""


class StockDDP(Single):
    """torch's DistributedDataParallel, unchanged: what ``--comm off`` restores."""

    def __init__(self, model: nn.Module, module: nn.Module, ranks: Ranks) -> None:
        super().__init__(model, module, ranks)
        devices = [ranks.device.index] if ranks.device.type == "cuda" else None
        self._ddp = nn.parallel.DistributedDataParallel(
            module, device_ids=devices, find_unused_parameters=True
        )
        self.module = self._ddp

    def no_sync(self) -> AbstractContextManager[object]:
        """Return DDP's own context."""
        return self._ddp.no_sync()


class Scheduled(Single):
    """DDP-like through ``loongforge_comm.GradientScheduler``."""

    def __init__(self, model: nn.Module, module: nn.Module, ranks: Ranks, config: TrainConfig) -> None:
        super().__init__(model, module, ranks)
        comm = require("loongforge_comm", "loongforge-comm", "use stock DDP (--comm off)")
        self.deferred = config.pillars.graph
        elastic = config.elastic
        beats = (elastic.heartbeat_interval_s, elastic.heartbeat_s) if elastic.enabled else (1.0, 10.0)
        settings = comm.SchedulerConfig(  # type: ignore[attr-defined]
            strategy=config.pillars.comm,
            heartbeat_interval_s=beats[0],
            heartbeat_timeout_s=beats[1],
            rebuild_interval=config.pillars.comm_rebuild_interval,
            group_overrides=_overrides(config, ranks),
        )
        self._scheduler = comm.GradientScheduler(module, config=settings)  # type: ignore[attr-defined]

    def no_sync(self) -> AbstractContextManager[object]:
        """Return the scheduler's context."""
        return self._scheduler.no_sync()

    def finish(self) -> None:
        """Reduce existing gradients after a window that was replayed from a graph."""
        if self.deferred:
            self._scheduler.reduce_now()

    def check(self) -> None:
        """Ask the scheduler, whose heartbeats may have given up on a rank."""
        self._scheduler.check()

    def step_end(self, step: int) -> None:
        """Let the scheduler rebuild its plan, answer heartbeats, or switch."""
        self._scheduler.step_end(step)

    def stats(self) -> dict[str, float]:
        """Return the scheduler's numeric counters."""
        return numeric(self._scheduler.stats())

    def switch(self, strategy: str) -> None:
        """Switch the strategy; called on all ranks at the same step border."""
        self._scheduler.switch_strategy(strategy)

    def plans(self) -> dict[str, str]:
        """Return the scheduler's state (plan and dependency graph) as JSON."""
        return {"comm_plan.json": json.dumps(self._scheduler.state_dict())}

    def load_plans(self, plans: Mapping[str, str]) -> None:
        """Restore the scheduler's state, so that a resume analyses nothing again."""
        if "comm_plan.json" in plans:
            self._scheduler.load_state_dict(json.loads(plans["comm_plan.json"]), on_mismatch="replan")

    def close(self) -> None:
        """Remove the hooks."""
        self._scheduler.close()


class Zero1:
    """Optimizer state split over ranks by torch's ZeroRedundancyOptimizer.

    Gradients come together as ``base`` does it.
    """

    sharded = False

    def __init__(self, base: Single) -> None:
        self._base = base
        self.deferred = base.deferred
        self.model = base.model
        self.module = base.module

    def __getattr__(self, name: str) -> object:
        return getattr(self._base, name)

    def optimizer(self, groups: Groups, config: TrainConfig) -> Optimizer:
        """Build AdamW behind ZeroRedundancyOptimizer."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        settings = optimizer_settings(config, self._base.ranks.device)
        plain = [{**group, "params": list(group["params"])} for group in groups]  # type: ignore[call-overload]
        return ZeroRedundancyOptimizer(plain, optimizer_class=AdamW, **settings)  # type: ignore[arg-type]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, object]:
        """Bring all shards to rank 0 (a collective) and name them."""
        optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined]
        if self._base.ranks.rank != 0:
            return {}
        return named_state(optimizer, self.model, state_dict=optimizer.state_dict())


def _overrides(config: TrainConfig, ranks: Ranks) -> Path | None:
    """Write the configured group overrides where the scheduler of every rank reads them."""
    if not config.pillars.comm_groups:
        return None
    import yaml

    path = Path(config.output) / "comm_groups.yaml"
    if ranks.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(dict(config.pillars.comm_groups)))
    ranks.barrier()
    return path
