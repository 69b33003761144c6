"""Copies between device and host beside the computation, each with something to wait on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from loongforge_mem.pinned import PinnedArena


class Ticket(Protocol):
    """One copy that was started."""

    def done(self) -> bool:
        """Return whether the copy is finished; does not block."""

    def wait(self) -> None:
        """Order everything that the caller's current stream does next behind the copy."""

    def block(self) -> None:
        """Block the host until the copy is finished."""


class CopyQueue(Protocol):
    """Starts copies."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        """Start ``target.copy_(source)`` behind the work enqueued so far on the current stream."""


@dataclass(frozen=True)
class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def block(self) -> None:
        return


class DirectCopies:
    """Copies at once, in the caller's thread: for tensors that all live on the host."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        """Copy now."""
        target.copy_(source)
        return _Done()


class _CudaTicket:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        import torch

        torch.cuda.current_stream().wait_event(self._event)

    def block(self) -> None:
        self._event.synchronize()


class StreamCopies:
    """Copies on a CUDA stream of their own."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Ticket:
        """Start the copy; both tensors are kept until it is finished, whatever becomes of the caller's."""
        import torch

        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream)
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self.stream)
            else:
                keep_until_done(tensor, event)
        return _CudaTicket(event)


class _Event(Protocol):
    def query(self) -> bool: ...


_in_flight: list[tuple[_Event, torch.Tensor]] = []


def keep_until_done(tensor: torch.Tensor, event: _Event) -> None:
    """Keep a host tensor alive until the copy before ``event`` is finished.

    A device tensor is protected by record_stream; host memory of an arena would go to the next tensor as soon
    as the last reference is gone, while the copy engine still reads or writes it. What is finished is let go
    at the next call.
    """
    _in_flight[:] = [pair for pair in _in_flight if not pair[0].query()]
    _in_flight.append((event, tensor))


def queue_for(device: torch.device) -> CopyQueue:
    """Return the queue for tensors of ``device``."""
    return StreamCopies(device) if device.type == "cuda" else DirectCopies()


class StagingRing:
    """A few host slots through which batches travel to a device. A slot is written again only after its last
    copy.

    Args:
        arena: host memory; the ring takes ``slots`` blocks of ``nbytes``.
        slots: number of slots, at least 1.
        nbytes: bytes of a slot.
        queue: starts the copies; default by the target's device.
    """

    def __init__(
        self, arena: PinnedArena, *, slots: int, nbytes: int, queue: CopyQueue | None = None
    ) -> None:
        import torch

        if slots < 1 or nbytes < 1:
            msg = f"slots is {slots} and nbytes is {nbytes}; both must be at least 1"
            raise ValueError(msg)
        self._slots = [arena.empty((nbytes,), torch.uint8) for _ in range(slots)]
        self._tickets: list[Ticket | None] = [None] * slots
        self._queue = queue
        self._next = 0
        self.waits = 0

    def send(self, fill: Callable[[torch.Tensor], None], target: torch.Tensor) -> Ticket:
        """Let ``fill`` write a host tensor of the shape of ``target`` and copy it there.

        Blocks the host only when every slot is still being copied; ``waits`` counts that.

        Raises:
            ValueError: the target is larger than a slot.
        """
        nbytes = target.numel() * target.element_size()
        index = self._next
        slot = self._slots[index]
        if nbytes > slot.numel():
            room = slot.numel()
            msg = f"the target has {nbytes} bytes but a slot has {room}; make the ring with larger slots"
            raise ValueError(msg)
        ticket = self._tickets[index]
        if ticket is not None and not ticket.done():
            self.waits += 1
            ticket.block()
        host = slot[:nbytes].view(target.dtype).view(target.shape)
        fill(host)
        queue = self._queue or queue_for(target.device)
        self._queue = queue
        self._tickets[index] = queue.copy(target, host)
        self._next = (index + 1) % len(self._slots)
        started = self._tickets[index]
        assert started is not None
        return started
