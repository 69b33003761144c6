"""Step times for two_gpu.py: stock DDP in its settings and loongforge-comm on one module, in turns."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from _two_gpu_checks import QUIET, device, wait_device
from loongforge_comm import CommPlan, GradientScheduler, LinkModel, SchedulerConfig
from loongforge_comm.simulate import simulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

WARMUP = 5
"""Windows before the first timed one: stock DDP orders its buckets after the first, ours after the third."""


class Timed:
    """Times accumulation windows of one variant: forwards, backwards and averaging."""

    def __init__(self, net: nn.Module, batches: list[object], *, accumulation: int, repeat: int) -> None:
        self.net, self.batches, self.accumulation, self.repeat = net, batches, accumulation, repeat

    def __call__(
        self,
        call: nn.Module,
        no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
        border: Callable[[], None] = lambda: None,
    ) -> tuple[list[float], bool]:
        """Milliseconds of each window (maximum over ranks), and whether the ranks' last gradients agree."""
        times: list[float] = []
        agree = False
        for k in range(self.repeat + WARMUP):
            dist.barrier()
            wait_device()
            begin = time.perf_counter()
            for micro in range(self.accumulation):
                last = micro == self.accumulation - 1
                with nullcontext() if last else no_sync():
                    out = call(self.batches[micro % len(self.batches)])
                    (out["loss"] if isinstance(out, dict) else out).float().backward()
            wait_device()
            took = torch.tensor(time.perf_counter() - begin, device=device())
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if k == self.repeat + WARMUP - 1:
                agree = same_gradients(self.net)
            self.net.zero_grad(set_to_none=True)
            border()
            if k >= WARMUP:
                times.append(took.item() * 1e3)
        return times, agree


def same_gradients(net: nn.Module) -> bool:
    """Whether both ranks hold the same gradients, by their sums of squares (their data differ)."""
    squares = [p.grad.double().square().sum() for p in net.parameters() if p.grad is not None]
    mine = torch.stack(squares) if squares else torch.zeros(1, device=device(), dtype=torch.float64)
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool(torch.equal(low, high))


STOCK: dict[str, dict[str, object]] = {
    "ddp default": {},
    "ddp cap 5": {"bucket_cap_mb": 5},
    "ddp cap 100": {"bucket_cap_mb": 100},
    "ddp cap 400": {"bucket_cap_mb": 400},
    "ddp static_graph": {"static_graph": True},
    "ddp find_unused": {"find_unused_parameters": True},
}


def speed(
    net: nn.Module, batches: list[object], accumulation: int, repeat: int, *, passes: int = 2
) -> dict[str, object]:
    """Every variant in ``passes`` turns on one module; hooks of one are gone before the next begins.

    Turns, because the time of a host-bound step drifts by more than the variants differ. A variant whose
    ranks end with different gradients did not average them; its times are kept but it is never called the
    best (static_graph with no_sync stops synchronising in several torch versions).
    """
    timed = Timed(net, batches, accumulation=accumulation, repeat=max(2, repeat // passes))
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    astray: set[str] = set()
    ours: dict[str, object] = {}

    def keep(name: str, outcome: tuple[list[float], bool]) -> None:
        times.setdefault(name, []).extend(outcome[0])
        if not outcome[1] and name != "no communication":
            astray.add(name)

    for _ in range(passes):
        keep("no communication", timed(net))
        for name, options in STOCK.items():
            if name in failed:
                continue
            try:
                call = DistributedDataParallel(net, gradient_as_bucket_view=True, **options)
                keep(name, timed(call, call.no_sync))
            except Exception as error:
                failed[name] = str(error)[:300]
            call = None
            gc.collect()
            net.zero_grad(set_to_none=True)
        with GradientScheduler(net, config=SchedulerConfig(**QUIET)) as scheduler:
            keep("ours", timed(net, scheduler.no_sync, scheduler.step_end))
            ours = {"stats": scheduler.stats(), "plan": scheduler.plan, "link": scheduler.link}
    return {"times_ms": times, "failed": failed, "not_averaged": sorted(astray)} | compared(
        times, astray, ours["plan"], ours["link"], ours["stats"]
    )


def compared(
    times: dict[str, list[float]],
    astray: set[str],
    plan: CommPlan,
    link: LinkModel | None,
    stats: dict[str, object],
) -> dict[str, object]:
    """Medians, ratios ours / theirs, overlap and the model's error."""
    medians = {name: statistics.median(series) for name, series in times.items()}
    mine, alone = medians["ours"], medians["no communication"]
    stock = {name: ms for name, ms in medians.items() if name.startswith("ddp") and name not in astray}
    # Below the spread of a host-bound step the difference says nothing: it is then unknown, not negative.
    exposed = mine - alone if mine >= alone else None
    model = simulate(plan, link) if link is not None else None
    busy = sum(link.predict_ms(b.strategy, b.nbytes) for b in plan.buckets) if link is not None else 0.0
    return {
        "medians_ms": medians,
        "vs_default": _ratio(mine, stock.get("ddp default")),
        "vs_best": _ratio(mine, min(stock.values(), default=None)),
        "vs_find_unused": _ratio(mine, stock.get("ddp find_unused")),
        "vs_static_graph": _ratio(mine, stock.get("ddp static_graph")),
        "exposed_ms": exposed,
        "overlap": 1 - exposed / busy if exposed is not None and busy > 0 else None,
        "overlap_by_events": stats.get("overlap_median"),
        "plan": plan.explain(),
        "stats": {k: v for k, v in stats.items() if k not in ("groups", "ranks")},
        "groups": stats.get("groups"),
        "model_exposed_ms": model.exposed_ms if model is not None else None,
        "model_step_ms": alone + model.exposed_ms if model is not None else None,
        "model_error": (alone + model.exposed_ms) / mine - 1
        if model is not None and exposed is not None
        else None,
    }


def _ratio(mine: float, theirs: float | None) -> float | None:
    return mine / theirs if theirs is not None else None


def full_model(*, tiny: bool) -> tuple[nn.Module, list[object]]:
    """GR00T N1.6 in bfloat16 with parameters that get no gradient frozen, and four micro-batches."""
    import _groot_full

    where = str(device())
    net = _groot_full.build(tiny=tiny, device=where, dropout=0.0)
    samples = 2 if tiny else 16
    batches = [
        _groot_full.micro_batch(samples, model=net, device=where, seed=10 * dist.get_rank() + k)
        for k in range(4)
    ]
    net(batches[0])["loss"].float().backward()
    for parameter in net.parameters():
        if parameter.grad is None:
            parameter.requires_grad_(False)
    net.zero_grad(set_to_none=True)
    return net, batches


def full_correctness(net: nn.Module, batches: list[object], steps: int) -> dict[str, float]:
    """A few SGD steps of the full model by stock DDP and by us from the same weights and random numbers."""
    trained = [p for p in net.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trained]
    results: list[list[Tensor]] = []
    for ours in (False, True):
        with torch.no_grad():
            for p, value in zip(trained, start, strict=True):
                p.copy_(value)
        scheduler = GradientScheduler(net, config=SchedulerConfig(**QUIET)) if ours else None
        call = net if ours else DistributedDataParallel(net, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(trained, lr=1e-3)
        for step in range(steps):
            torch.manual_seed(1000 + 2 * step + dist.get_rank())
            call(batches[step % len(batches)])["loss"].float().backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step_end(step)
        if scheduler is not None:
            scheduler.close()
        call = None
        gc.collect()
        results.append([p.detach().clone() for p in trained])
    moved = max((a.float() - b.float()).abs().max().item() for a, b in zip(results[0], start, strict=True))
    worst = max((a.float() - b.float()).abs().max().item() for a, b in zip(*results, strict=True))
    with torch.no_grad():
        for p, value in zip(trained, start, strict=True):
            p.copy_(value)
    return {"largest_gap": worst, "largest_move": moved}
