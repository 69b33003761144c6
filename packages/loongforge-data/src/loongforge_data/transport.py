"""Objects in shared memory: pickle in one piece, array bytes beside it, read back without copying.

Layout from a given offset on: int64 count of buffers, int64 length of the pickle, one int64 length per
buffer, then the pickle, then each buffer at a multiple of 64 bytes.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from types import ModuleType

    import torch

Reduced: TypeAlias = "tuple[Callable[..., object], tuple[object, ...]]"

ALIGNMENT = 64


class SlotOverflowError(ValueError):
    """An object does not fit into the rest of a slot."""


def align(offset: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def pack(value: object, target: memoryview, offset: int, reserve: Callable[[int], None] | None = None) -> int:
    """Write an object into ``target`` from ``offset`` on and return the end offset.

    numpy arrays and torch tensors on the CPU travel as raw bytes; everything else is pickled.

    Args:
        value: Anything that pickles.
        target: Writable bytes.
        offset: Where to begin, a multiple of `ALIGNMENT`.
        reserve: Called with the end offset before anything is written.

    Raises:
        SlotOverflowError: It does not fit; the message names both sizes.
    """
    buffers: list[pickle.PickleBuffer] = []
    data = _dumps(value, buffers)
    raws = [buffer.raw() for buffer in buffers]
    head = struct.pack(f"<{2 + len(raws)}q", len(raws), len(data), *(raw.nbytes for raw in raws))
    place = offset + len(head)
    end = place + len(data)
    for raw in raws:
        end = align(end) + raw.nbytes
    if end > len(target):
        msg = f"a batch needs {end} bytes of shared memory, its slot has {len(target)}: use a larger slot_mb"
        raise SlotOverflowError(msg)
    if reserve is not None:
        reserve(end)
    target[offset:place] = head
    target[place : place + len(data)] = data
    cursor = place + len(data)
    for raw in raws:
        cursor = align(cursor)
        target[cursor : cursor + raw.nbytes] = raw
        cursor += raw.nbytes
    return cursor


def unpack(source: memoryview, offset: int) -> object:
    """Read an object back; its arrays are views of ``source``, which they keep alive."""
    count, length = struct.unpack_from("<2q", source, offset)
    sizes = struct.unpack_from(f"<{count}q", source, offset + 16)
    start = offset + 16 + 8 * count
    cursor = start + length
    buffers = []
    for size in sizes:
        cursor = align(cursor)
        buffers.append(source[cursor : cursor + size])
        cursor += size
    return pickle.loads(source[start : start + length], buffers=buffers)


def _dumps(value: object, buffers: list[pickle.PickleBuffer]) -> bytes:
    if "torch" not in sys.modules:
        return pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    stream = io.BytesIO()
    _TensorPickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return stream.getvalue()


class _TensorPickler(pickle.Pickler):
    """Sends dense CPU tensors as numpy arrays, whose bytes travel beside the pickle."""

    def reducer_override(self, obj: object) -> Reduced:
        import torch

        if not _is_dense_cpu(obj, torch):
            return NotImplemented
        tensor = cast("torch.Tensor", obj)
        if tensor.requires_grad:
            msg = "a sample holds a tensor that requires grad; use tensor.detach() in the data set"
            raise ValueError(msg)
        if tensor.dtype is torch.bfloat16:
            return _bfloat16, (tensor.contiguous().view(torch.int16).numpy(),)
        return _tensor, (tensor.contiguous().numpy(),)


def _is_dense_cpu(value: object, torch: ModuleType) -> bool:
    return (
        type(value) is torch.Tensor
        and getattr(value, "device").type == "cpu"  # noqa: B009 - known only at run time
        and getattr(value, "layout") is torch.strided  # noqa: B009
    )


def _tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)


def _bfloat16(array: npt.NDArray[np.generic]) -> torch.Tensor:
    import torch

    return torch.from_numpy(array).view(torch.bfloat16)
