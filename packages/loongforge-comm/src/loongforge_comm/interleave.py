"""Order of branches whose order is free: which of a model's parallel encoders should run its backward first.

Autograd runs branches in the reverse order of their forward calls, so the advice is an order of calls in
forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loongforge_comm.link import LinkModel
from loongforge_comm.mdg.graph import ModuleDependencyGraph


@dataclass(frozen=True, kw_only=True)
class BranchLoad:
    """One branch.

    Attributes:
        name: module path prefix.
        compute_ms: its share of backward in milliseconds.
        comm_ms: time of one collective with all its gradients.
    """

    name: str
    compute_ms: float
    comm_ms: float


@dataclass(frozen=True, kw_only=True)
class BranchAdvice:
    """The best order.

    Attributes:
        backward: names in the order in which backward should run them.
        forward: the order of calls that achieves it.
        finish_ms: compute and communication of these branches in that order, in milliseconds.
        given_ms: the same in the order in which the branches were given (as backward order).
    """

    backward: tuple[str, ...]
    forward: tuple[str, ...]
    finish_ms: float
    given_ms: float


def finish_ms(loads: Sequence[BranchLoad]) -> float:
    """End of the last collective when branches compute and send in this order."""
    computed = sent = 0.0
    for load in loads:
        computed += load.compute_ms
        sent = max(sent, computed) + load.comm_ms
    return max(computed, sent)


def order_branches(loads: Sequence[BranchLoad]) -> BranchAdvice:
    """Johnson's rule for two machines in series, which is optimal for independent branches. O(n log n)."""
    first = sorted((b for b in loads if b.compute_ms < b.comm_ms), key=lambda b: b.compute_ms)
    last = sorted((b for b in loads if b.compute_ms >= b.comm_ms), key=lambda b: -b.comm_ms)
    best = [*first, *last]
    names = tuple(b.name for b in best)
    return BranchAdvice(
        backward=names, forward=names[::-1], finish_ms=finish_ms(best), given_ms=finish_ms(loads)
    )


def branch_loads(
    graph: ModuleDependencyGraph, branches: Sequence[str], link: LinkModel, *, backward_ms: float
) -> tuple[BranchLoad, ...]:
    """Loads of branches named by module path, from the graph's FLOPs and gradient bytes.

    Raises:
        ValueError: a name matches no module.
    """
    total = sum(node.flops for node in graph.nodes) or 1
    loads = []
    for name in branches:
        members = [n for n in graph.nodes if n.name == name or n.name.startswith((f"{name}.", f"{name}#"))]
        if not members:
            tops = sorted({n.name.split(".")[0] for n in graph.nodes if n.kind == "module"})
            msg = f"branch is {name!r}, allowed are module paths of {graph.model}, such as {tops[:8]}"
            raise ValueError(msg)
        nbytes = sum(n.gradient_bytes for n in members)
        loads.append(
            BranchLoad(
                name=name,
                compute_ms=backward_ms * sum(n.flops for n in members) / total,
                comm_ms=link.predict_ms(link.choose(nbytes), nbytes) if nbytes else 0.0,
            )
        )
    return tuple(loads)
