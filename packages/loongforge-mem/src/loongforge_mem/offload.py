"""Tensors that move: optimizer state and gradients by phase, activations between forward and backward.

A moved tensor keeps its identity: its storage shrinks to nothing on the device and grows again, so
optimizers, checkpoints and hooks go on holding the same object.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loongforge_mem.copies import CopyQueue, Ticket, queue_for
from loongforge_mem.pinned import PinnedArena, arena_bytes

if TYPE_CHECKING:
    import torch


@dataclass
class _Moved:
    tensor: torch.Tensor
    host: torch.Tensor
    nbytes: int
    ticket: Ticket | None = None
    away: bool = False


class Migratable:
    """A set of tensors that is either on its device or in a host arena.

    Args:
        tensors: called at :meth:`offload`; returns the tensors to move. Views of shared storage stay.
        arena: host memory; ``None`` makes one of exactly the needed size at the first offload.
        queue: starts the copies; default by device.
        min_bytes: smaller tensors stay (default 4096).
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[torch.Tensor]],
        *,
        arena: PinnedArena | None = None,
        queue: CopyQueue | None = None,
        min_bytes: int = 4096,
    ) -> None:
        self._tensors = tensors
        self._arena = arena
        self._queue = queue
        self._min_bytes = min_bytes
        self._moved: dict[int, _Moved] = {}
        self.offloads = 0
        self.fetches = 0

    @property
    def away_bytes(self) -> int:
        """Bytes that are on the host now."""
        return sum(m.nbytes for m in self._moved.values() if m.away)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host arena."""
        return self._arena.nbytes if self._arena is not None else 0

    def offload(self) -> int:
        """Start moving every tensor to the host and give its device memory back; returns the bytes.

        The device memory is reused only after the copy: on CUDA the allocator holds it until the copy stream
        is done.
        """
        chosen = [t for t in self._tensors() if self._movable(t)]
        if not chosen:
            return 0
        queue = self._queue or queue_for(chosen[0].device)
        self._queue = queue
        if self._arena is None:
            self._arena = PinnedArena(arena_bytes([_nbytes(t) for t in chosen]))
        total = 0
        for tensor in chosen:
            moved = self._moved.get(id(tensor))
            if moved is None or moved.tensor is not tensor or moved.nbytes != _nbytes(tensor):
                self._moved.pop(id(tensor), None)
                moved = _Moved(tensor, self._arena.empty_like(tensor), _nbytes(tensor))
                self._moved[id(tensor)] = moved
            moved.ticket = queue.copy(moved.host, tensor.detach())
            tensor.untyped_storage().resize_(0)
            moved.away = True
            total += moved.nbytes
        self.offloads += 1
        return total

    def prefetch(self) -> int:
        """Start moving everything back; returns the bytes. :meth:`wait` orders the stream behind it."""
        total = 0
        for moved in self._moved.values():
            if not moved.away or self._queue is None:
                continue
            if moved.ticket is not None:
                moved.ticket.wait()
            moved.tensor.untyped_storage().resize_(moved.nbytes)
            moved.ticket = self._queue.copy(moved.tensor.detach(), moved.host)
            moved.away = False
            total += moved.nbytes
        self.fetches += total > 0
        return total

    def wait(self) -> None:
        """Bring back what is away and order the current stream behind all copies."""
        self.prefetch()
        for moved in self._moved.values():
            if moved.ticket is not None:
                moved.ticket.wait()
                moved.ticket = None

    def _movable(self, tensor: torch.Tensor) -> bool:
        size = _nbytes(tensor)
        own = tensor.untyped_storage().nbytes() == size and tensor.storage_offset() == 0
        return size >= self._min_bytes and own and tensor.is_contiguous()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class OptimizerOffload:
    """Keeps the state of an optimizer on the host except while it steps.

    Call :meth:`prefetch` early in backward to hide the copy; the optimizer's own hooks wait before a step and
    move the state away after it.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        arena: host memory; ``None`` makes one of exactly the needed size.
        gradients: move gradients away after the step too, where they are kept (``set_to_none=False``).
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, arena: PinnedArena | None = None, gradients: bool = False
    ) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self.state = Migratable(self._tensors, arena=arena)
        self._handles = [
            optimizer.register_step_pre_hook(lambda *_: self.state.wait()),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    def prefetch(self) -> int:
        """Start bringing the state back; returns the bytes."""
        return self.state.prefetch()

    def close(self) -> None:
        """Bring everything back and remove the hooks."""
        self.state.wait()
        for handle in self._handles:
            handle.remove()

    def _after_step(self) -> None:
        self.state.offload()

    def _tensors(self) -> Iterator[torch.Tensor]:
        import torch

        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                for value in self._optimizer.state.get(parameter, {}).values():
                    if isinstance(value, torch.Tensor) and value.device == parameter.device:
                        yield value
                if self._gradients and parameter.grad is not None:
                    yield parameter.grad


@dataclass
class OffloadCounters:
    """What :func:`offload_activations` did."""

    packed: int = 0
    packed_bytes: int = 0
    kept: int = 0
    arena_full: int = 0


@dataclass
class _Packed:
    host: torch.Tensor
    device: torch.device
    ticket: Ticket
    source: torch.Tensor | None


@contextlib.contextmanager
def offload_activations(
    arena: PinnedArena,
    *,
    min_bytes: int = 1 << 20,
    max_in_flight: int = 5,
    queue: CopyQueue | None = None,
    skip: Callable[[torch.Tensor], bool] | None = None,
) -> Iterator[OffloadCounters]:
    """Keep activations that autograd saves inside this context on the host until backward asks for them.

    Args:
        arena: host memory. When it is full, activations stay where they are (``arena_full`` counts them).
        min_bytes: smaller tensors stay.
        max_in_flight: copies whose source is still held on the device.
        queue: starts the copies; default by device.
        skip: tensors for which it returns True stay; parameters and views of them always stay.

    Not inside a CUDA graph capture, and not together with ``torch.compile`` of the same region.
    """
    import torch

    counters = OffloadCounters()
    in_flight: list[_Packed] = []
    # Host blocks whose way back has started: written again only after it is finished.
    returning: list[tuple[Ticket, torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> object:
        nonlocal queue
        stays = isinstance(tensor, torch.nn.Parameter) or isinstance(
            getattr(tensor, "_base", None), torch.nn.Parameter
        )
        if (
            stays
            or _nbytes(tensor) < min_bytes
            or not tensor.is_contiguous()
            or (skip is not None and skip(tensor))
        ):
            counters.kept += 1
            return tensor
        try:
            host = arena.empty_like(tensor)
        except MemoryError:
            counters.arena_full += 1
            return tensor
        queue = queue or queue_for(tensor.device)
        packed = _Packed(host, tensor.device, queue.copy(host, tensor.detach()), tensor.detach())
        in_flight.append(packed)
        while len(in_flight) > max_in_flight:
            oldest = in_flight.pop(0)
            oldest.ticket.wait()
            oldest.source = None
        counters.packed += 1
        counters.packed_bytes += _nbytes(tensor)
        return packed

    def unpack(saved: object) -> torch.Tensor:
        if not isinstance(saved, _Packed):
            assert isinstance(saved, torch.Tensor)
            return saved
        if saved.source is not None:
            return saved.source
        back = torch.empty(saved.host.shape, dtype=saved.host.dtype, device=saved.device)
        assert queue is not None
        ticket = queue.copy(back, saved.host)
        ticket.wait()
        returning.append((ticket, saved.host))
        while returning and returning[0][0].done():
            returning.pop(0)
        return back

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield counters
    for packed in in_flight:
        packed.ticket.wait()
        packed.source = None
    in_flight.clear()
