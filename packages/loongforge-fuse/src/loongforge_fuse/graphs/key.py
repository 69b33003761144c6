"""What makes two steps the same graph: shapes, dtypes, devices and constants of the batch, and modes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from loongforge_fuse.protocol import Batch

_CONSTANTS = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, kw_only=True)
class BatchSignature:
    """A batch split into what a graph reads from buffers and what it bakes in.

    Attributes:
        key: Hashable description; equal keys may share a graph.
        tensors: Path -> tensor, in a fixed order.
        dropped: Paths of values a graph cannot hold (texts and other host objects per sample); they are
            left out of the batch the graph sees, so that a model that needs one fails the capture visibly.
    """

    key: tuple[Hashable, ...]
    tensors: Mapping[tuple[str | int, ...], Tensor]
    dropped: tuple[tuple[str | int, ...], ...]


def describe(batch: Batch) -> BatchSignature:
    """Split a batch. Strides are not part of the key: buffers are contiguous and copies honour any stride."""
    tensors: dict[tuple[str | int, ...], Tensor] = {}
    parts: list[Hashable] = []
    dropped: list[tuple[str | int, ...]] = []

    def visit(path: tuple[str | int, ...], value: object) -> None:
        if isinstance(value, Tensor):
            tensors[path] = value
            parts.append((path, "tensor", tuple(value.shape), value.dtype, value.device, value.requires_grad))
        elif isinstance(value, Mapping):
            parts.append((path, "mapping", tuple(map(str, value))))
            for name, item in value.items():
                visit((*path, str(name)), item)
        elif isinstance(value, list | tuple) and all(isinstance(item, Tensor) for item in value):
            parts.append((path, type(value).__name__, len(value)))
            for index, item in enumerate(value):
                visit((*path, index), item)
        elif isinstance(value, _CONSTANTS) and not isinstance(value, str | bytes):
            parts.append((path, "constant", value))
        else:
            dropped.append(path)
            parts.append((path, "dropped"))

    for name, value in batch.items():
        visit((str(name),), value)
    return BatchSignature(key=tuple(parts), tensors=tensors, dropped=tuple(dropped))


def static_copy(batch: Batch, buffers: Mapping[tuple[str | int, ...], Tensor]) -> dict[str, object]:
    """Return the batch with every tensor replaced by its buffer and values a graph cannot hold left out."""

    def rebuild(path: tuple[str | int, ...], value: object) -> object:
        if path in buffers:
            return buffers[path]
        if isinstance(value, Mapping):
            items = {str(n): rebuild((*path, str(n)), v) for n, v in value.items()}
            return {n: v for n, v in items.items() if v is not _DROPPED}
        if isinstance(value, list | tuple) and all(isinstance(item, Tensor) for item in value):
            return type(value)(rebuild((*path, i), v) for i, v in enumerate(value))
        if isinstance(value, _CONSTANTS) and not isinstance(value, str | bytes):
            return value
        return _DROPPED

    rebuilt = {str(name): rebuild((str(name),), value) for name, value in batch.items()}
    return {name: value for name, value in rebuilt.items() if value is not _DROPPED}


_DROPPED = object()
