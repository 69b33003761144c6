"""The fusion trace: one record per group of micro-batches, bounded, cheap to write, read late."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """One group of micro-batches of one window.

    Attributes:
        window: Number of the window since the fuser was made.
        first: Index of the group's first micro-batch inside the window.
        sizes: Samples of each micro-batch.
        fused: Whether the group ran as one forward/backward.
        layout: ``concat``, ``pad``, ``pack`` or ``separate``.
        reason: Refusal code when not fused.
        detail: What exactly was found, for people.
        padded_share: Share of fill in the padded keys.
        start_ns: Host clock (``time.perf_counter_ns``) when the group was started.
        end_ns: Host clock when its work was queued; on a GPU the work itself may still run.
        graph: Whether a graph was replayed.
        graph_reason: Why not.
        losses: ``(G,)`` mean loss of each micro-batch, on the model's device.
    """

    window: int
    first: int
    sizes: tuple[int, ...]
    fused: bool
    layout: str
    reason: str | None
    detail: str | None
    padded_share: float
    start_ns: int
    end_ns: int
    graph: bool
    graph_reason: str | None
    losses: Tensor


class FusionTrace:
    """Ring of the last windows' records and running totals over all of them."""

    def __init__(self, length: int) -> None:
        self._records: deque[GroupRecord] = deque(maxlen=length)
        self._lock = threading.Lock()
        self._reasons: Counter[str] = Counter()
        self._micro_batches = 0
        self._fused_micro_batches = 0
        self._groups = 0

    def add(self, record: GroupRecord) -> None:
        """Append one record."""
        with self._lock:
            self._records.append(record)
            count = len(record.sizes)
            self._groups += 1 if record.fused else count
            self._micro_batches += count
            if record.fused:
                self._fused_micro_batches += count
            elif record.reason is not None:
                self._reasons[record.reason] += count

    def records(self, last: int | None = None) -> Sequence[GroupRecord]:
        """Return the newest ``last`` records (all kept ones by default), oldest first."""
        with self._lock:
            kept = list(self._records)
        return kept if last is None else kept[-last:]

    def summary(self) -> dict[str, object]:
        """Return totals: micro-batches, share fused, passes run, and micro-batches per refusal reason."""
        with self._lock:
            total = self._micro_batches
            return {
                "micro_batches": total,
                "fused_micro_batches": self._fused_micro_batches,
                "fused_share": self._fused_micro_batches / total if total else None,
                "passes": self._groups,
                "reasons": dict(self._reasons),
            }
