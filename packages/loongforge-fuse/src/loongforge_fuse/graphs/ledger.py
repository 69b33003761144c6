"""What a runner remembers of shapes: how often they were seen, which failed, which gave way to others."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from loongforge_fuse.graphs.reasons import GraphReason

Key = tuple[Hashable, ...]

SHAPES_REMEMBERED = 4096
"""Shapes a ledger remembers; the one that was not seen for longest is forgotten first."""
_MOST_DOUBLINGS = 10
_RESTLESS = 4


@dataclass(kw_only=True)
class _Shape:
    """What is known of one shape.

    Attributes:
        seen: Eager passes since it was first seen, or since its recording was evicted.
        evictions: Times its recording gave way to others.
        stale: Its recording was given up because the model moved: it is captured again at once.
        restless: Recordings in a row that were given up as stale before they paid off.
        failure: Why it stays eager, and the error in one line.
    """

    seen: int = 0
    evictions: int = 0
    captures: int = 0
    stale: bool = False
    restless: int = 0
    failure: tuple[GraphReason, str] | None = None


class ShapeLedger:
    """Decides when a shape is worth a capture.

    A shape is captured after ``warmup_steps`` eager passes. One whose recording was evicted has to be seen
    twice as often as before each time, so that more shapes than there is room for lead to eager passes and
    not to a capture in every step.

    Args:
        warmup_steps: Eager passes before the first capture.
        limit: Shapes remembered.
    """

    def __init__(self, warmup_steps: int, limit: int = SHAPES_REMEMBERED) -> None:
        self._warmup = warmup_steps
        self._limit = limit
        self._shapes: OrderedDict[Key, _Shape] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shapes)

    def _shape(self, key: Key) -> _Shape:
        shape = self._shapes.setdefault(key, _Shape())
        self._shapes.move_to_end(key)
        while len(self._shapes) > self._limit:
            self._shapes.popitem(last=False)
        return shape

    def why_eager(self, key: Key) -> GraphReason | None:
        """Count a pass of a shape without a recording; return why it is not captured now, or None."""
        shape = self._shape(key)
        if shape.failure is not None:
            return shape.failure[0]
        if shape.stale:
            return None
        shape.seen += 1
        if shape.seen > self._warmup << min(shape.evictions, _MOST_DOUBLINGS):
            return None
        return GraphReason.EVICTED if shape.evictions else GraphReason.WARM_UP

    def captured(self, key: Key) -> bool:
        """Note a capture; return whether the shape had one before."""
        shape = self._shape(key)
        shape.captures += 1
        shape.stale = False
        return shape.captures > 1

    def failed(self, key: Key, reason: GraphReason, error: str) -> None:
        """Note that a shape cannot be captured."""
        self._shape(key).failure = (reason, error)

    def again(self, key: Key) -> None:
        """Let a shape be captured again at once."""
        self._shape(key).stale = True

    def evicted(self, key: Key) -> None:
        """Note that a recording gave way to others."""
        shape = self._shape(key)
        shape.evictions += 1
        shape.seen = 0

    def stale(self, key: Key, *, moved: str, replays: int, warm_up: bool) -> None:
        """Note that a recording no longer fits the model.

        Args:
            key: The shape.
            moved: What moved.
            replays: How often the recording was replayed.
            warm_up: Whether eager passes must come before the next capture.
        """
        shape = self._shape(key)
        shape.stale = not warm_up
        shape.seen = 0
        shape.restless = shape.restless + 1 if replays <= 1 else 0
        if shape.restless >= _RESTLESS:
            error = f"{moved} moved after each of the last {_RESTLESS} captures; keep them in place"
            shape.failure = (GraphReason.MOVING, error)

    def failures(self) -> Mapping[Key, str]:
        """Return the error of every shape that failed."""
        return {key: shape.failure[1] for key, shape in self._shapes.items() if shape.failure is not None}


@dataclass(frozen=True, kw_only=True)
class GraphStats:
    """Counters of a runner since it was made.

    Attributes:
        replays: Passes that were one replay.
        captures: Recordings made.
        recaptures: Recordings made again for a shape that had one.
        evictions: Recordings given up to make room.
        graphs: Recordings held now.
        graph_bytes: Device memory they hold together, the shared pool included.
        shapes: Different shapes remembered.
        eager: Eager passes by reason code.
        moved: What moved when a recording was given up as stale, with counts.
        failures: Shape description -> why it cannot be captured.
        padded: Batches that a bucket plan enlarged.
        adopted: Gradients of eager passes that were copied into a recording's tensors.
        late_gradients: Weight gradients made beside an eager or recorded pass; replays do not count again.
        in_line_gradients: Those of such layers that were made in their place, by reason code.
    """

    replays: int
    captures: int
    recaptures: int
    evictions: int
    graphs: int
    graph_bytes: int
    shapes: int
    eager: Mapping[str, int]
    moved: Mapping[str, int]
    failures: Mapping[str, str]
    padded: int
    adopted: int
    late_gradients: int
    in_line_gradients: Mapping[str, int]


class PassCounters:
    """Mutable counters behind :class:`GraphStats`."""

    def __init__(self) -> None:
        self.replays = self.captures = self.recaptures = 0
        self.evictions = self.padded = self.adopted = 0
        self.eager: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()


def describe_key(key: Key) -> str:
    """Return a short text for a shape key: the tensor shapes, and the place in the window."""
    parts = key[0] if isinstance(key[0], tuple) else ()
    shapes = [
        f"{'.'.join(map(str, p[0]))}{list(p[2])}" for p in parts if isinstance(p, tuple) and p[1] == "tensor"
    ]
    return f"{', '.join(shapes)}; first={key[2]}, last={key[3]}"
