"""Checks of captured graphs on a real GPU; see :mod:`loongforge_mem.selfcheck`."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from loongforge_mem.addresses import AddressBook, CapturePool
from loongforge_mem.config import MemoryConfig
from loongforge_mem.orchestrator import MemoryOrchestrator

if TYPE_CHECKING:
    import torch

Outcome = dict[str, Any]


def orchestrator_of(*, ours: bool) -> MemoryOrchestrator | None:
    """Return the process-wide allocator of ours, or None for torch's own."""
    return MemoryOrchestrator(MemoryConfig(mode="global", backend="vmm")) if ours else None


def check_graph(*, ours: bool, quick: bool) -> Outcome:
    """Replay a captured training step while eager work fills memory with garbage; then break a capture."""
    import torch

    orchestrator = orchestrator_of(ours=ours)
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024))
        for _ in range(6)
    ]
    net = torch.nn.Sequential(*layers).cuda()
    # The graph reads this tensor at every replay, so it must live as long as the graph.
    fixed = torch.randn(256, 1024, device="cuda")
    graph = _capture_step(net, fixed)
    graph.replay()
    torch.cuda.synchronize()
    wanted = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    rounds = 50 if quick else 300
    equal = _replay_beside_eager_work(graph, net, wanted, rounds)
    out: Outcome = {"bit_equal": equal == rounds, "equal": equal, "rounds": rounds, "inputs": fixed.shape[0]}
    if orchestrator is not None:
        stats = orchestrator.stats()
        out |= {"graph_bytes": stats["graph_bytes"], "graph_pools": stats["graph_pools"]}
        del graph
        gc.collect()
        torch.cuda.empty_cache()
        out |= _broken_capture(orchestrator)
    return out


def _capture_step(net: torch.nn.Module, fixed: torch.Tensor) -> torch.cuda.CUDAGraph:
    import torch

    def work() -> None:
        net(fixed).square().mean().backward()

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            net.zero_grad(set_to_none=True)
            work()
    torch.cuda.current_stream().wait_stream(side)
    net.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def _replay_beside_eager_work(
    graph: torch.cuda.CUDAGraph, net: torch.nn.Module, wanted: list[torch.Tensor], rounds: int
) -> int:
    import torch

    equal = 0
    keep: list[torch.Tensor] = []
    for index in range(rounds):
        sizes = (1 << 20, 3 << 20, 17 << 20, (index % 40 + 1) << 18)
        keep.extend(torch.full((n,), float("nan"), device="cuda") for n in sizes)
        if len(keep) > 24:
            del keep[:13]
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        for grad in grads:
            grad.zero_()
        graph.replay()
        garbage = torch.full((5 << 20,), float("nan"), device="cuda") * 2
        del garbage
        equal += all(torch.equal(g, w) for g, w in zip(grads, wanted, strict=True))
    return equal


def _broken_capture(orchestrator: MemoryOrchestrator) -> Outcome:
    import torch

    before = orchestrator.stats()["graph_bytes"]
    failed = False
    broken = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(broken):
            (torch.ones(1 << 20, device="cuda") * 3).sum().item()
    except RuntimeError:
        failed = True
    del broken
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    again, held = torch.cuda.CUDAGraph(), torch.zeros(1 << 18, device="cuda")
    with torch.cuda.graph(again):
        y = held + 1
    again.replay()
    stats = orchestrator.stats()
    return {
        "failed_capture_raised": failed,
        "capture_after_failure": float(y.sum()) == float(1 << 18),
        "graph_bytes_before_failure": before,
        "graph_bytes_after": stats["graph_bytes"],
        "graph_pools_after": stats["graph_pools"],
        "stale_captures": stats["stale_captures"],
    }


def check_capture_pool(*, ours: bool, quick: bool) -> Outcome:
    """Capture two graphs into one pool, replay them in turn beside eager work, move a weight, release."""
    import torch

    orchestrator = orchestrator_of(ours=ours)
    torch.manual_seed(0)
    nets = [torch.nn.Linear(2048, 2048).cuda() for _ in range(2)]
    inputs = [torch.randn(512, 2048, device="cuda") for _ in nets]
    names = {f"{i}.{name}": p for i, net in enumerate(nets) for name, p in net.named_parameters()}
    pool, results = CapturePool(AddressBook(names)), []
    with torch.no_grad():
        for net, x in zip(nets, inputs, strict=True):
            net(x).relu()
            torch.cuda.synchronize()
            with pool.capture() as graph:
                y = net(x).relu().sum(dim=1)
            results.append((graph, y, net(x).relu().sum(dim=1)))
    held = orchestrator.stats()["graph_bytes"] if orchestrator is not None else 0
    rounds = 50 if quick else 300
    equal = 0
    for index in range(rounds):
        graph, y, wanted = results[index % 2]
        garbage = [torch.full((n << 18,), float("nan"), device="cuda") for n in (1, 3, index % 20 + 1)]
        pool.replay(graph)
        equal += bool(torch.equal(y, wanted))
        del garbage
    nets[1].weight.data = nets[1].weight.data.clone()
    refused = False
    try:
        pool.replay(results[0][0])
    except RuntimeError as error:
        refused = "1.weight" in str(error)
    del graph, y
    results.clear()
    pool.release()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    after = orchestrator.stats()["graph_bytes"] if orchestrator is not None else 0
    return {
        "bit_equal": equal == rounds,
        "equal": equal,
        "rounds": rounds,
        "move_refused": refused,
        "graph_bytes": held,
        "graph_bytes_after": after,
        "released": after == 0,
    }
