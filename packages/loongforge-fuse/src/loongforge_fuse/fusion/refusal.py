"""What in a model forbids fusing: found by looking at its modules, once per state of the model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from loongforge_fuse.fusion.reasons import RefusalReason
from loongforge_fuse.protocol import unwrap
from loongforge_fuse.tree import HOOK_TABLES, ModuleTree

_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)  # noqa: SLF001 - the only common base of the family
_CAPACITY_NAMES = ("capacity_factor", "moe_capacity_factor", "expert_capacity", "train_capacity_factor")


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


class ModelInspection:
    """The same answer without the walk while the model stays as it is.

    A model is walked again when submodules, training modes or hooks changed, when a module has more or fewer
    attributes, and when one of the attributes that declare something has another value.

    Args:
        model: The model; wrappers are looked through.
        hooks: As in :func:`inspect_model`.
    """

    def __init__(self, model: nn.Module, *, hooks: str = "refuse") -> None:
        self._model, self._hooks = model, hooks
        self._tree: ModuleTree | None = None
        self._declaring: list[tuple[nn.Module, str]] = []
        self._norms: list[nn.modules.batchnorm._BatchNorm] = []
        self._known: tuple[object, ...] | None = None
        self._found: Refusal | None = None
        self.walks = 0

    def refusal(self) -> Refusal | None:
        """Return the first reason in the module tree that forbids fusing, or None."""
        if self._tree is None or self._state(self._tree) != self._known:
            self._walk()
        return self._found

    def _walk(self) -> None:
        self.walks += 1
        self._tree = ModuleTree(unwrap(self._model))
        self._declaring = [
            (module, name)
            for module in self._tree.modules
            for name in ("fusion_unsafe", *_CAPACITY_NAMES)
            if hasattr(module, name)
        ]
        self._norms = [module for module in self._tree.modules if isinstance(module, _BATCH_NORMS)]
        self._known = self._state(self._tree)
        self._found = inspect_model(self._model, hooks=self._hooks)

    def _state(self, tree: ModuleTree) -> tuple[object, ...]:
        return (
            id(unwrap(self._model)),
            tree.children(),
            tree.training(),
            tree.attributes(),
            tree.hooked(),
            [_plain(getattr(module, name, None)) for module, name in self._declaring],
            [norm.running_mean is None for norm in self._norms],
        )


def _plain(value: object) -> object:
    """Return a value that can be compared: itself, or who it is."""
    return value if isinstance(value, str | int | float) else id(value)
