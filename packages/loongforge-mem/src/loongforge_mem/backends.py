"""The heap an orchestrator works with: one of its own on the host, or the process-wide one of a GPU."""

from __future__ import annotations

from typing import Any, Protocol

from loongforge_mem import _core
from loongforge_mem.config import MemoryConfig
from loongforge_mem.planning import PlanParts

StateParts = tuple[PlanParts | None, list[tuple[int, int]], list[tuple[int, int, int]], int]


class Backend(Protocol):
    """What the orchestrator asks of a heap."""

    name: str

    def begin_step(self, stream: int) -> str:
        """Open a step; return where its blocks come from."""

    def phase(self, name: str) -> None:
        """Name the phase of the open step."""

    def end_step(self) -> dict[str, Any]:
        """Close the step; return its report."""

    def stats(self) -> dict[str, Any] | None:
        """Return the figures, or None before the first allocation."""

    def reset(self, *, totals: bool = False) -> None:
        """Start peaks (and totals) again."""

    def set_plan(self, parts: PlanParts) -> None:
        """Use a plan from the next step on."""

    def state(self) -> StateParts | None:
        """Return the position-independent state, or None before the first allocation."""

    def trim(self) -> int:
        """Give unused memory back; return the bytes."""


class HostBackend:
    """A heap over kernel memory. Addresses are real host memory."""

    name = "host"

    def __init__(self, config: MemoryConfig) -> None:
        self.heap = _core.Heap(
            "host",
            initial_bytes=config.initial_bytes,
            grow_bytes=config.grow_mb << 20,
            limit_bytes=config.limit_bytes,
        )

    def begin_step(self, stream: int) -> str:
        return self.heap.begin_step(stream)

    def phase(self, name: str) -> None:
        self.heap.phase(name)

    def end_step(self) -> dict[str, Any]:
        return self.heap.end_step()

    def stats(self) -> dict[str, Any] | None:
        return self.heap.stats()

    def reset(self, *, totals: bool = False) -> None:
        self.heap.reset(totals=totals)

    def set_plan(self, parts: PlanParts) -> None:
        self.heap.set_plan(parts)

    def state(self) -> StateParts | None:
        return self.heap.state()

    def trim(self) -> int:
        return self.heap.trim()


class GlobalBackend:
    """The process-wide heap of one CUDA device."""

    def __init__(self, name: str, device: int) -> None:
        self.name = name
        self.device = device

    def begin_step(self, stream: int) -> str:
        return _core.global_begin_step(self.device, stream)

    def phase(self, name: str) -> None:
        _core.global_phase(self.device, name)

    def end_step(self) -> dict[str, Any]:
        return _core.global_end_step(self.device)

    def stats(self) -> dict[str, Any] | None:
        return _core.global_stats(self.device)

    def reset(self, *, totals: bool = False) -> None:
        _core.global_reset(self.device, totals=totals)

    def set_plan(self, parts: PlanParts) -> None:
        _core.global_set_plan(self.device, parts)

    def state(self) -> StateParts | None:
        return _core.global_state(self.device)

    def trim(self) -> int:
        return _core.global_trim(self.device)
