"""What makes two steps the same graph: shapes, dtypes, devices and constants of the batch, and modes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loongforge_fuse.fusion.packing import PackedLayout
from loongforge_fuse.protocol import Batch

Path = tuple[str | int, ...]

_CONSTANTS = (bool, int, float, complex, type(None), torch.dtype, torch.device)
_LAYOUT_TENSORS = ("offsets", "segments", "positions")


@dataclass(frozen=True, kw_only=True)
class BatchSignature:
    """A batch split into what a graph reads from buffers and what it bakes in.

    Attributes:
        key: Hashable description; equal keys may share a graph.
        tensors: Path -> tensor, in a fixed order.
        dropped: Paths of values a graph cannot hold (texts and other host objects per sample); they are
            left out of the batch the graph sees, and a model that asks for one fails the capture visibly.
    """

    key: tuple[Hashable, ...]
    tensors: Mapping[Path, Tensor]
    dropped: tuple[Path, ...]


class DroppedValueError(RuntimeError):
    """A pass being recorded asked for a value of the batch that a graph cannot hold."""


class StaticBatch(dict[str, object]):
    """The batch a recording sees: asking for a value that was left out raises, whichever way it is asked.

    Without that, ``batch.get(name)`` would make a model take another branch in its graph than in eager
    passes.

    Args:
        values: Path-free values of this level.
        dropped: Names left out on this level.
    """

    def __init__(self, values: Mapping[str, object], dropped: frozenset[str]) -> None:
        super().__init__(values)
        self.dropped = dropped

    def _refuse(self, name: object) -> None:
        if name in self.dropped:
            message = (
                f"batch['{name}'] holds host objects that change from step to step and cannot be part of a "
                "graph; turn it into a tensor, or keep the model from reading it"
            )
            raise DroppedValueError(message)

    def __missing__(self, name: str) -> object:
        self._refuse(name)
        raise KeyError(name)

    def get(self, name: str, default: object = None) -> object:
        """Return a value, or ``default`` for a name the original batch does not have either."""
        self._refuse(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._refuse(name)
        return super().__contains__(name)


def describe(batch: Batch) -> BatchSignature:
    """Split a batch. Strides are not part of the key: buffers are contiguous and copies honour any stride.

    Numbers, and lists of numbers, are constants of the graph and part of its key. A packed layout counts by
    its sizes alone, since its tensors are read from buffers.
    """
    tensors: dict[Path, Tensor] = {}
    parts: list[Hashable] = []
    dropped: list[Path] = []

    # What a layout's lengths were read from is as variable as they are.
    host_only = {v.source for v in batch.values() if isinstance(v, PackedLayout)}

    def visit(path: Path, value: object) -> None:
        if len(path) == 1 and path[0] in host_only:
            dropped.append(path)
            parts.append((path, "dropped"))
        elif isinstance(value, Tensor):
            tensors[path] = value
            parts.append((path, "tensor", tuple(value.shape), value.dtype, value.device, value.requires_grad))
        elif isinstance(value, PackedLayout):
            parts.append((path, "packed", value.sequences, value.total, value.longest, value.filled > 0))
            for name in _LAYOUT_TENSORS:
                visit((*path, name), getattr(value, name))
        elif isinstance(value, Mapping):
            parts.append((path, "mapping", tuple(map(str, value))))
            for name, item in value.items():
                visit((*path, str(name)), item)
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Tensor) for item in value):
            parts.append((path, type(value).__name__, len(value)))
            for index, item in enumerate(value):
                visit((*path, index), item)
        elif is_constant(value):
            # By their text: 1, 1.0 and True are equal and compute differently; nan is not equal to itself.
            parts.append((path, "constant", type(value).__name__, repr(value)))
        else:
            dropped.append(path)
            parts.append((path, "dropped"))

    for name, value in batch.items():
        visit((str(name),), value)
    return BatchSignature(key=tuple(parts), tensors=tensors, dropped=tuple(dropped))


def is_constant(value: object) -> bool:
    """Whether a value is a number, None, a dtype or device, or a list of such, to any depth."""
    if isinstance(value, list | tuple):
        return all(is_constant(item) for item in value)
    return isinstance(value, _CONSTANTS)


def static_copy(batch: Batch, buffers: Mapping[Path, Tensor], *, guarded: bool = True) -> dict[str, object]:
    """Return the batch with every tensor replaced by its buffer and values a graph cannot hold left out.

    Args:
        batch: The batch.
        buffers: Path -> buffer of every tensor.
        guarded: Asking for a value that was left out raises. Off for a compiled model, which looks at the
            type of its arguments and would compile once more, amid the capture.
    """
    host_only = {v.source for v in batch.values() if isinstance(v, PackedLayout)}

    def rebuild(path: Path, value: object) -> object:
        if path in buffers:
            return buffers[path]
        if len(path) == 1 and path[0] in host_only:
            return _DROPPED
        if isinstance(value, PackedLayout):
            return value.on_device(*(buffers[(*path, name)] for name in _LAYOUT_TENSORS))
        if isinstance(value, Mapping):
            return level(path, value)
        if isinstance(value, list | tuple) and value and all(isinstance(item, Tensor) for item in value):
            return type(value)(rebuild((*path, i), v) for i, v in enumerate(value))
        return value if is_constant(value) else _DROPPED

    def level(path: Path, values: Mapping[str, object]) -> dict[str, object]:
        rebuilt = {str(name): rebuild((*path, str(name)), value) for name, value in values.items()}
        kept = {name: value for name, value in rebuilt.items() if value is not _DROPPED}
        return StaticBatch(kept, frozenset(rebuilt) - frozenset(kept)) if guarded else kept

    return level((), batch)


_DROPPED = object()
