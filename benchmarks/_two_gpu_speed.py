"""Step times for two_gpu.py: stock DDP in its settings and loongforge-comm on one module, in turns.

The host of a step drifts by more than the variants differ. Every variant therefore gets a few windows in each
of many passes, in alternating order; ratios are formed inside a pass, and their median and spread over the
passes are what is reported.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import _common
import torch
import torch.distributed as dist
from _two_gpu_checks import QUIET, device, wait_device
from loongforge_comm import CommPlan, GradientScheduler, LinkModel, SchedulerConfig
from loongforge_comm.simulate import simulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LEARNING = 5
"""Windows in which our scheduler learns its plan, in the first pass; later passes start with that plan."""
WARMUP = 2
"""Windows of one micro-batch before the timed ones: stock DDP orders its buckets after the first backward."""
MOST_PASSES = 12
ALONE, OURS = "no communication", "ours"


@dataclass(kw_only=True)
class Turn:
    """One variant in one pass.

    Attributes:
        ms: milliseconds of each window, the maximum over ranks.
        host_ms: the same until the host has queued everything.
        averaged: the ranks' last gradients are equal (their data differ).
    """

    ms: list[float]
    host_ms: list[float]
    averaged: bool = False


class Timed:
    """Times accumulation windows of one variant: forwards, backwards and averaging."""

    def __init__(self, net: nn.Module, batches: Sequence[object], *, accumulation: int, windows: int) -> None:
        self.net, self.batches = net, batches
        self.accumulation, self.windows = accumulation, windows

    def __call__(
        self,
        call: nn.Module,
        no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
        border: Callable[[], None] = lambda: None,
        *,
        warmup: int = WARMUP,
        full_warmup: bool = False,
    ) -> Turn:
        """Warm up, then time. ``full_warmup``: the last window before counts all micro-batches."""
        turn = Turn(ms=[], host_ms=[])
        for k in range(warmup):
            last = full_warmup and k == warmup - 1
            self._window(call, no_sync, self.accumulation if last else 1)
            self._end(border)
        for k in range(self.windows):
            total, host = self._window(call, no_sync, self.accumulation)
            turn.ms.append(total)
            turn.host_ms.append(host)
            if k == self.windows - 1:
                turn.averaged = same_gradients(self.net)
            self._end(border)
        return turn

    def once_more(
        self, call: nn.Module, no_sync: Callable[[], AbstractContextManager[None]], border: Callable[[], None]
    ) -> None:
        """A window that is not timed here."""
        self._window(call, no_sync, self.accumulation)
        self._end(border)

    def _window(
        self, call: nn.Module, no_sync: Callable[[], AbstractContextManager[None]], accumulation: int
    ) -> tuple[float, float]:
        dist.barrier()
        wait_device()
        begin = time.perf_counter()
        for micro in range(accumulation):
            with nullcontext() if micro == accumulation - 1 else no_sync():
                out = call(self.batches[micro % len(self.batches)])
                (out["loss"] if isinstance(out, dict) else out).float().backward()
        queued = time.perf_counter()
        wait_device()
        took = torch.tensor([time.perf_counter() - begin, queued - begin], device=device())
        dist.all_reduce(took, dist.ReduceOp.MAX)
        total, host = (took * 1e3).tolist()
        return total, host

    def _end(self, border: Callable[[], None]) -> None:
        self.net.zero_grad(set_to_none=True)
        border()


def same_gradients(net: nn.Module) -> bool:
    """Whether both ranks hold the same gradients, by their sums of squares (their data differ)."""
    squares = [p.grad.double().square().sum() for p in net.parameters() if p.grad is not None]
    mine = torch.stack(squares) if squares else torch.zeros(1, device=device(), dtype=torch.float64)
    low, high = mine.clone(), mine.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return bool(torch.equal(low, high))


STOCK: dict[str, dict[str, object]] = {
    "ddp cap 5": {"bucket_cap_mb": 5},
    "ddp cap 400": {"bucket_cap_mb": 400},
    "ddp default": {},
    "ddp cap 100": {"bucket_cap_mb": 100},
    "ddp find_unused": {"find_unused_parameters": True},
    "ddp static_graph": {"static_graph": True},
}

SAMPLES, MANY_SAMPLES = 16, 48
"""Samples per rank and micro-batch: where the host takes longer than an H200, and where it takes half."""


class Passes:
    """All variants of one measurement, pass by pass."""

    def __init__(self, net: nn.Module, batches: Sequence[object], *, accumulation: int, windows: int) -> None:
        self.timed = Timed(net, batches, accumulation=accumulation, windows=windows)
        self.net, self.windows = net, windows
        self.turns: dict[str, list[Turn]] = {}
        self.failed: dict[str, str] = {}
        self.plan: CommPlan | None = None
        self.link: LinkModel | None = None
        self.stats: dict[str, object] = {}
        self.overlaps: list[float] = []

    def run(self, number: int) -> None:
        """Every variant once, in the other order each time, with those all are compared to in the middle."""
        half = len(STOCK) // 2
        names = [*list(STOCK)[:half], ALONE, OURS, *list(STOCK)[half:]]
        for name in names if number % 2 == 0 else reversed(names):
            if name in self.failed:
                continue
            if name == OURS:
                turn = self._ours()
            elif name == ALONE:
                turn = self.timed(self.net, full_warmup=number == 0)
            else:
                turn = self._stock(name, full_warmup=number == 0)
            if turn is not None:
                self.turns.setdefault(name, []).append(turn)

    def _stock(self, name: str, *, full_warmup: bool) -> Turn | None:
        turn = None
        try:
            call = DistributedDataParallel(self.net, gradient_as_bucket_view=True, **STOCK[name])
            turn = self.timed(call, call.no_sync, full_warmup=full_warmup)
        except Exception as error:
            self.failed[name] = str(error)[:300]
        call = None
        gc.collect()  # its hooks go with it
        self.net.zero_grad(set_to_none=True)
        return turn

    def _ours(self) -> Turn:
        """The first pass learns the plan; later ones start with it and look at the device's own times once,
        in a window of its own.
        """
        learn = self.plan is None
        every = WARMUP + self.windows + 1
        rest = {} if learn else {"warmup_steps": 0, "device_times_every": every}
        config = SchedulerConfig(**QUIET, **rest)
        with GradientScheduler(self.net, config=config, plan=self.plan, link=self.link) as scheduler:
            warmup = LEARNING if learn else WARMUP
            turn = self.timed(
                self.net, scheduler.no_sync, scheduler.step_end, warmup=warmup, full_warmup=learn
            )
            if not learn:
                self.timed.once_more(self.net, scheduler.no_sync, scheduler.step_end)
            self.plan, self.link, self.stats = scheduler.plan, scheduler.link, scheduler.stats()
        overlap = self.stats.get("overlap")
        if not learn and isinstance(overlap, float):
            self.overlaps.append(overlap)
        return turn

    @property
    def astray(self) -> set[str]:
        """Variants that once ended with different gradients on the ranks: they did not average."""
        return {
            name
            for name, turns in self.turns.items()
            if name != ALONE and not all(turn.averaged for turn in turns)
        }


def speed(
    net: nn.Module, batches: Sequence[object], accumulation: int, *, windows: int, seconds: float
) -> dict[str, object]:
    """Passes over all variants on one module for about ``seconds``, at least two.

    A variant whose ranks end with different gradients did not average them; its times are kept but it is
    never called the best (static_graph with no_sync stops synchronising in several torch versions).
    """
    passes = Passes(net, batches, accumulation=accumulation, windows=windows)
    gc.collect()
    gc.freeze()  # collections inside a window look at what the window made, not at the whole program
    begin = time.monotonic()
    try:
        for number in range(MOST_PASSES):
            started = time.monotonic()
            passes.run(number)
            ended = time.monotonic()
            if number and _slowest(ended - begin + ended - started) > seconds:
                break
    finally:
        gc.unfreeze()
    return compared(passes)


def _slowest(value: float) -> float:
    """The largest over ranks, so that all end after the same pass."""
    shared = torch.tensor(value, device=device())
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return shared.item()


def compared(passes: Passes) -> dict[str, object]:
    """Ratios ours / theirs inside each pass, their medians and spreads, overlap and the model's error."""
    plan, link = passes.plan, passes.link
    assert plan is not None
    ms = {
        name: [statistics.median(turn.ms) for turn in turns]
        for name, turns in passes.turns.items()
        if name not in passes.failed
    }
    stock = {name: series for name, series in ms.items() if name in STOCK and name not in passes.astray}
    best = min(stock, key=lambda name: statistics.median(_ratios(stock[name], ms[ALONE])), default=None)
    against = {
        "vs_default": "ddp default",
        "vs_best": best,
        "vs_find_unused": "ddp find_unused",
        "vs_static_graph": "ddp static_graph",
    }
    ratios = {
        key: _common.spread(_ratios(ms[OURS], stock[name])) for key, name in against.items() if name in stock
    }
    ratios["vs_alone"] = _common.spread(_ratios(ms[OURS], ms[ALONE]))
    differences = [mine - alone for mine, alone in zip(ms[OURS], ms[ALONE], strict=True)]
    busy = sum(link.predict_ms(b.strategy, b.nbytes) for b in plan.buckets) if link is not None else 0.0
    exposed = statistics.median(differences)
    # Below the spread of a host-bound step the difference says nothing: it is then unknown, not negative.
    known = exposed >= 0 and busy > 0 and _error_of_median(differences) <= busy / 2
    model = simulate(plan, link) if link is not None else None
    error = None
    if model is not None:
        predicted = [alone + model.exposed_ms for alone in ms[ALONE]]
        error = statistics.median(_ratios(predicted, ms[OURS])) - 1
    return {
        **{key: ratios[key]["median"] if key in ratios else None for key in against},
        "ratios": ratios,
        "best": best,
        "exposed_ms": exposed if exposed >= 0 else None,
        "exposed_ms_spread": _common.spread(differences),
        "exposed_ms_error": _error_of_median(differences),
        "busy_ms": busy,
        "overlap": 1 - exposed / busy if known else None,
        "overlap_by_events": statistics.median(passes.overlaps) if passes.overlaps else None,
        "overlaps_by_events": passes.overlaps,
        "model_exposed_ms": model.exposed_ms if model is not None else None,
        "model_error": error,
        "medians_ms": {name: statistics.median(series) for name, series in ms.items()},
        "host_ms": {
            name: statistics.median([v for turn in turns for v in turn.host_ms])
            for name, turns in passes.turns.items()
        },
        "failed": passes.failed,
        "not_averaged": sorted(passes.astray),
        "passes": len(ms[OURS]),
        "times_ms": {name: [turn.ms for turn in turns] for name, turns in passes.turns.items()},
        "plan": plan.explain(),
        "stats": {k: v for k, v in passes.stats.items() if k not in ("groups", "ranks")},
        "groups": passes.stats.get("groups"),
    }


def _ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def _error_of_median(values: Sequence[float]) -> float:
    """Standard error of a median: 0.93 interquartile ranges over the root of the number."""
    if len(values) < 2:
        return float("inf")
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return 0.93 * (high - low) / len(values) ** 0.5


def full_batches(net: nn.Module, samples: int) -> list[object]:
    """Four micro-batches of ``samples`` samples on this rank."""
    import _groot_full

    return [
        _groot_full.micro_batch(samples, model=net, device=str(device()), seed=10 * dist.get_rank() + k)
        for k in range(4)
    ]


def full_model(*, tiny: bool) -> tuple[nn.Module, list[object]]:
    """GR00T N1.6 in bfloat16 with parameters that get no gradient frozen, and four micro-batches."""
    import _groot_full

    net = _groot_full.build(tiny=tiny, device=str(device()), dropout=0.0)
    batches = full_batches(net, 2 if tiny else SAMPLES)
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
