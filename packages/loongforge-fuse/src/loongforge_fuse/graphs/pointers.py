"""Where a model's weights lie: a graph computes with addresses, so moved weights make it stale."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch._dynamo import OptimizedModule

from loongforge_fuse.fusion.refusal import HOOK_TABLES


@dataclass(frozen=True, kw_only=True)
class PointerSnapshot:
    """Modules, addresses and modes of a model at one moment."""

    children: tuple[int, ...]
    addresses: tuple[int, ...]
    frozen: tuple[bool, ...]
    training: tuple[bool, ...]


class ModelPointers:
    """Takes and compares snapshots of a model.

    Parameters and submodules are looked up anew each time, since ``load_state_dict(assign=True)`` replaces
    parameters and adapters replace modules. Tensors that are neither parameters nor buffers are not seen.
    Cost: about 0.2 us per tensor and module.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())

    def snapshot(self) -> PointerSnapshot:
        """Return the present modules, addresses, trainability and training modes."""
        children: list[int] = []
        addresses: list[int] = []
        frozen: list[bool] = []
        for module in self._modules:
            children.extend(map(id, module._modules.values()))  # noqa: SLF001
            for table in (module._parameters, module._buffers):  # noqa: SLF001
                for tensor in table.values():
                    if tensor is not None:
                        addresses.append(tensor.data_ptr())
                        frozen.append(not tensor.requires_grad)
        return PointerSnapshot(
            children=tuple(children),
            addresses=tuple(addresses),
            frozen=tuple(frozen),
            training=tuple(module.training for module in self._modules),
        )

    def versions(self) -> tuple[int, ...]:
        """Return a number per tensor that grows with every change of its values in place."""
        return tuple(
            tensor._version  # noqa: SLF001 - the only sign of such a change
            for module in self._modules
            for table in (module._parameters, module._buffers)  # noqa: SLF001
            for tensor in table.values()
            if tensor is not None
        )

    def hooked(self) -> bool:
        """Whether any module has hooks."""
        return any(getattr(module, table) for module in self._modules for table in HOOK_TABLES)

    def compiled(self) -> bool:
        """Whether any module is compiled as a whole."""
        return any(
            isinstance(module, OptimizedModule) or module._compiled_call_impl is not None  # noqa: SLF001
            for module in self._modules
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
        if now.frozen != old.frozen:
            return "requires_grad"
        return "mode" if now.training != old.training else None

    def walk(self, model: nn.Module) -> None:
        """Take in modules that came or went."""
        self._modules = list(model.modules())
