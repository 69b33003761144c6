"""A model's modules and tensors, looked at in one go: what every step must know about its model.

A step asks whether its model is still the one that was looked at before: a model of a thousand modules is
asked thousands of questions. Here each question runs through the whole model without Python code per module.
"""

from __future__ import annotations

from itertools import chain
from operator import attrgetter

from torch import Tensor, nn

HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_training = attrgetter("training")
_trains = attrgetter("requires_grad")
_version = attrgetter("_version")


class ModuleTree:
    """The modules of a model as they were when this was made; what hangs on them is looked up anew each time.

    The tables in which a module keeps children, tensors and hooks are taken to stay the same objects, as they
    do in torch. A question costs 0.02 to 0.1 us per module and tensor.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = modules = list(model.modules())
        self._children = [module._modules for module in modules]  # noqa: SLF001
        self._tensors = [
            table
            for module in modules
            for table in (module._parameters, module._buffers)  # noqa: SLF001
        ]
        self._hooks = [getattr(module, name) for module in modules for name in HOOK_TABLES]
        self._attributes = [vars(module) for module in modules]

    def children(self) -> tuple[int, ...]:
        """Return the identities of all submodules; another tuple means that modules came, went or changed."""
        return tuple(map(id, chain.from_iterable(table.values() for table in self._children if table)))

    def tensors(self) -> list[Tensor]:
        """Return all parameters and buffers, one that is shared as often as it is registered."""
        tables = (table.values() for table in self._tensors if table)
        return [tensor for tensor in chain.from_iterable(tables) if tensor is not None]

    def training(self) -> tuple[bool, ...]:
        """Return the modules' modes."""
        return tuple(map(_training, self.modules))

    def attributes(self) -> tuple[int, ...]:
        """Return the number of attributes of each module."""
        return tuple(map(len, self._attributes))

    def hooked(self) -> bool:
        """Whether any module has hooks."""
        return any(self._hooks)


def addresses(tensors: list[Tensor]) -> tuple[int, ...]:
    """Return where tensors lie."""
    return tuple(map(Tensor.data_ptr, tensors))


def trains(tensors: list[Tensor]) -> tuple[bool, ...]:
    """Return which tensors require gradients."""
    return tuple(map(_trains, tensors))


def versions(tensors: list[Tensor]) -> tuple[int, ...]:
    """Return a number for each tensor that grows with every change of its values in place."""
    return tuple(map(_version, tensors))
