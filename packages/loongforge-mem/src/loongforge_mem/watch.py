"""Tracing tensors one by one: which storages a piece of code makes, how large, how long they live.

Works on any device and under FakeTensorMode, because it watches operators instead of the allocator. A watched
step is several times slower than a normal one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from loongforge_mem.trace import Event, Trace

if TYPE_CHECKING:
    import torch


class StorageWatch:
    """Context manager that records every storage made inside as a trace.

    Args:
        on_alloc: called with (block identifier, bytes) at every new storage.
        on_free: called with the block identifier when a storage dies.
        owner: called at every new storage; returns the name of the module or site that made it.
    """

    def __init__(
        self,
        *,
        on_alloc: Callable[[int, int], None] | None = None,
        on_free: Callable[[int], None] | None = None,
        owner: Callable[[], str] | None = None,
    ) -> None:
        self.events: list[Event] = []
        self.owners: dict[int, str] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self._on_alloc = on_alloc
        self._on_free = on_free
        self._owner = owner
        self._sizes: dict[int, int] = {}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._next = 0
        self._mode: object | None = None
        self._open = False

    def __enter__(self) -> StorageWatch:
        self._mode = _make_mode(self)
        self._open = True
        self._mode.__enter__()  # type: ignore[attr-defined]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mode is not None:
            self._mode.__exit__(kind, error, trace)  # type: ignore[attr-defined]
        self._open = False

    def know(self, tensor: torch.Tensor) -> None:
        """Count a tensor that exists already (a parameter) as known, so that a view of it is not a new
        block.
        """
        storage = tensor.untyped_storage()
        self._known[id(storage)] = weakref.ref(storage)

    def see(self, tensor: torch.Tensor) -> None:
        """Record the storage of ``tensor`` if it is new."""
        storage = tensor.untyped_storage()
        key = id(storage)
        known = self._known.get(key)
        if known is not None and known() is storage:
            return
        size = storage.nbytes()
        if not isinstance(size, int) or size <= 0:
            return
        block = self._next
        self._next += 1
        self._known[key] = weakref.ref(storage)
        self._sizes[block] = size
        self.events.append((True, block, size))
        if self._owner is not None:
            self.owners[block] = self._owner()
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        if self._on_alloc is not None:
            self._on_alloc(block, size)
        weakref.finalize(storage, self._gone, block).atexit = False

    def _gone(self, block: int) -> None:
        size = self._sizes.pop(block)
        self.live_bytes -= size
        if self._open:
            self.events.append((False, block, 0))
        if self._on_free is not None:
            self._on_free(block)

    def trace(self, source: str = "") -> Trace:
        """Return what was recorded so far."""
        return Trace(events=tuple(self.events), source=source, owners=dict(self.owners))


def _make_mode(watch: StorageWatch) -> object:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self,
            func: Callable[..., object],
            types: object,
            args: tuple[object, ...] = (),
            kwargs: dict[str, object] | None = None,
        ) -> object:
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                    watch.see(leaf)
            return out

    return _Mode()  # type: ignore[no-untyped-call]
