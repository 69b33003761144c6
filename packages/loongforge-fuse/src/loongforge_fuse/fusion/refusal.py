"""What in a model forbids fusing: found by looking at its modules, once per model state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from loongforge_fuse.fusion.reasons import RefusalReason
from loongforge_fuse.protocol import unwrap

_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)  # noqa: SLF001 - the only common base of the family
_CAPACITY_NAMES = ("capacity_factor", "moe_capacity_factor", "expert_capacity", "train_capacity_factor")
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """One reason not to fuse.

    Attributes:
        reason: The code.
        detail: Module name and what was found there.
    """

    reason: RefusalReason
    detail: str


def inspect_model(model: nn.Module, *, hooks: str = "refuse") -> Refusal | None:
    """Return the first reason in the module tree that forbids fusing, or None.

    Looks for batch normalisation that uses batch statistics, declared interactions (``fusion_unsafe``),
    expert capacity limits, and module hooks (with ``hooks="refuse"``). Cost: one walk over the modules.
    """
    for name, module in unwrap(model).named_modules():
        where = f"'{name}' ({type(module).__name__})" if name else type(module).__name__
        if isinstance(module, _BATCH_NORMS) and (module.training or module.running_mean is None):
            detail = f"{where} normalises over the batch; put it in eval mode or use GroupNorm/LayerNorm"
            return Refusal(reason=RefusalReason.BATCH_NORM, detail=detail)
        declared = getattr(module, "fusion_unsafe", None)
        if declared:
            return Refusal(reason=RefusalReason.SAMPLES_INTERACT, detail=f"{where} declares: {declared}")
        for attribute in _CAPACITY_NAMES:
            value = getattr(module, attribute, None)
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                detail = f"{where} has {attribute}={value}: which tokens are dropped depends on the batch"
                return Refusal(reason=RefusalReason.MOE_CAPACITY, detail=detail)
        if hooks == "refuse" and any(getattr(module, table, None) for table in HOOK_TABLES):
            detail = f"{where} has module hooks; set hooks='allow' if they may see fewer, larger calls"
            return Refusal(reason=RefusalReason.HOOKS, detail=detail)
    return None
