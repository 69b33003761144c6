"""How many slots, how large, and how many batches ahead: pure arithmetic over memory and measured times."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

MIN_SLOTS = 3
MAX_SLOTS = 64
DEFAULT_SLOTS = 8
DEFAULT_SLOT_MB = 128
HOST_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class RingSize:
    """A ring's size and what limited it."""

    slots: int
    """Slots."""
    slot_bytes: int
    """Bytes of a slot."""
    reason: str
    """What decided the number of slots."""


def available_bytes() -> int:
    """Return the memory that can be taken now: the system's estimate, and the control group's limit if
    lower.
    """
    available = 1 << 40
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return available


def ring_size(
    *,
    batch_bytes: int | None,
    slots: int | None,
    slot_mb: int,
    least: int,
    available: int,
) -> RingSize:
    """Choose the ring's size.

    Args:
        batch_bytes: Bytes of a batch when known beforehand; slots are then made to fit, and the budget of
            ``8 x slot_mb`` allows more of them. None: slots of ``slot_mb``.
        slots: A fixed number; None chooses.
        slot_mb: Size of a slot in MiB when the batch size is unknown, and the budget's unit.
        least: Slots that the number of workers needs.
        available: Free memory in bytes; the ring takes at most a quarter of it.

    Raises:
        ValueError: Not even `MIN_SLOTS` slots fit.
    """
    slot_bytes = slot_mb << 20 if batch_bytes is None else batch_bytes
    budget = DEFAULT_SLOTS * slot_mb << 20
    if slots is not None:
        wanted, reason = slots, "asked for"
    elif batch_bytes is None:
        wanted, reason = max(MIN_SLOTS, least), "workers x prefetch_factor"
    else:
        wanted, reason = max(budget // slot_bytes, least), f"{budget >> 20} MiB budget"
        if wanted > MAX_SLOTS:
            wanted, reason = MAX_SLOTS, f"at most {MAX_SLOTS}"
    fitting = int(available * HOST_SHARE) // slot_bytes
    if fitting < MIN_SLOTS:
        if available // slot_bytes < MIN_SLOTS:
            msg = (
                f"{MIN_SLOTS} slots of {slot_bytes >> 20} MiB do not fit into the {available >> 20} MiB of "
                f"free memory: "
                "use a smaller batch, image_size or slot_mb"
            )
            raise ValueError(msg)
        fitting = MIN_SLOTS
    # Slots of unknown fill take memory only where they are written, so their number is not cut to the
    # quarter.
    if batch_bytes is not None and wanted > fitting:
        wanted, reason = fitting, f"a quarter of {available >> 20} MiB free memory"
    return RingSize(slots=max(MIN_SLOTS, wanted), slot_bytes=slot_bytes, reason=reason)


def slots_needed(*, step_ms_p95: float, fill_ms: float, workers: int, target: float = 0.95) -> int:
    """Return how many slots keep a consumer busy: ceil(P95 step time x target / time per filled slot), at
    least two.

    ``fill_ms`` is the time from the start of a slot until it is full; ``workers`` slots fill side by side,
    so one slot comes every ``fill_ms / workers``. A consumer slower than the supply needs few slots; to
    ride out a slow step it needs as many as are filled in that time.
    """
    if step_ms_p95 < 0 or fill_ms < 0 or workers < 1 or not 0 < target <= 1:
        msg = (
            f"step_ms_p95={step_ms_p95}, fill_ms={fill_ms}, workers={workers}, target={target}: times must "
            f"be >= 0, "
            "workers >= 1 and target in (0, 1]"
        )
        raise ValueError(msg)
    per_slot = max(fill_ms / workers, 1e-3)
    return max(2, math.ceil(step_ms_p95 * target / per_slot))
