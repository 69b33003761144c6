"""Predicts a step of a plan at any number of ranks: closed-form collective times, event-driven replay of
readiness.

Every result of this module is a model, never a measurement; :func:`simulate` says so in its report.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from loongforge_comm.gradients import GradientSpec, order_by_ready
from loongforge_comm.link import Curve, LinkModel
from loongforge_comm.plan import Bucket, CommPlan, Piece
from loongforge_comm.presets import Tier, Topology


def collective_ms(strategy: str, nbytes: float, ranks: int, topology: Topology) -> float:
    """Closed-form time of one all-reduce of ``nbytes`` over ``ranks`` ranks in milliseconds.

    Within one node, or on a flat network: ring ``2 (n-1) a + 2 (n-1)/n S b``, tree ``2 ceil(log2 n) (a + S
    b)``, direct ``a + (n-1) S b``, all-gather ``(n-1) (a + S b)``. Over several nodes ring and tree are
    hierarchical: reduce-scatter inside, all-reduce of the shard between nodes, all-gather inside.
    """
    if ranks <= 1:
        return 0.0
    per_node = min(topology.ranks_per_node, ranks)
    nodes = -(-ranks // per_node)
    base = topology.base_us * 1e-3
    if nodes == 1:
        return base + _flat_ms(strategy, nbytes, ranks, topology.intra)
    if per_node == 1 or strategy in ("direct", "all_gather"):
        return base + _flat_ms(strategy, nbytes, ranks, topology.inter)
    inside = (per_node - 1) * topology.intra.step_us * 1e-3
    inside += (per_node - 1) / per_node * nbytes / (topology.intra.gbytes_per_s * 1e6)
    return base + 2 * inside + _flat_ms(strategy, nbytes / per_node, nodes, topology.inter)


def _flat_ms(strategy: str, nbytes: float, ranks: int, tier: Tier) -> float:
    step, wire = tier.step_us * 1e-3, nbytes / (tier.gbytes_per_s * 1e6)
    if strategy == "tree":
        return 2 * math.ceil(math.log2(ranks)) * (step + wire)
    if strategy == "direct":
        return step + (ranks - 1) * wire
    if strategy == "all_gather":
        return (ranks - 1) * (step + wire)
    return 2 * (ranks - 1) * step + 2 * (ranks - 1) / ranks * wire


def link_from_topology(topology: Topology, ranks: int) -> LinkModel:
    """A cost model for the planner from the closed forms."""
    sizes = tuple(float(2**k) for k in range(8, 31))
    curves = {
        name: Curve(nbytes=sizes, ms=tuple(collective_ms(name, s, ranks, topology) for s in sizes))
        for name in ("ring", "tree", "direct", "all_gather")
    }
    return LinkModel(
        world_size=ranks,
        backend="model",
        curves=curves,
        fingerprint=topology.name,
        notes={"source": topology.source},
    )


def scale_link(link: LinkModel, ranks: int) -> LinkModel:
    """Carry a link measured at one world size to another by the step and volume counts of each algorithm.

    The start-up part of a curve grows with its number of steps, the rest with its volume per rank.
    """
    old = link.world_size
    if old < 2 or ranks < 2:
        msg = f"cannot scale a link from {old} to {ranks} ranks, allowed are at least 2 on both sides"
        raise ValueError(msg)
    factors = {
        "ring": ((ranks - 1) / (old - 1), ((ranks - 1) / ranks) / ((old - 1) / old)),
        "tree": (math.ceil(math.log2(ranks)) / math.ceil(math.log2(old)),) * 2,
        "direct": (1.0, (ranks - 1) / (old - 1)),
        "all_gather": ((ranks - 1) / (old - 1),) * 2,
    }
    curves = {}
    for name, curve in link.curves.items():
        steps, volume = factors.get(name, (1.0, 1.0))
        alpha = curve.alpha_ms
        curves[name] = replace(curve, ms=tuple(alpha * steps + (ms - alpha) * volume for ms in curve.ms))
    return replace(link, world_size=ranks, curves=curves, source="model")


def stock_plan(
    gradients: Sequence[GradientSpec],
    link: LinkModel,
    *,
    cap_mib: float | None = None,
    backward_ms: float | None = None,
) -> CommPlan:
    """The buckets stock DDP makes after its rebuild, as a plan to simulate.

    Greedy fill in ready order; a bucket closes when it reaches the cap. Without a cap: 1 MiB first, then 25
    MiB.

    Args:
        gradients: specs with ready times.
        link: cost model for the predicted times.
        cap_mib: ``bucket_cap_mb``; ``None`` for the default.
        backward_ms: not used for the layout; recorded ready times decide.
    """
    ordered = order_by_ready(gradients)
    caps = [1.0, 25.0] if cap_mib is None else [cap_mib]
    buckets: list[Bucket] = []
    part: list[GradientSpec] = []
    for spec in ordered:
        part.append(spec)
        cap = caps[min(len(buckets), len(caps) - 1)] * 2**20
        if sum(s.nbytes for s in part) >= cap or spec is ordered[-1]:
            buckets.append(_bucket(len(buckets), part))
            part = []
    ring = link.curves["ring"]
    return CommPlan(
        world_size=link.world_size,
        gradients=ordered,
        buckets=tuple(buckets),
        source="stock",
        strategy="simple",
        alpha_ms=ring.alpha_ms,
        ms_per_mib=ring.beta_ms_per_byte * 2**20,
        backend=link.backend,
        torch="",
        notes=("buckets as stock DDP makes them",),
    )


def _bucket(index: int, part: Sequence[GradientSpec]) -> Bucket:
    return Bucket(
        index=index,
        group="stock",
        strategy="ring",
        dtype=part[0].dtype,
        device=part[0].device,
        pieces=tuple(Piece(name=s.name, start=0, stop=s.numel) for s in part),
        nbytes=sum(s.nbytes for s in part),
        ready_ms=part[-1].ready_ms,
        start_ms=0.0,
        end_ms=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class Contention:
    """What communication costs the computation beside it.

    Attributes:
        pack_ms_per_mib: time on the compute thread per MiB sent (copies, launches).
        slowdown: share of each collective's time by which it delays the backward that runs beside it.
    """

    pack_ms_per_mib: float = 0.0
    slowdown: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A model's answer; all times in milliseconds after the start of backward.

    Attributes:
        ranks: number of ranks.
        finish_ms: mean time until all averages are there.
        finish_p95_ms: 95th percentile over simulated steps.
        backward_ms: mean end of backward of the slowest rank.
        exposed_ms: mean of finish minus the slowest backward.
        comm_ms: sum of collective times.
        overlap: 1 - exposed / comm.
        straggler_ms: mean time added by waiting for the slowest rank, against ranks without jitter.
        spans: (start, end) of each bucket in a step without jitter.
        ready: ready time of each bucket in that step.
        source: origin of the link figures.
    """

    ranks: int
    finish_ms: float
    finish_p95_ms: float
    backward_ms: float
    exposed_ms: float
    comm_ms: float
    overlap: float
    straggler_ms: float
    spans: tuple[tuple[float, float], ...]
    ready: tuple[float, ...]
    source: str

    def report(self) -> str:
        """Text that says that it is a model."""
        return (
            f"model, not a measurement: {self.ranks} ranks, backward {self.backward_ms:.2f} ms, all averages "
            f"after {self.finish_ms:.2f} ms (95th percentile {self.finish_p95_ms:.2f}), exposed "
            f"{self.exposed_ms:.2f} ms of "
            f"{self.comm_ms:.2f} ms communication, overlap {100 * self.overlap:.1f} %, "
            f"waiting for the slowest rank {self.straggler_ms:.2f} ms\nlink: {self.source}"
        )


def simulate(
    plan: CommPlan,
    link: LinkModel,
    *,
    jitter: float = 0.0,
    steps: int = 1,
    seed: int = 0,
    contention: Contention | None = None,
) -> Simulation:
    """Replay a plan on ``link.world_size`` ranks.

    Event rule: a bucket starts when every rank has its gradients and the bucket before has ended (one
    in-order channel). Each rank's backward is stretched by a log-normal factor of standard deviation
    ``jitter``, drawn anew for every rank and step; the expected maximum over many ranks is what stragglers
    cost.

    Args:
        plan: buckets and ready times.
        link: cost model of the ranks to simulate (:func:`scale_link`, :func:`link_from_topology`).
        jitter: relative spread of a rank's backward time.
        steps: simulated steps; 1 with ``jitter=0`` is exact.
        seed: seed of the jitter.
        contention: cost of communication for the computation.
    """
    cost = np.asarray([_cost(bucket, link) for bucket in plan.buckets])
    load = contention or Contention()
    plain_spans, plain_ready, plain_backward = _replay(plan, cost, 1.0, load)
    generator = np.random.default_rng(seed)
    finishes, backwards = [], []
    for _ in range(steps):
        slowest = float(np.exp(generator.normal(0.0, jitter, link.world_size)).max()) if jitter > 0 else 1.0
        spans, _, backward = _replay(plan, cost, slowest, load)
        finishes.append(max(spans[-1][1] if spans else 0.0, backward))
        backwards.append(backward)
    finish, backward = float(np.mean(finishes)), float(np.mean(backwards))
    plain = max(plain_spans[-1][1] if plain_spans else 0.0, plain_backward)
    comm = float(cost.sum())
    exposed = max(0.0, finish - backward)
    return Simulation(
        ranks=link.world_size,
        finish_ms=finish,
        finish_p95_ms=float(np.percentile(finishes, 95)),
        backward_ms=backward,
        exposed_ms=exposed,
        comm_ms=comm,
        overlap=max(0.0, 1.0 - exposed / comm) if comm > 0 else 1.0,
        straggler_ms=finish - plain,
        spans=tuple(plain_spans),
        ready=tuple(plain_ready),
        source=link.notes.get("source", f"{link.backend}, {link.source}, {link.fingerprint}".rstrip(", ")),
    )


def _cost(bucket: Bucket, link: LinkModel) -> float:
    return link.predict_ms(bucket.strategy, bucket.nbytes) + link.launch_ms


def _replay(
    plan: CommPlan, cost: np.ndarray, stretch: float, load: Contention
) -> tuple[list[tuple[float, float]], list[float], float]:
    """One step: computation is delayed by packing and by the communication that runs beside it."""
    spans: list[tuple[float, float]] = []
    ready_at: list[float] = []
    free = delay = 0.0
    for bucket, ms in zip(plan.buckets, cost, strict=True):
        # Communication that ended before this bucket's last gradient, or runs until then, has slowed it down.
        planned = bucket.ready_ms * stretch
        beside = sum(min(end, planned + delay) - start for start, end in spans if start < planned + delay)
        ready = planned + delay + load.slowdown * max(0.0, beside)
        delay += load.pack_ms_per_mib * bucket.nbytes / 2**20
        start = max(free, ready + load.pack_ms_per_mib * bucket.nbytes / 2**20)
        free = start + float(ms)
        spans.append((start, free))
        ready_at.append(ready)
    backward = max([plan.backward_ms * stretch + delay, *ready_at])
    return spans, ready_at, backward
