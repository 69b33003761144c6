"""Recomputing blocks in backward, chosen by name and undone again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Recompute = Literal["none", "selective", "full"]
MODES: tuple[Recompute, ...] = ("none", "selective", "full")


def find_blocks(model: torch.nn.Module) -> list[str]:
    """Return the names of the repeated blocks: the children of one class in a ModuleList or Sequential.

    Only the outermost repetition counts, and only blocks with a trainable parameter: frozen blocks that run
    without gradients save nothing.
    """
    import torch

    found: list[str] = []
    for name, module in model.named_modules():
        if any(name == f or name.startswith(f + ".") for f in found):
            continue
        if not isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) or len(module) < 2:
            continue
        first = type(module[0])
        if all(type(child) is first and next(child.children(), None) is not None for child in module):
            found += [
                f"{name}.{index}" if name else str(index)
                for index, child in enumerate(module)
                if any(p.requires_grad for p in child.parameters())
            ]
    return found


class RecomputeHandle:
    """Undoes :func:`apply_recompute`."""

    def __init__(self, undo: list[Callable[[], None]]) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Restore the forward functions."""
        while self._undo:
            self._undo.pop()()


def apply_recompute(
    model: torch.nn.Module, names: Sequence[str], mode: Recompute = "full"
) -> RecomputeHandle:
    """Make the named modules recompute their inside in backward.

    Args:
        model: owner of the modules.
        names: module names as in ``model.named_modules()``.
        mode: ``"full"`` keeps a block's inputs only; ``"selective"`` also keeps the results of matrix
            products and attention, so only cheap operators run twice; ``"none"`` does nothing.

    Raises:
        ValueError: unknown mode or module name.
    """
    if mode not in MODES:
        msg = f"mode is {mode!r}; allowed: {MODES}"
        raise ValueError(msg)
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        msg = f"modules {unknown} are not in the model; see find_blocks(model)"
        raise ValueError(msg)
    undo: list[Callable[[], None]] = []
    if mode != "none":
        undo.extend(_wrap(modules[name], mode) for name in names)
    return RecomputeHandle(undo)


def _wrap(module: torch.nn.Module, mode: Recompute) -> Callable[[], None]:
    import torch
    from torch.utils.checkpoint import checkpoint

    inner = module.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = _selective_contexts

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, **options, **kwargs)

    module.forward = forward

    def undo() -> None:
        module.__dict__.pop("forward", None)

    return undo


def _selective_contexts() -> tuple[Any, Any]:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(context: object, operator: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    name = str(operator)
    expensive = any(
        part in name for part in ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "scaled_dot_product")
    )
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE
