"""Host memory of exact size for tensors that move between device and host.

torch's pinned allocator rounds every request up to a power of two; this arena rounds to 4 KiB and is one
mapping, page locked once.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import TYPE_CHECKING

from loongforge_mem import _core

if TYPE_CHECKING:
    import torch

PAGE = 4096


def arena_bytes(sizes: list[int]) -> int:
    """Return the bytes an arena needs to hold blocks of ``sizes`` bytes together."""
    return sum(-(-size // PAGE) * PAGE for size in sizes)


class PinnedArena:
    """One host mapping cut into tensors.

    Args:
        nbytes: capacity in bytes; :func:`arena_bytes` computes it for a list of tensors.
        pin: page-lock the mapping with the CUDA driver (copies become asynchronous). ``None`` (default) pins
            when a driver and an initialised CUDA are there.

    Raises:
        ValueError: a capacity out of range.
        MemoryError: the kernel has not that much.
        OSError: ``pin=True`` and the driver refuses.
    """

    def __init__(self, nbytes: int, *, pin: bool | None = None) -> None:
        self._arena = _core.HostArena(nbytes)
        self._bytes = self._arena.range[1]
        if pin is None:
            pin = _cuda_in_use()
        if pin:
            self._arena.pin()

    @property
    def pinned(self) -> bool:
        """Whether the mapping is page-locked; the lock ends with the mapping."""
        return self._arena.pinned

    @property
    def nbytes(self) -> int:
        """Capacity in bytes."""
        return self._bytes

    @property
    def requested_bytes(self) -> int:
        """Bytes of live tensors."""
        return self._arena.requested

    def empty(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised host tensor of the arena; its memory comes back when its storage dies.

        Raises:
            MemoryError: no free run holds it; the text names the largest one.
        """
        import torch

        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        address = self._arena.alloc(nbytes)
        buffer = (ctypes.c_byte * nbytes).from_address(address)
        # torch keeps the buffer object for as long as the storage lives, so its end is the end of the block.
        weakref.finalize(buffer, _release, self._arena, address).atexit = False
        return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised contiguous host tensor of the shape and type of ``tensor``."""
        return self.empty(tensor.shape, tensor.dtype)

    def close(self) -> None:
        """Unpin and unmap.

        Raises:
            RuntimeError: tensors of the arena are still alive.
        """
        self._arena.close()


def _release(arena: _core.HostArena, address: int) -> None:
    arena.free(address)


def _cuda_in_use() -> bool:
    import torch

    used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return used and _core.driver_error() is None
