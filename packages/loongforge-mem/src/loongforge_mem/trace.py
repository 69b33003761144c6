"""Recorded allocations: our trace format, and what can be derived from a trace alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from loongforge_mem import _core

FORMAT = "loongforge-trace/1"
MAX_FILE_BYTES = 1 << 30

Event = tuple[bool, int, int]
"""(is allocation, block identifier, bytes; 0 bytes for a free)."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Allocations and frees in order.

    Attributes:
        events: ``(is_alloc, id, bytes)``; an identifier is unique among live blocks.
        source: what was recorded, in words.
        labels: label name by block identifier, where known.
        owners: module or site by block identifier, where known.
    """

    events: Sequence[Event]
    source: str = ""
    labels: dict[int, str] = field(default_factory=dict)
    owners: dict[int, str] = field(default_factory=dict)

    @property
    def num_allocations(self) -> int:
        """Number of allocations."""
        return sum(1 for is_alloc, _, _ in self.events if is_alloc)

    def items(self) -> tuple[list[int], list[int], int]:
        """Return sizes, ends and the peak of live bytes; see :func:`loongforge_mem.plan_trace`.

        Raises:
            ValueError: the trace frees a block that is not live, or allocates one twice or with no size.
        """
        return _core.trace_items(list(self.events))

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        events = [["a", i, n] if is_alloc else ["f", i, n] for is_alloc, i, n in self.events]
        body: dict[str, object] = {"format": FORMAT, "source": self.source, "unit": "bytes", "events": events}
        if self.labels:
            body["labels"] = {str(k): v for k, v in self.labels.items()}
        if self.owners:
            body["owners"] = {str(k): v for k, v in self.owners.items()}
        Path(path).write_text(json.dumps(body, separators=(",", ":")))


def load_trace(path: str | Path) -> Trace:
    """Read a trace written by :meth:`Trace.save`.

    Raises:
        ValueError: not this format, or an event that is neither ``["a", id, bytes]`` nor ``["f", id, ...]``.
        FileNotFoundError: no such file.
    """
    file = Path(path)
    if (size := file.stat().st_size) > MAX_FILE_BYTES:
        msg = f"{file} has {size} bytes; allowed up to {MAX_FILE_BYTES}"
        raise ValueError(msg)
    try:
        body = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        msg = f"{file} is not JSON ({error}); torch snapshots (.pickle) are read by load_snapshot()"
        raise ValueError(msg) from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else type(body).__name__
        msg = f"{file} has format {found!r}; allowed: {FORMAT!r}"
        raise ValueError(msg)
    labels = {int(k): str(v) for k, v in dict(body.get("labels", {})).items()}
    owners = {int(k): str(v) for k, v in dict(body.get("owners", {})).items()}
    events = tuple(_events(file, body.get("events")))
    return Trace(events=events, source=str(body.get("source", "")), labels=labels, owners=owners)


def _events(file: Path, raw: object) -> Iterable[Event]:
    if not isinstance(raw, list):
        msg = f"{file} has no list of events"
        raise ValueError(msg)  # noqa: TRY004
    for index, event in enumerate(raw):
        match event:
            case ["a", int(block), int(size)] if block >= 0 and size >= 0:
                if size > 0:
                    yield True, block, size
            case ["f", int(block)] | ["f", int(block), int()] if block >= 0:
                yield False, block, 0
            case _:
                msg = f"{file}: event {index} is {event!r}; allowed: ['a', id, bytes] or ['f', id, bytes]"
                raise ValueError(msg)


def simulate(trace: Trace, policy: str = "run_fit", *, repeats: int = 1) -> dict[str, int | float | str]:
    """Place the blocks of ``trace`` under one policy.

    Blocks that are never freed count as persistent and are left out, as in published fragmentation studies.

    Args:
        trace: what to place.
        policy: one of :func:`policies`.
        repeats: runs that are timed (nanoseconds in the result); sizes come from the first.

    Returns:
        ``peak_requested_bytes``, ``high_water_bytes``, ``reserve_overhead`` (1 - peak requested / high
        water), ``internal_waste``, ``external_fragmentation`` (at the peak), ``alloc_p50_ns`` ...
        ``pair_p999_ns``, ``plan_ms``.

    Raises:
        ValueError: unknown policy or a trace that contradicts itself.
    """
    return _core.simulate(list(trace.events), policy, repeats)


def policies() -> list[str]:
    """Return the names of the placement policies."""
    return _core.policies()
