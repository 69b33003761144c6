"""The memory pillar as the trainer sees it: a protocol, its ``off``, and how the real one is plugged in."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from loongforge.config import PillarConfig
from loongforge.errors import require


class MemoryPillar(Protocol):
    """Memory of a run: labels, a context around each step, counters, and a small state for the checkpoint."""

    def persistent(self) -> AbstractContextManager[object]:
        """Return the context in which weights are made."""
        ...

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Learn model and optimizer."""
        ...

    def step(self) -> AbstractContextManager[object]:
        """Return the context that surrounds one step."""
        ...

    def stats(self) -> dict[str, float]:
        """Return numeric counters."""
        ...

    def state_dict(self) -> dict[str, object]:
        """Return what the checkpoint keeps."""
        ...

    def load_state_dict(self, state: Mapping[str, object], /) -> None:
        """Restore what the checkpoint kept."""
        ...

    def close(self) -> None:
        """Give memory back."""
        ...


class NoMemoryPillar:
    """Stock PyTorch memory."""

    def persistent(self) -> AbstractContextManager[object]:
        """Return an empty context."""
        return nullcontext()

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Do nothing."""

    def step(self) -> AbstractContextManager[object]:
        """Return an empty context."""
        return nullcontext()

    def stats(self) -> dict[str, float]:
        """Return nothing: nothing is counted."""
        return {}

    def state_dict(self) -> dict[str, object]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, object], /) -> None:
        """Accept any state; there is nothing to restore."""

    def close(self) -> None:
        """Do nothing."""


class OrchestratedMemory:
    """``loongforge_mem.MemoryOrchestrator`` as a :class:`MemoryPillar`; made before the GPU is used."""

    def __init__(self, config: PillarConfig, mode: str) -> None:
        mem = require("loongforge_mem", "loongforge-mem", "switch the memory pillar off (--mem off)")
        settings = mem.MemoryConfig(mode=mode, pool_gb=config.mem_pool_gb)  # type: ignore[attr-defined]
        self._orchestrator = mem.MemoryOrchestrator(settings)  # type: ignore[attr-defined]

    def persistent(self) -> AbstractContextManager[object]:
        """Return the orchestrator's label for weights."""
        return self._orchestrator.label("persistent")

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Let the orchestrator learn model and optimizer."""
        self._orchestrator.attach(model, optimizer)

    def step(self) -> AbstractContextManager[object]:
        """Return the orchestrator's step context."""
        return self._orchestrator.step()

    def stats(self) -> dict[str, float]:
        """Return the orchestrator's numeric counters."""
        return numeric(self._orchestrator.stats())

    def state_dict(self) -> dict[str, object]:
        """Return the free-list state."""
        return dict(self._orchestrator.state_dict())

    def load_state_dict(self, state: Mapping[str, object], /) -> None:
        """Restore the free-list state."""
        self._orchestrator.load_state_dict(dict(state))

    def close(self) -> None:
        """Remove the hooks."""
        self._orchestrator.close()


def build_memory(config: PillarConfig, device: torch.device) -> MemoryPillar:
    """Return the memory pillar the configuration asks for on a device."""
    mode = config.mem
    if mode == "auto":
        mode = "pool" if device.type == "cuda" else "off"
    return NoMemoryPillar() if mode == "off" else OrchestratedMemory(config, mode)


def numeric(values: Mapping[str, object]) -> dict[str, float]:
    """Keep the numbers of a flat mapping."""
    return {
        str(key): float(value)
        for key, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
