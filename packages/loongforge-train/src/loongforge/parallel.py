"""Parallel strategies: one rank, DDP-like (our scheduler or stock DDP), ZeRO-1, FSDP2 and HSDP.

Each says which module the forward calls, how gradients come together, and how model and optimizer state are
collected under the model's own parameter names, so that a checkpoint does not depend on the strategy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import AdamW, Optimizer

from loongforge.config import TrainConfig
from loongforge.errors import CheckpointError, ConfigError, require
from loongforge.optim import build_optimizer, load_named_state, named_state, optimizer_settings
from loongforge.pillars import numeric
from loongforge.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

Groups = Sequence[Mapping[str, object]]


class Parallel(Protocol):
    """How ranks work together. ``finish`` is called after the last backward of a step, before clipping."""

    module: nn.Module
    deferred: bool
    """Gradients come together in :meth:`finish`, after the window, instead of beside the last backward."""

    def no_sync(self) -> AbstractContextManager[object]:
        """Return a context in which gradients only accumulate."""
        ...

    def finish(self) -> None:
        """Bring gradients together where the backward has not done so."""
        ...

    def step_end(self, step: int) -> None:
        """Border between two steps."""
        ...

    def clip(self, limit: float | None) -> Tensor:
        """Return the global gradient norm and scale gradients down to ``limit``."""
        ...

    def stats(self) -> dict[str, float]:
        """Return the communication counters."""
        ...

    def switch(self, strategy: str) -> None:
        """Change the communication strategy; on all ranks at the same border."""
        ...

    def optimizer(self, groups: Groups, config: TrainConfig) -> Optimizer:
        """Build the optimizer that fits the strategy."""
        ...

    def model_state(self) -> dict[str, Tensor]:
        """Return whole weights by name on rank 0."""
        ...

    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        """Load whole weights by name."""
        ...

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, object]:
        """Return the optimizer's state by parameter name on rank 0."""
        ...

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, object]) -> None:
        """Restore the optimizer's state by parameter name."""
        ...

    def plans(self) -> dict[str, str]:
        """Return files of the communication pillar: name -> JSON text."""
        ...

    def load_plans(self, plans: Mapping[str, str]) -> None:
        """Take over stored plans."""
        ...

    def close(self) -> None:
        """Release groups and hooks."""
        ...


class Single:
    """One rank: stock PyTorch, and the base of the strategies that keep whole weights on every rank."""

    deferred = False

    def __init__(self, model: nn.Module, module: nn.Module, ranks: Ranks) -> None:
        self.model = model
        self.module = module
        self.ranks = ranks

    def no_sync(self) -> AbstractContextManager[object]:
        """Return a context in which gradients only accumulate."""
        return nullcontext()

    def finish(self) -> None:
        """Bring gradients together where the backward has not done so."""

    def step_end(self, step: int) -> None:
        """Border between two steps."""

    def clip(self, limit: float | None) -> Tensor:
        """Return the global gradient norm and scale gradients down to ``limit``."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.ranks.device)
        norm = get_total_norm(gradients)
        if limit is not None:
            clip_grads_with_norm_(self.model.parameters(), limit, norm)
        return norm

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
        settings = comm.SchedulerConfig(  # type: ignore[attr-defined]
            strategy=config.pillars.comm,
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
        import json

        return {"comm_plan.json": json.dumps(self._scheduler.state_dict())}

    def load_plans(self, plans: Mapping[str, str]) -> None:
        """Restore the scheduler's state, so that a resume analyses nothing again."""
        import json

        if "comm_plan.json" in plans:
            self._scheduler.load_state_dict(json.loads(plans["comm_plan.json"]), on_mismatch="replan")

    def close(self) -> None:
        """Remove the hooks."""
        self._scheduler.close()


class Zero1:
    """Optimizer state split over ranks by torch's ZeroRedundancyOptimizer; gradients as ``base`` brings them
    together.
    """

    deferred = False

    def __init__(self, base: Single) -> None:
        self._base = base
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


class Sharded:
    """FSDP2 (``fully_shard``), or HSDP when the mesh has a replicate dimension."""

    deferred = False

    def __init__(self, model: nn.Module, module: nn.Module, ranks: Ranks, config: TrainConfig) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self.model, self.module, self.ranks = model, module, ranks
        kind = ranks.device.type
        if config.strategy == "hsdp":
            shards = config.hsdp_shards or _ranks_per_host()
            if ranks.world_size % shards:
                message = f"hsdp_shards is {shards}: allowed are divisors of the {ranks.world_size} ranks"
                raise ConfigError(message)
            mesh = init_device_mesh(
                kind, (ranks.world_size // shards, shards), mesh_dim_names=("replicate", "shard")
            )
        else:
            mesh = init_device_mesh(kind, (ranks.world_size,), mesh_dim_names=("shard",))
        kinds = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[config.precision]
        policy = MixedPrecisionPolicy(param_dtype=kinds, reduce_dtype=torch.float32 if kinds else None)
        for block in _blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        self._root = fully_shard(module, mesh=mesh, mp_policy=policy)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients without reducing them."""
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def finish(self) -> None:
        """Nothing is left: the backward reduces."""

    def step_end(self, step: int) -> None:
        """Nothing happens at the border."""

    def clip(self, limit: float | None) -> Tensor:
        """Return the global norm over all shards and scale gradients down to ``limit``."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.ranks.device)
        norm = get_total_norm(gradients)
        whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if limit is not None:
            clip_grads_with_norm_(self.model.parameters(), limit, whole)
        return whole

    def stats(self) -> dict[str, float]:
        """Return nothing: FSDP2 keeps no counters."""
        return {}

    def switch(self, strategy: str) -> None:
        """Refuse: FSDP2 has no strategies to switch."""
        msg = f"strategy {strategy!r} asked for, but fsdp2 and hsdp do their own communication"
        raise ConfigError(msg)

    def optimizer(self, groups: Groups, config: TrainConfig) -> Optimizer:
        """Build AdamW over the shards; the groups must be made after sharding."""
        return build_optimizer(groups, config, self.ranks.device)

    def model_state(self) -> dict[str, Tensor]:
        """Gather whole weights on rank 0 in host memory (a collective)."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return dict(get_model_state_dict(self.model, options=options))  # type: ignore[arg-type]

    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        """Shard a whole state dict over the ranks."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(self.model, dict(state), options=StateDictOptions(full_state_dict=True))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, object]:
        """Gather whole moments on rank 0 in host memory (a collective)."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = dict(get_optimizer_state_dict(self.model, optimizer, options=options))
        return {"format": 1, **state} if self.ranks.rank == 0 else {}

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, object]) -> None:
        """Shard whole moments over the ranks."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        plain = {key: value for key, value in state.items() if key != "format"}
        self._make_moments(optimizer)
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, optimizer, plain, options=options)  # type: ignore[arg-type]

    def _make_moments(self, optimizer: Optimizer) -> None:
        """Create the optimizer's state by a step of rate 0 on zero gradients.

        torch does the same on load, but on uninitialised gradients, whose NaNs can survive in weights and
        moments.
        """
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def plans(self) -> dict[str, str]:
        """Return nothing: there is no plan."""
        return {}

    def load_plans(self, plans: Mapping[str, str]) -> None:
        """Ignore plans of a replicated run."""

    def close(self) -> None:
        """Nothing to release."""


def build_parallel(model: nn.Module, module: nn.Module, ranks: Ranks, config: TrainConfig) -> Parallel:
    """Return the strategy the configuration asks for; on one rank every strategy is :class:`Single`."""
    if ranks.world_size == 1:
        return Single(model, module, ranks)
    if config.strategy in {"fsdp2", "hsdp"}:
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


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks: entries of every ModuleList that hold parameters, outermost first."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            blocks += [entry for entry in module if any(True for _ in entry.parameters())]
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inner]


def _ranks_per_host() -> int:
    import os

    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
