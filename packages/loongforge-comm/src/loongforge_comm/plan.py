"""The communication plan: buckets in launch order, as versioned JSON with a hash that all ranks compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from loongforge_comm.gradients import GradientSpec, dtype_of

PLAN_VERSION = 1
STRATEGIES = ("ring", "tree", "direct", "all_gather", "sparse")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements ``start`` to ``stop`` of one parameter's gradient in storage order."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One collective.

    Attributes:
        index: place in the launch order.
        group: ``high`` or ``low`` load, or a configured group name.
        strategy: ``ring``, ``tree``, ``direct``, ``all_gather`` or ``sparse``.
        dtype: torch dtype of all its gradients.
        device: device type of all its gradients.
        pieces: what it carries, in ready order.
        nbytes: bytes of gradients.
        ready_ms: predicted time of the last gradient, after the start of backward.
        start_ms: predicted start of the collective.
        end_ms: predicted end of the collective.
    """

    index: int
    group: str
    strategy: str
    dtype: str
    device: str
    pieces: tuple[Piece, ...]
    nbytes: int
    ready_ms: float
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class CommPlan:
    """Buckets in launch order and what they were computed from.

    Attributes:
        world_size: ranks the plan was computed for.
        gradients: every gradient in ready order.
        buckets: every bucket in launch order.
        source: ``registration``, ``mdg`` or ``measured``: where the ready times come from.
        strategy: ``hybrid`` or ``simple``.
        alpha_ms: start-up time of the ring on the link used.
        ms_per_mib: bandwidth time of the ring on the link used.
        backend: backend of the link model.
        torch: version of torch that made the plan.
        step: step at which it was made.
    """

    world_size: int
    gradients: tuple[GradientSpec, ...]
    buckets: tuple[Bucket, ...]
    source: str
    strategy: str
    alpha_ms: float
    ms_per_mib: float
    backend: str
    torch: str
    step: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def hash(self) -> str:
        """Digest of all that decides what is sent: layouts, order, strategies. Predicted times are left
        out.
        """
        layout = [
            [g.name, list(g.shape), list(g.stride), g.dtype, g.device, g.sparse] for g in self.gradients
        ]
        order = [
            [b.strategy, b.dtype, b.device, [[p.name, p.start, p.stop] for p in b.pieces]]
            for b in self.buckets
        ]
        text = json.dumps([PLAN_VERSION, self.world_size, sorted(layout), order], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def nbytes(self) -> int:
        """Bytes of all dense gradients."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def backward_ms(self) -> float:
        """Ready time of the last gradient."""
        return max((g.ready_ms for g in self.gradients), default=0.0)

    @property
    def exposed_ms(self) -> float:
        """Predicted time from the last gradient to the end of the last collective."""
        return max(0.0, max((b.end_ms for b in self.buckets), default=0.0) - self.backward_ms)

    def explain(self) -> str:
        """A table: one line per bucket with bytes, ready, start, end and the part exposed after backward."""
        lines = [
            f"plan {self.hash}: {len(self.gradients)} gradients, {self.nbytes / 2**20:.2f} MiB in "
            f"{len(self.buckets)} buckets for {self.world_size} ranks; order {self.source}, strategy "
            f"{self.strategy}",
            f"link {self.backend}: alpha {self.alpha_ms:.3f} ms, {self.ms_per_mib:.3f} ms/MiB",
            "bucket  group     strategy    MiB       tensors  ready_ms   start_ms   end_ms     exposed_ms  "
            "first tensor",
        ]
        backward = self.backward_ms
        for b in self.buckets:
            exposed = max(0.0, b.end_ms - max(backward, b.start_ms))
            lines.append(
                f"{b.index:<7d} {b.group:<9s} {b.strategy:<11s} {b.nbytes / 2**20:<9.3f} {len(b.pieces):<8d} "
                f"{b.ready_ms:<10.3f} {b.start_ms:<10.3f} {b.end_ms:<10.3f} {exposed:<11.3f} {_first(b)}"
            )
        lines.append(
            f"backward {backward:.3f} ms, exposed after backward {self.exposed_ms:.3f} ms (predicted)"
        )
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def bucket_cap_mb_list(self) -> list[float]:
        """Caps in MiB that make stock ``DistributedDataParallel`` (torch >= 2.11) close its buckets at ours.

        Its fill is greedy: a bucket closes when its size reaches the cap. Buckets of split tensors are
        joined, because it never splits, and sparse buckets are left out.
        """
        caps: list[float] = []
        carry = 0
        for index, bucket in enumerate(self.buckets):
            if bucket.strategy == "sparse" or not bucket.nbytes:
                continue
            carry += bucket.nbytes
            following = self.buckets[index + 1] if index + 1 < len(self.buckets) else None
            if following is not None and following.pieces and following.pieces[0].start > 0:
                continue
            caps.append(carry / 2**20)
            carry = 0
        return caps

    def to_json(self) -> str:
        """Versioned JSON text with the hash."""
        data = asdict(self)
        data.update(version=PLAN_VERSION, hash=self.hash)
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> CommPlan:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: wrong version, damaged content (hash differs) or not a plan at all.
        """
        try:
            data = json.loads(text)
            version = data.pop("version")
            stored = data.pop("hash")
        except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
            msg = f"not a communication plan ({error}); allowed is the text of CommPlan.to_json()"
            raise ValueError(msg) from error
        if version != PLAN_VERSION:
            msg = (
                f"communication plan has version {version}, allowed is {PLAN_VERSION}; compute the plan again"
            )
            raise ValueError(msg)
        data["gradients"] = tuple(
            GradientSpec(**{**g, "shape": tuple(g["shape"]), "stride": tuple(g["stride"])})
            for g in data["gradients"]
        )
        data["buckets"] = tuple(
            Bucket(**{**b, "pieces": tuple(Piece(**p) for p in b["pieces"])}) for b in data["buckets"]
        )
        data["notes"] = tuple(data["notes"])
        plan = cls(**data)
        if plan.hash != stored:
            msg = (
                f"communication plan has hash {plan.hash} but carries {stored}; the file was changed, "
                "compute it again"
            )
            raise ValueError(msg)
        plan.validate()
        return plan

    def validate(self) -> None:
        """Check that every element of every gradient is sent exactly once, in storage order."""
        position = {g.name: 0 for g in self.gradients}
        specs = {g.name: g for g in self.gradients}
        for bucket in self.buckets:
            if bucket.strategy not in STRATEGIES:
                msg = (
                    f"bucket {bucket.index} has strategy {bucket.strategy!r}, "
                    f"allowed are {', '.join(STRATEGIES)}"
                )
                raise ValueError(msg)
            dtype_of(bucket.dtype)
            for piece in bucket.pieces:
                if piece.name not in specs:
                    msg = f"bucket {bucket.index} carries {piece.name!r}, which is not a gradient of the plan"
                    raise ValueError(msg)
                if piece.start != position[piece.name] or piece.stop > specs[piece.name].numel:
                    msg = (
                        f"bucket {bucket.index} carries elements {piece.start}:{piece.stop} of "
                        f"{piece.name!r}, "
                        f"allowed is a range from {position[piece.name]} up to {specs[piece.name].numel}"
                    )
                    raise ValueError(msg)
                position[piece.name] = piece.stop
        missing = [name for name, done in position.items() if done != specs[name].numel]
        named = {piece.name for bucket in self.buckets for piece in bucket.pieces}
        missing += [name for name in specs if name not in named and name not in missing]
        if missing:
            msg = (
                f"plan does not send {missing[:5]} ({len(missing)} in all); every gradient must "
                "be in a bucket"
            )
            raise ValueError(msg)


def schedule(ready_ms: Sequence[float], cost_ms: Sequence[float]) -> list[tuple[float, float]]:
    """Start and end of collectives that run one after another, each not before it is ready."""
    result: list[tuple[float, float]] = []
    free = 0.0
    for ready, cost in zip(ready_ms, cost_ms, strict=True):
        start = max(free, ready)
        free = start + cost
        result.append((start, free))
    return result


def _first(bucket: Bucket) -> str:
    if not bucket.pieces:
        return "-"
    name = bucket.pieces[0].name
    return name if len(bucket.pieces) == 1 else f"{name} ... {bucket.pieces[-1].name}"
