"""Where a model's weights lie: a graph computes with addresses, so moved weights make it stale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch._dynamo import OptimizedModule

from loongforge_fuse.tree import ModuleTree, addresses, trains, versions


@dataclass(frozen=True, kw_only=True)
class PointerSnapshot:
    """Modules, addresses and modes of a model at one moment."""

    children: tuple[int, ...]
    addresses: tuple[int, ...]
    trains: tuple[bool, ...]
    training: tuple[bool, ...]


class ModelPointers:
    """Takes and compares snapshots of a model.

    Parameters and submodules are looked up anew each time, since ``load_state_dict(assign=True)`` replaces
    parameters and adapters replace modules. Tensors that are neither parameters nor buffers are not seen.
    Cost: see :class:`~loongforge_fuse.tree.ModuleTree`.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tree = ModuleTree(model)

    def snapshot(self) -> PointerSnapshot:
        """Return the present modules, addresses, trainability and training modes."""
        tensors = self._tree.tensors()
        return PointerSnapshot(
            children=self._tree.children(),
            addresses=addresses(tensors),
            trains=trains(tensors),
            training=self._tree.training(),
        )

    def versions(self) -> tuple[int, ...]:
        """Return a number per tensor that grows with every change of its values in place."""
        return versions(self._tree.tensors())

    def hooked(self) -> bool:
        """Whether any module has hooks."""
        return self._tree.hooked()

    def compiled(self) -> bool:
        """Whether any module is compiled as a whole."""
        return any(
            isinstance(module, OptimizedModule) or module._compiled_call_impl is not None  # noqa: SLF001
            for module in self._tree.modules
        )

    def changed(self, old: PointerSnapshot, now: PointerSnapshot | None = None) -> str | None:
        """Return what changed: ``modules``, ``weights``, ``requires_grad``, ``mode``, or None.

        Args:
            old: An earlier snapshot.
            now: The present one, where it was just taken.
        """
        now = now or self.snapshot()
        if now.children != old.children:
            return "modules"
        if now.addresses != old.addresses:
            return "weights"
        if now.trains != old.trains:
            return "requires_grad"
        return "mode" if now.training != old.training else None

    def walk(self, model: nn.Module) -> None:
        """Take in modules that came or went."""
        self._tree = ModuleTree(model)
