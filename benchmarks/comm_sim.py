"""Error of the simulator against measured steps between network namespaces.

Two parts. ``caps``: stock DDP with caps 5 and 25 MB fits two numbers (bandwidth factor, packing cost), then
caps 1, 100, the default and our own plan are predicted. ``world``: the link is measured at two ranks, the
step of four ranks is predicted; its backward is a replay (each layer sleeps for a given time), because four
ranks cannot compute at once on two cores. Needs what benchmarks/_comm_hosts.py needs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import _common
import comm_netns
import torch
import torch.distributed as dist
from _comm_hosts import MissingSupport, hosts, run_on
from loongforge_comm import CommPlan, GradientScheduler, GradientSpec, LinkModel, SchedulerConfig
from loongforge_comm.link import Correction
from loongforge_comm.simulate import Contention, scale_link, simulate, stock_plan
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

FIT_CAPS = (5.0, 25.0)
PREDICT_CAPS = (1.0, 100.0, None)
LAYER_MS = 12.0
WORLD_RATE = "400mbit"


class Sleep(torch.autograd.Function):
    """Identity whose backward takes a given time without using a processor."""

    @staticmethod
    def forward(ctx: object, x: Tensor, ms: float) -> Tensor:
        """Remember the time."""
        ctx.ms = ms  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        """Sleep."""
        time.sleep(ctx.ms / 1e3)  # type: ignore[attr-defined]
        return grad, None


class Replay(nn.Module):
    """Twelve layers of 1 MiB whose backward is a replay: almost no arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(2**18)) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        """(1,) to a scalar."""
        for weight in self.weights:
            x = Sleep.apply(x + weight[:1], LAYER_MS)
        return x.sum()


def worker(arguments: argparse.Namespace) -> None:
    """One rank of either part."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, world = arguments.rank, arguments.world
    store = dist.TCPStore(arguments.address, 29400, world, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    caps = arguments.section == "caps"
    build: Callable[[], nn.Module] = comm_netns.Net if caps else Replay
    x = torch.randn(comm_netns.MAIN_BATCH, 64) if caps else torch.zeros(1, requires_grad=True)
    nets: dict[str, nn.Module] = {"alone": build()}
    choices = (*FIT_CAPS, *PREDICT_CAPS) if caps else (1.0, 4.0)
    for cap in choices:
        options = {"bucket_cap_mb": cap} if cap is not None else {}
        nets[str(cap)] = DistributedDataParallel(build(), gradient_as_bucket_view=True, **options)
    ours = build()
    scheduler = GradientScheduler(ours, config=SchedulerConfig(heartbeat_interval_s=0, link_budget_s=3.0))
    nets["ours"] = ours
    times: dict[str, list[float]] = {name: [] for name in nets}
    forward: list[float] = []
    ready: list[dict[str, float]] = []
    _record(nets["alone"], ready)
    for round_ in range(5 + arguments.repeat):
        for name, net in nets.items():
            dist.barrier()
            begin = time.perf_counter()
            loss = net(x)
            middle = time.perf_counter()
            if name == "alone":
                ready.append({"": middle})
            loss.backward()
            took = torch.tensor(time.perf_counter() - middle, dtype=torch.float64)
            for p in net.parameters():
                p.grad = None
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if name == "ours":
                scheduler.step_end()
            if round_ >= 5:
                times[name].append(took.item() * 1e3)
                forward.append((middle - begin) * 1e3)
    kept = [{n: (t - r[""]) * 1e3 for n, t in r.items() if n} for r in ready[5:]]
    names = [n for n, _ in nets["alone"].named_parameters()]
    outcome = {
        "times": times,
        "ready": {n: statistics.median(r[n] for r in kept) for n in names},
        "sizes": {n: p.numel() for n, p in nets["alone"].named_parameters()},
        "link": scheduler.link.to_json() if scheduler.link else "",
        "plan": scheduler.plan.to_json(),
    }
    if rank == 0:
        Path(arguments.out).write_text(json.dumps(outcome))
    dist.barrier()
    os._exit(0)


def _record(net: nn.Module, ready: list[dict[str, float]]) -> None:
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: ready[-1].__setitem__(name, time.perf_counter())
        )


def run(section: str, count: int, rate: str, repeat: int) -> dict[str, object]:
    """Run a part in its namespaces."""
    with hosts(count, rate) as places:
        return run_on(places, __file__, {"section": section, "repeat": repeat}, limit_s=240)


def specs(outcome: dict[str, object]) -> list[GradientSpec]:
    """Gradients with the ready times of the run without communication."""
    return [
        GradientSpec(
            name=name,
            shape=(outcome["sizes"][name],),
            stride=(1,),
            dtype="float32",
            device="cpu",
            ready_ms=ready,
        )
        for name, ready in outcome["ready"].items()
    ]


def predict(plan: CommPlan, link: LinkModel, factor: float, pack: float) -> float:
    """Milliseconds from the start of backward to the last average."""
    corrected = link.corrected({name: Correction(factor=factor) for name in link.curves})
    return simulate(plan, corrected, contention=Contention(pack_ms_per_mib=pack)).finish_ms


def caps_rows(outcome: dict[str, object]) -> list[dict[str, object]]:
    """Fit on two caps, predict the rest."""
    link = LinkModel.from_json(outcome["link"])
    measured = {name: statistics.median(series) for name, series in outcome["times"].items()}
    gradients = specs(outcome)
    plans = {str(cap): stock_plan(gradients, link, cap_mib=cap) for cap in (*FIT_CAPS, *PREDICT_CAPS)}
    plans["ours"] = replace(CommPlan.from_json(outcome["plan"]), gradients=plans["1.0"].gradients)
    plans["ours"] = _with_ready(plans["ours"], outcome["ready"])
    grid = [(f / 100, p / 100) for f in range(80, 180, 2) for p in range(0, 160, 5)]
    errors = {
        pair: sum((predict(plans[str(c)], link, *pair) / measured[str(c)] - 1) ** 2 for c in FIT_CAPS)
        for pair in grid
    }
    factor, pack = min(errors, key=errors.__getitem__)
    rows = []
    for name, plan in plans.items():
        value = predict(plan, link, factor, pack)
        rows.append(
            {
                "part": "caps",
                "plan": name if name != "None" else "default",
                "used": "fit" if name in map(str, FIT_CAPS) else "predicted",
                "measured_ms": _common.spread(outcome["times"][name]),
                "model_ms": value,
                "error": value / measured[name] - 1,
                "factor": factor,
                "pack_ms_per_mib": pack,
            }
        )
    return rows


def _with_ready(plan: CommPlan, ready: dict[str, float]) -> CommPlan:
    buckets = tuple(replace(b, ready_ms=max(ready[p.name] for p in b.pieces)) for b in plan.buckets)
    return replace(plan, buckets=buckets)


def world_rows(two: dict[str, object], four: dict[str, object]) -> list[dict[str, object]]:
    """The link of two ranks, carried to four, predicts the steps of four."""
    link = LinkModel.from_json(two["link"])
    rows = []
    for name, outcome, cost in (("2 ranks", two, link), ("4 ranks", four, scale_link(link, 4))):
        gradients = specs(two)
        for cap in (1.0, 4.0):
            value = simulate(stock_plan(gradients, cost, cap_mib=cap), cost).finish_ms
            series = outcome["times"][str(cap)]
            rows.append(
                {
                    "part": "world",
                    "plan": f"{name}, cap {cap:g}",
                    "used": "predicted",
                    "measured_ms": _common.spread(series),
                    "model_ms": value,
                    "error": value / statistics.median(series) - 1,
                }
            )
    return rows


def main() -> None:
    """Parse, run, report."""
    parser = _common.parser(__doc__)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for name in ("rank", "world", "repeat"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    for name in ("address", "out", "section"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    repeat = 5 if arguments.quick else 9
    try:
        rows = caps_rows(run("caps", 2, "1gbit", repeat))
        rows += world_rows(run("world", 2, WORLD_RATE, repeat), run("world", 4, WORLD_RATE, repeat))
    except MissingSupport as error:
        print(f"skipped: {error}")
        return
    predicted = [abs(row["error"]) for row in rows if row["used"] == "predicted"]
    figures = {
        "worst_error": max(predicted),
        "worst_error_caps": max(
            abs(r["error"]) for r in rows if r["part"] == "caps" and r["used"] == "predicted"
        ),
        "worst_error_world": max(abs(r["error"]) for r in rows if r["part"] == "world"),
    }
    result = _common.result("comm_sim", rows=rows, figures=figures, repetitions=repeat)
    _common.finish(result, arguments.json)


if __name__ == "__main__":
    main()
