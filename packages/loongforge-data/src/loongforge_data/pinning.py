"""Shared slots as page-locked memory: registered once with CUDA, freed only after the copies that read them.

torch's own pinned memory remembers the copies that use it; registered memory does not. So the last slots
that were handed out are held here until an event shows that work queued on the consumer's stream at the
next delivery is done. A consumer that copies on another stream must keep the batch until its copy has
finished (`DevicePrefetcher` does).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import numpy as np

from loongforge_data._core import Lease, Ring

_PAGE = 4096


class _Runtime(Protocol):
    """The two calls of the CUDA runtime that are needed."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int, /) -> object:
        """Page-lock memory."""

    def cudaHostUnregister(self, pointer: int, /) -> object:
        """Undo it."""


class CudaEvent(Protocol):
    """What is needed of a CUDA event."""

    def record(self, stream: object, /) -> None:
        """Mark a point in a stream."""

    def query(self) -> bool:
        """Return whether it was reached."""

    def elapsed_time(self, end: CudaEvent, /) -> float:
        """Return milliseconds from this event to another."""

    def synchronize(self) -> None:
        """Wait until it is reached."""


class SlotPinner:
    """Registers slots of a ring with CUDA when they are first delivered.

    Args:
        ring: The ring.
    """

    def __init__(self, ring: Ring) -> None:
        import torch

        self._torch = torch
        cudart = cast("Callable[[], _Runtime]", torch.cuda.cudart)
        self._runtime = cudart()
        self._ring = ring
        self._registered: dict[int, tuple[int, int]] = {}
        self._held: deque[tuple[Lease, CudaEvent]] = deque()
        self._last: Lease | None = None
        self.reason: str | None = None

    def deliver(self, lease: Lease) -> None:
        """Page-lock the slot of a lease if it is new, and hold the lease until copies of it are done."""
        torch = self._torch
        if self._last is not None:
            event = cast("CudaEvent", torch.cuda.Event())
            event.record(torch.cuda.current_stream())
            self._held.append((self._last, event))
        self._last = lease
        while self._held and self._held[0][1].query():
            self._held.popleft()
        if self.reason is None:
            self._register(lease)

    def _register(self, lease: Lease) -> None:
        """Page-lock what batches use of the slot; more of it when a batch is larger than those before."""
        view = memoryview(lease)
        used = -(-int(np.frombuffer(view[8:16], dtype=np.int64)[0]) // _PAGE) * _PAGE
        pointer, size = self._registered.get(lease.slot, (0, 0))
        if used <= size:
            return
        if pointer:
            self._torch.cuda.synchronize()
            self._runtime.cudaHostUnregister(pointer)
            del self._registered[lease.slot]
        used = min(used + used // 8 // _PAGE * _PAGE, self._ring.slot_bytes)
        pointer = int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
        code = self._runtime.cudaHostRegister(pointer, used, 0)
        if int(getattr(code, "value", 0)) != 0:
            self.reason = f"cudaHostRegister failed with {code}; batches stay in pageable memory"
            return
        self._registered[lease.slot] = (pointer, used)

    @property
    def registered_bytes(self) -> int:
        """Bytes that are page-locked."""
        return sum(size for _, size in self._registered.values())

    def close(self) -> None:
        """Wait for copies under way and unlock all slots."""
        self._last = None
        for _, event in self._held:
            event.synchronize()
        self._held.clear()
        for pointer, _ in self._registered.values():
            self._runtime.cudaHostUnregister(pointer)
        self._registered.clear()
