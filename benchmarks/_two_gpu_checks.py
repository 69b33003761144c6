"""Checks between two ranks for two_gpu.py: weights against stock DDP, graphs replayed, the link measured."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from comm_netns import Net
from loongforge_comm import (
    CommPlan,
    GradientScheduler,
    LinkModel,
    SchedulerConfig,
    gradient_specs,
    measure_link,
    plan_buckets,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

QUIET = {"heartbeat_interval_s": 0.0, "heartbeat_every": 0}


def device() -> torch.device:
    """This rank's device."""
    gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", dist.get_rank()) if gpu else torch.device("cpu")


def wait_device() -> None:
    """Let the device finish."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def train(call: nn.Module, net: nn.Module, scheduler: GradientScheduler | None, steps: int) -> list[Tensor]:
    """SGD with momentum on rank-dependent rows; returns the weights."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step * 2 + dist.get_rank())
        x = torch.randn(16, 64, generator=generator).to(next(net.parameters()))
        call(x).float().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step_end(step)
    return [p.detach().float().clone() for p in net.parameters()]


def gap(left: list[Tensor], right: list[Tensor]) -> float:
    """Largest absolute difference."""
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


def forced(net: nn.Module, strategy: str, mib: float = 4.0) -> CommPlan:
    """A plan whose buckets all use one strategy."""
    plan = plan_buckets(
        gradient_specs(net),
        LinkModel.from_alpha_beta(0.05, 10.0),
        strategy="simple",
        simple_bucket_mib=mib,
    )
    return replace(plan, buckets=tuple(replace(b, strategy=strategy) for b in plan.buckets))


def correctness(dtype: torch.dtype, steps: int, width: int) -> dict[str, float]:
    """Weights after some steps against stock DDP: modes, and strategies by forced plans."""

    def build() -> nn.Module:
        return Net(width=width).to(device(), dtype)

    base = build()
    want = train(DistributedDataParallel(base), base, None, steps)
    gaps = {}
    for mode in ("hooks", "simple", "plan-only"):
        net = build()
        with GradientScheduler(
            net, config=SchedulerConfig(**QUIET, mode=mode, link_budget_s=0.5)
        ) as scheduler:
            gaps[f"mode {mode}"] = gap(train(scheduler.module, net, scheduler, steps), want)
    for strategy in ("ring", "tree", "direct", "all_gather"):
        net = build()
        config = SchedulerConfig(**QUIET, warmup_steps=0)
        with GradientScheduler(net, config=config, plan=forced(net, strategy)) as scheduler:
            gaps[f"strategy {strategy}"] = gap(train(net, net, scheduler, steps), want)
    return gaps


def graph_replay(width: int) -> dict[str, float]:
    """One captured step replayed: reduction after the replay, and inside the graph, against stock eager
    averaging.
    """
    if device().type != "cuda":
        return {"skipped": 1.0}
    out = {}
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(device())
    base = Net(width=width).to(device())
    stock = DistributedDataParallel(base)  # kept: its hooks go with it
    stock(x).backward()
    want = [p.grad.clone() for p in base.parameters()]
    for inside in (False, True):
        net = Net(width=width).to(device())
        config = SchedulerConfig(**QUIET, buffers="off", link_budget_s=0.3)
        with GradientScheduler(net, config=config) as scheduler:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for step in range(5):
                    net(x).backward()
                    net.zero_grad(set_to_none=True)
                    scheduler.step_end(step)
            torch.cuda.current_stream().wait_stream(side)
            scheduler.attach_gradients()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for p in net.parameters():
                    p.grad.zero_()
                with nullcontext() if inside else scheduler.no_sync():
                    net(x).backward()
            for _ in range(2):
                graph.replay()
                if not inside:
                    scheduler.reduce_now()
            wait_device()
            out["inside" if inside else "after"] = gap([p.grad for p in net.parameters()], want)
            times = []
            for _ in range(10):
                wait_device()
                begin = time.perf_counter()
                graph.replay()
                if not inside:
                    scheduler.reduce_now()
                wait_device()
                times.append((time.perf_counter() - begin) * 1e3)
            out[f"{'inside' if inside else 'after'}_ms"] = statistics.median(times)
    return out


def link() -> dict[str, object]:
    """Alpha, beta and the curve of every collective."""
    model = measure_link(device=device(), budget_s=4.0)
    return {
        "link": model.to_json(),
        "table": {
            name: {
                "alpha_us": c.alpha_ms * 1e3,
                "gb_per_s": 1e-6 / c.beta_ms_per_byte if c.beta_ms_per_byte > 0 else None,
                "valid_to": c.valid_to,
            }
            for name, c in model.curves.items()
        },
    }
