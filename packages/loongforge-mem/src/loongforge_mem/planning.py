"""Offline placement of a profiled step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loongforge_mem import _core
from loongforge_mem.trace import Trace

PlanParts = tuple[list[int], list[int], list[int], int, list[tuple[str, int]]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Offsets by allocation index.

    Attributes:
        sizes: planned bytes of each allocation (the largest over the shapes seen).
        ends: number of allocations made when the block is freed; -1 for a block that outlives the step.
        offsets: byte offset of each block; -1 for a block that is not planned.
        high_water: bytes the plan needs.
        order: greedy order that won: ``size``, ``life`` or ``size x life``.
        marks: phase names with the index of their first allocation.
    """

    sizes: Sequence[int]
    ends: Sequence[int]
    offsets: Sequence[int]
    high_water: int
    order: str = "given"
    marks: Sequence[tuple[str, int]] = ()

    def verify(self) -> None:
        """Raise ValueError when two blocks that live together overlap."""
        _core.verify_plan(self.parts())

    def parts(self) -> PlanParts:
        """Return the plan as the native part takes it."""
        return (list(self.sizes), list(self.ends), list(self.offsets), self.high_water, list(self.marks))

    @classmethod
    def from_parts(cls, parts: PlanParts, order: str = "given") -> Plan:
        """Return a plan from its native parts."""
        sizes, ends, offsets, high_water, marks = parts
        return cls(sizes=sizes, ends=ends, offsets=offsets, high_water=high_water, order=order, marks=marks)


def plan_trace(*traces: Trace) -> Plan:
    """Plan one layout for one or several recordings of the same step.

    With several recordings (other shapes, same order of allocations) the plan holds the largest size and the
    longest life of every index, so it serves all of them.

    Raises:
        ValueError: no trace, a trace that contradicts itself, or recordings with different numbers of
            allocations.
    """
    if not traces:
        msg = "plan_trace() got no trace; give at least one"
        raise ValueError(msg)
    sizes, ends, _ = traces[0].items()
    for number, trace in enumerate(traces[1:], start=2):
        other = trace.items()[:2]
        merged = _core.merge_items((sizes, ends), other)
        if merged is None:
            msg = (
                f"recording {number} has {len(other[0])} allocations but the first has {len(sizes)}; "
                "only recordings of the same step can share a plan"
            )
            raise ValueError(msg)
        sizes, ends = merged
    parts, order = _core.make_plan(sizes, ends)
    return Plan.from_parts(parts, order)
