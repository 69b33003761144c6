"""A memory pillar that outlives the sessions of a run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch import nn
from torch.optim import Optimizer

from loongforge.pillars import MemoryPillar


class LastingMemory:
    """Passes everything on but :meth:`close`: the next session has the same model in the same memory."""

    def __init__(self, memory: MemoryPillar) -> None:
        self._memory = memory

    def persistent(self) -> AbstractContextManager[object]:
        """Return the context in which weights are made."""
        return self._memory.persistent()

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Learn model and optimizer."""
        self._memory.attach(model, optimizer)

    def step(self) -> AbstractContextManager[object]:
        """Return the context that surrounds one step."""
        return self._memory.step()

    def stats(self) -> dict[str, float]:
        """Return numeric counters."""
        return self._memory.stats()

    def state_dict(self) -> dict[str, object]:
        """Return what the checkpoint keeps."""
        return self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, object], /) -> None:
        """Restore what the checkpoint kept."""
        self._memory.load_state_dict(state)

    def close(self) -> None:
        """Keep the memory; who made it closes it."""
