"""What a run needs of GPU memory, and what to switch on so that it fits a budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

from loongforge.errors import ConfigError
from loongforge.recipes.gr00t_n1_6.config import GrootConfig
from loongforge.recipes.gr00t_n1_6.initialise import build_on_meta
from loongforge.recipes.gr00t_n1_6.lora import LoraConfig

GIB = 2.0**30
RESERVE_GIB = 2.0
"""CUDA context, cuBLAS workspaces and allocator slack."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one training step, by what holds them."""

    frozen: int
    trainable: int
    gradients: int
    moments: int
    casts: int
    activations: int

    @property
    def total(self) -> int:
        """Return the sum, without the reserve."""
        return self.frozen + self.trainable + self.gradients + self.moments + self.casts + self.activations

    def table(self) -> dict[str, float]:
        """Return GiB by part and in all (with the reserve)."""
        names = ("frozen", "trainable", "gradients", "moments", "casts", "activations")
        parts = {name: round(getattr(self, name) / GIB, 2) for name in names}
        return {**parts, "total": round(self.total / GIB + RESERVE_GIB, 2)}


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Settings that fit a budget, with the estimate behind them.

    Attributes:
        config: Model configuration.
        lora: Adapters.
        estimate: Expected bytes.
        steps: What was switched on, in order.
    """

    config: GrootConfig
    lora: LoraConfig
    estimate: MemoryEstimate
    steps: tuple[str, ...]


def estimate_memory(
    config: GrootConfig, lora: LoraConfig, *, batch_size: int, tokens: int, live_slots: bool = True
) -> MemoryEstimate:
    """Estimate the memory of a bfloat16 autocast step with AdamW in float32.

    Args:
        config: Model configuration.
        lora: Adapters.
        batch_size: Samples of a micro-batch.
        tokens: Tokens of a row (text and images).
        live_slots: Only one embodiment slot trains.
    """
    model = build_on_meta(config, lora)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    dead = 0
    if live_slots:
        slots = config.head.max_embodiments
        layers = [layer for _, layer in model.action_head.category_layers() if layer.W.requires_grad]
        dead = sum((layer.W.numel() + layer.b.numel()) * (slots - 1) // slots for layer in layers)
    live = trainable - dead
    return MemoryEstimate(
        frozen=2 * frozen + 4 * dead,
        trainable=4 * live,
        gradients=4 * live,
        moments=8 * live,
        # Autocast keeps a 16-bit copy of each float32 matrix until the end of the forward pass.
        casts=2 * live,
        activations=_activations(config, batch_size, tokens),
    )


def _activations(config: GrootConfig, batch: int, tokens: int) -> int:
    """Bytes kept for backward: about 16 widths a token and layer (2 with recomputation), in 16 bits."""
    per_layer = 2 if config.work.recompute else 16
    language_layers = config.language.layers - config.first_trainable_layer
    mlp = 3 * config.language.mlp_size // config.language.hidden_size
    language_row = config.language.hidden_size * (per_layer + (0 if config.work.recompute else mlp))
    language = batch * tokens * language_layers * language_row
    sequence = config.head.action_horizon + 1
    dit = (
        batch
        * sequence
        * config.dit.layers
        * config.dit.width
        * (per_layer + (0 if config.work.recompute else 12))
    )
    # Keys and values of the cross-attention half of the blocks.
    memory = 0 if config.work.recompute else batch * tokens * config.dit.layers // 2 * 2 * config.dit.width
    vision = batch * tokens * 4 * config.vision.mlp_size * 4
    if config.work.offload:
        # One block's worth stays on the device.
        blocks = max(1, language_layers + config.dit.layers)
        return vision + 2 * (language + dit + memory) // blocks
    return 2 * (language + dit + memory) + vision


def plan_memory(
    config: GrootConfig,
    lora: LoraConfig,
    *,
    budget_gb: float,
    batch_size: int,
    tokens: int = 220,
    live_slots: bool = True,
    rank: int = 64,
) -> MemoryPlan:
    """Switch on what makes a run fit ``budget_gb``: drop unused tensors, recompute, offload, adapters.

    Args:
        config: Model configuration as asked for.
        lora: Adapters as asked for.
        budget_gb: GPU memory, GB (GiB).
        batch_size: Samples of a micro-batch.
        tokens: Tokens of a row.
        live_slots: Only one embodiment slot trains.
        rank: Rank of the adapters if they are needed.

    Raises:
        ConfigError: Not even all of them are enough.
    """

    def estimate(config: GrootConfig, lora: LoraConfig) -> MemoryEstimate:
        return estimate_memory(config, lora, batch_size=batch_size, tokens=tokens, live_slots=live_slots)

    def fits(estimate: MemoryEstimate) -> bool:
        return estimate.total / GIB + RESERVE_GIB <= budget_gb

    steps: list[str] = []
    current = estimate(config, lora)
    for name, change in (
        ("drop_unused", {"keep_unused": False}),
        ("recompute", {"recompute": True}),
        ("offload", {"offload": True}),
        ("adapters", {}),
    ):
        if fits(current):
            break
        if change:
            config = replace(config, work=replace(config.work, **change))
        elif lora.rank == 0:
            lora = replace(lora, rank=rank, alpha=float(rank))
        steps.append(name)
        current = estimate(config, lora)
    for slow in ("offload", "recompute"):
        # A later step may have freed so much that an earlier, slower one is not needed after all.
        if slow in steps[:-1]:
            without = replace(config, work=replace(config.work, **{slow: False}))
            if fits(estimate(without, lora)):
                config, current = without, estimate(without, lora)
                steps.remove(slow)
    if not fits(current):
        msg = (
            f"the run needs about {current.table()['total']} GiB with {', '.join(steps)}, the budget is "
            f"{budget_gb} GB; lower batch_size (now {batch_size}), raise memory_budget_gb, or "
            "shard over more GPUs"
        )
        raise ConfigError(msg)
    return MemoryPlan(config=config, lora=lora, estimate=current, steps=tuple(steps))
