"""FSDP2 and HSDP: weights, gradients and moments split over the ranks by torch's ``fully_shard``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from loongforge.config import TrainConfig
from loongforge.errors import ConfigError
from loongforge.optim import build_optimizer
from loongforge.parallel.protocol import Groups
from loongforge.parallel.tensors import clip_gradients, whole
from loongforge.ranks import Ranks


class Sharded:
    """FSDP2 (``fully_shard``), or HSDP when the mesh has a replicate dimension."""

    deferred = False
    sharded = True

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
        policy = MixedPrecisionPolicy(
            param_dtype=kinds,
            reduce_dtype=torch.float32 if kinds else None,
            # The autocast around the window casts where an operator wants it. Casting inputs would round
            # what is no activation: flow times, crop offsets, noise, targets.
            cast_forward_inputs=False,
        )
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

    def check(self) -> None:
        """Do nothing: a lost rank takes its shard along, so the run ends with it."""

    def step_end(self, step: int) -> None:
        """Nothing happens at the border."""

    def clip(self, limit: float | None) -> Tensor:
        """Return the global norm over all shards and scale gradients down to ``limit``."""
        return clip_gradients(self.model, limit, self.ranks.device)

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
        self.make_moments(optimizer)
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(self.model, optimizer, plain, options=options)  # type: ignore[arg-type]

    def make_moments(self, optimizer: Optimizer) -> None:
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

    def gather(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather whole tensors, one after the other, in host memory (a collective)."""
        return {name: whole(value).cpu() for name, value in state.items()}

    def plans(self) -> dict[str, str]:
        """Return nothing: there is no plan."""
        return {}

    def load_plans(self, plans: Mapping[str, str]) -> None:
        """Ignore plans of a replicated run."""

    def close(self) -> None:
        """Nothing to release."""


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks: entries of every ModuleList that hold parameters, outermost first."""
    blocks: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            blocks += [entry for entry in module if any(True for _ in entry.parameters())]
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inner]


def _ranks_per_host() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
