"""A model of the device's cache under two placements: does it matter for the kernels where blocks lie?

The cache keeps the units of 64 KiB used last (exact LRU). A block is written as a whole when it is allocated
and read as a whole just before it is freed; what happens in between is not in a trace. Counted are units read
from memory and changed units written back, in the third step of three.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from loongforge_mem import Trace, _core

UNIT_BITS = 16
UNITS_PER_MIB = 16


def traffic(trace: Trace, rule: str, *, cache_mib: int, steps: int = 3) -> float:
    """Return GiB moved between cache and memory in the last of ``steps`` steps served under ``rule``."""
    events = _passing(trace.events)
    heap = _core.Heap("fake", initial_bytes=1 << 36, grow_bytes=0)
    heap.set_plan_rule(rule)
    cache: OrderedDict[int, bool] = OrderedDict()
    room = cache_mib * UNITS_PER_MIB
    moved = 0
    for _ in range(steps):
        moved = 0
        heap.begin_step(0)
        live: dict[int, tuple[int, int]] = {}
        for is_alloc, block, size in events:
            if is_alloc:
                live[block] = heap.alloc(size), size
                address, length = live[block]
            else:
                address, length = live.pop(block)
                heap.free(address)
            for unit in range(address >> UNIT_BITS, (address + length - 1 >> UNIT_BITS) + 1):
                changed = cache.pop(unit, None)
                moved += changed is None and not is_alloc
                cache[unit] = is_alloc or bool(changed)
                if len(cache) > room:
                    moved += cache.popitem(last=False)[1]
        heap.end_step()
    return moved / UNITS_PER_MIB / 1024


def _passing(events: Sequence[tuple[bool, int, int]]) -> list[tuple[bool, int, int]]:
    """Leave out the blocks that outlive the step."""
    freed = {block for is_alloc, block, _ in events if not is_alloc}
    return [event for event in events if event[1] in freed]
