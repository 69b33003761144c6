"""Addresses of tensors that a captured graph has baked in: recorded once, checked before a replay.

PyTorch knows no physical addresses; what is recorded is the device pointer, which is what a graph uses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def named_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, buffers and optimizer state with names, as they are now."""
    import torch

    names: dict[torch.Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        yield name, parameter
    yield from model.named_buffers()
    if optimizer is not None:
        for owner, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"{names.get(owner, 'unnamed')}:{key}", value


class AddressBook:
    """Device pointers of named tensors.

    Args:
        tensors: pairs of name and tensor, or a mapping.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor]) -> None:
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        self._tensors = dict(pairs)
        self._addresses = {name: t.data_ptr() for name, t in self._tensors.items()}

    def __len__(self) -> int:
        return len(self._addresses)

    def address(self, name: str) -> int:
        """Return the recorded address of ``name``."""
        return self._addresses[name]

    def moved(self, now: Mapping[str, torch.Tensor] | None = None) -> list[str]:
        """Return the names whose tensor lies elsewhere now, or is gone from ``now``."""
        current = self._tensors if now is None else now
        return [
            name
            for name, address in self._addresses.items()
            if name not in current or current[name].data_ptr() != address
        ]

    def check(self, now: Mapping[str, torch.Tensor] | None = None) -> None:
        """Raise when something moved: a graph captured before would read and write the old place.

        Raises:
            RuntimeError: names the tensors that moved.
        """
        moved = self.moved(now)
        if moved:
            shown = ", ".join(moved[:5]) + (f" and {len(moved) - 5} more" if len(moved) > 5 else "")
            msg = (
                f"{len(moved)} tensors moved since the capture ({shown}); capture the graph again, and load "
                "checkpoints in place (load_state_dict does, assign=True and .to() do not)"
            )
            raise RuntimeError(msg)


class CapturePool:
    """One memory pool for several captures, held until :meth:`release`.

    Graphs captured into one pool share memory, so they must be replayed one after the other, in any order
    that their inputs allow. The memory of the pool is not touched by eager work until every graph is gone.

    Args:
        book: addresses that must not have moved when a further graph is captured or replayed.
    """

    def __init__(self, book: AddressBook | None = None) -> None:
        import torch

        self.handle = torch.cuda.graph_pool_handle()
        self.book = book
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @contextlib.contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture what runs inside; yields the graph. A failed capture leaves nothing behind in the pool's
        list.
        """
        import torch

        if self.book is not None:
            self.book.check()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.handle):
            yield graph
        self._graphs.append(graph)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Check the addresses and replay.

        Raises:
            RuntimeError: a tensor moved since it was recorded.
        """
        if self.book is not None:
            self.book.check()
        graph.replay()

    def release(self) -> None:
        """Drop the graphs; the allocator takes the memory back when the last one is gone.

        Captures may follow; they get another pool, since torch refuses one whose last graph is gone.
        """
        import torch

        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self.handle = torch.cuda.graph_pool_handle()
        # Products in a capture leave their workspace in its pool, where torch would keep it for the process.
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 - no public way
        if clear is not None:
            clear()
