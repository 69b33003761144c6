"""The heap an orchestrator works with: one of its own on the host, or the process-wide one of a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loongforge_mem import _core
from loongforge_mem.config import MemoryConfig
from loongforge_mem.planning import PlanParts

StateParts = tuple[PlanParts | None, list[tuple[int, int]], list[tuple[int, int, int]], int]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What the orchestrator asks of a heap.

    Attributes:
        name: ``"host"``, ``"cuda"`` or ``"vmm"``.
        device: CUDA device index, or None on the host.
        heap: the heap itself where it belongs to the orchestrator alone.
        begin_step: opens a step on a stream; returns where its blocks come from.
        phase: names the phase of the open step.
        end_step: closes the step, learning from it or not; returns its report.
        stats: the figures, or None before the first allocation.
        set_plan: uses a plan from the next step on.
        set_plan_rule: tells when a plan serves the steps.
        state: position-independent state, or None before the first allocation.
        trim: gives unused memory back; returns the bytes.
    """

    name: str
    device: int | None
    heap: _core.Heap | None
    begin_step: Callable[[int], str]
    phase: Callable[[str], None]
    end_step: Callable[[bool], dict[str, Any]]
    stats: Callable[[], dict[str, Any] | None]
    set_plan: Callable[[PlanParts], None]
    set_plan_rule: Callable[[str, float], None]
    state: Callable[[], StateParts | None]
    trim: Callable[[], int]


def host_backend(config: MemoryConfig) -> Backend:
    """Return a heap over kernel memory; its addresses are real host memory."""
    heap = _core.Heap(
        "host",
        initial_bytes=config.initial_bytes,
        grow_bytes=config.grow_mb << 20,
        limit_bytes=config.limit_bytes,
    )
    return Backend(
        name="host",
        device=None,
        heap=heap,
        begin_step=heap.begin_step,
        phase=heap.phase,
        end_step=heap.end_step,
        stats=heap.stats,
        set_plan=heap.set_plan,
        set_plan_rule=heap.set_plan_rule,
        state=heap.state,
        trim=heap.trim,
    )


def global_backend(name: str, device: int) -> Backend:
    """Return the process-wide heap of CUDA device ``device``."""
    return Backend(
        name=name,
        device=device,
        heap=None,
        begin_step=functools.partial(_core.global_begin_step, device),
        phase=functools.partial(_core.global_phase, device),
        end_step=functools.partial(_core.global_end_step, device),
        stats=functools.partial(_core.global_stats, device),
        set_plan=functools.partial(_core.global_set_plan, device),
        set_plan_rule=functools.partial(_core.global_set_plan_rule, device),
        state=functools.partial(_core.global_state, device),
        trim=functools.partial(_core.global_trim, device),
    )
