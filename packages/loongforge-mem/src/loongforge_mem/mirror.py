"""Watching a step, and placing what it allocates in a host heap where there is no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from loongforge_mem import _core
from loongforge_mem.planning import plan_trace
from loongforge_mem.watch import StorageWatch

if TYPE_CHECKING:
    import torch


class StepWatch(StorageWatch):
    """A :class:`StorageWatch` whose blocks also live in a host heap, at the same sizes and times."""

    def __init__(self, heap: _core.Heap | None) -> None:
        self._heap = heap
        self._addresses: dict[int, int] = {}
        super().__init__(on_alloc=self._place, on_free=self._release)

    def _place(self, block: int, size: int) -> None:
        if self._heap is not None:
            self._addresses[block] = self._heap.alloc(size)

    def _release(self, block: int) -> None:
        address = self._addresses.pop(block, None)
        if address is not None and self._heap is not None:
            self._heap.free(address)

    def plan_bytes(self) -> int:
        """Return the bytes that a plan of what was recorded needs."""
        trace = self.trace()
        return plan_trace(trace).high_water if trace.events else 0


@contextlib.contextmanager
def watch_step(
    heap: _core.Heap | None,
    model: torch.nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
) -> Iterator[StepWatch]:
    """Watch one step, mirrored in ``heap`` when there is one.

    What ``model`` and ``optimizer`` hold already is not counted.
    """
    watch = StepWatch(heap)
    for tensor in _held(model, optimizer):
        watch.know(tensor)
    with watch:
        yield watch


def _held(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    import torch

    if model is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            yield tensor
            if tensor.grad is not None:
                yield tensor.grad
    if optimizer is not None:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
