"""Step time of stock DDP and of loongforge-comm on a slow link: two ranks in two network namespaces, 1 Gbit.

Says why and ends with code 0 where namespaces or the token-bucket filter are missing (see _comm_hosts.py).
All variants run in the same two processes, one step each in turn, so that drift of the machine hits all
alike, and each has connections of its own. The time of a step is the maximum over ranks of forward + backward
+ averaging; reported are medians with minimum and maximum.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import _common
import torch
import torch.distributed as dist
from _comm_hosts import MissingSupport, hosts, run_on
from loongforge_comm import GradientScheduler, SchedulerConfig
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

MAIN_BATCH = 384
"""Rows per rank: bandwidth time / backward is about 1.5 on a 2-core EPYC."""
HIDDEN_BATCH = 1024
"""Rows per rank at which bandwidth time / backward is below 0.9."""
CAPS = (1, 5, 25, 100)


class Block(nn.Module):
    """Residual block with tensors from 2 KiB to 4 MiB."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to the same."""
        return x + self.scale * self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """64.4 MB of float32; with ``swapped`` half of the blocks are registered where they do not run."""

    def __init__(self, *, swapped: bool = False, width: int = 512) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = [2048, 1536, 2048, 1024, 2048, 2048, 1536, 2048, 1024]
        order = list(range(len(inner)))
        if swapped:
            for a, b in ((0, 7), (2, 5)):
                order[a], order[b] = order[b], order[a]
        self.embed = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Block(width, inner[i]) for i in order)
        self.run_order = [order.index(i) for i in range(len(inner))]
        self.head = nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 64) to a scalar loss."""
        x = self.embed(x)
        for place in self.run_order:
            x = self.blocks[place](x)
        return self.head(x).square().mean()


class Stock:
    """A stock DDP variant."""

    def __init__(self, net: nn.Module, **options: object) -> None:
        group = dist.new_group()  # connections of its own, as the scheduler has: all are idle between turns
        self.call = DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True, **options)
        self.parameters = list(net.parameters())

    def step(self, x: Tensor) -> None:
        """Forward, backward with averaging, gradients dropped."""
        self.call(x).backward()
        for p in self.parameters:
            p.grad = None


class Ours(Stock):
    """loongforge-comm in mode ``hooks``."""

    def __init__(self, net: nn.Module, **settings: object) -> None:
        self.call = net
        self.parameters = list(net.parameters())
        self.scheduler = GradientScheduler(net, config=SchedulerConfig(heartbeat_interval_s=0, **settings))

    def step(self, x: Tensor) -> None:
        """The same, and the step border."""
        super().step(x)
        self.scheduler.step_end()


class Alone(Stock):
    """Forward and backward without communication."""

    def __init__(self, net: nn.Module) -> None:
        self.call = net
        self.parameters = list(net.parameters())


def variants(section: str) -> dict[str, Callable[[], Stock]]:
    """Builders by name."""
    plain = {
        "no communication": lambda: Alone(Net()),
        "ours": lambda: Ours(Net()),
        "ddp default": lambda: Stock(Net()),
    }
    sweep = {f"ddp cap {cap}": (lambda cap=cap: Stock(Net(), bucket_cap_mb=cap)) for cap in CAPS}
    if section == "hidden":
        return plain | {name: sweep[name] for name in ("ddp cap 1", "ddp cap 5")}
    if section == "order":
        return {
            "no communication": lambda: Alone(Net()),
            "ours, swapped": lambda: Ours(Net(swapped=True)),
            "ddp find_unused, swapped": lambda: Stock(Net(swapped=True), find_unused_parameters=True),
            "ddp static_graph, swapped": lambda: Stock(
                Net(swapped=True), find_unused_parameters=True, static_graph=True
            ),
            "ddp find_unused": lambda: Stock(Net(), find_unused_parameters=True),
            "ddp static_graph": lambda: Stock(Net(), find_unused_parameters=True, static_graph=True),
        }
    return plain | sweep


def worker(arguments: argparse.Namespace) -> None:
    """One rank inside its namespace."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, world = arguments.rank, arguments.world
    store = dist.TCPStore(arguments.address, 29400, world, is_master=rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(arguments.batch, 64, generator=generator)
    built = {name: build() for name, build in variants(arguments.section).items()}
    times: dict[str, list[float]] = {name: [] for name in built}
    backward: list[float] = []
    overlap: list[float] = []
    for round_ in range(arguments.warmup + arguments.repeat):
        for name, variant in built.items():
            dist.barrier()
            begin = time.perf_counter()
            variant.step(x)
            took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if round_ >= arguments.warmup:
                times[name].append(took.item())
                if isinstance(variant, Ours):
                    overlap.append(variant.scheduler.stats()["overlap"])
        if round_ >= arguments.warmup:
            backward.append(_backward_time(built["no communication"], x))
    ours = next(v for v in built.values() if isinstance(v, Ours))
    outcome = {
        "times": times,
        "backward_s": backward,
        "overlap": overlap,
        "stats": ours.scheduler.stats(),
        "plan": ours.scheduler.plan.to_json(),
        "link": ours.scheduler.link.to_json() if ours.scheduler.link else None,
        "bytes": sum(p.numel() * 4 for p in ours.parameters),
    }
    if rank == 0:
        Path(arguments.out).write_text(json.dumps(outcome))
    dist.barrier()
    os._exit(0)


def _backward_time(variant: Stock, x: Tensor) -> float:
    loss = variant.call(x)
    begin = time.perf_counter()
    loss.backward()
    took = time.perf_counter() - begin
    for p in variant.parameters:
        p.grad = None
    return took


def main() -> None:
    """Parse, run the sections, report."""
    parser = _common.parser(__doc__)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for name, kind in (("rank", int), ("world", int), ("batch", int), ("warmup", int), ("repeat", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    for name in ("address", "out"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--section", choices=("sweep", "order", "hidden"), help="run one section only")
    parser.add_argument("--rate", default="1gbit", help="rate of each link (tc syntax)")
    parser.add_argument("--keep", type=Path, help="folder of raw section results; existing ones are reused")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces are removed on the way out
    repeat = 5 if arguments.quick else 11
    raw: dict[str, dict[str, object]] = {}
    sections = [arguments.section] if arguments.section else ["sweep", "order", "hidden"]
    try:
        with hosts(2, arguments.rate) as places:
            for section in sections:
                batch = HIDDEN_BATCH if section == "hidden" else MAIN_BATCH
                given = {"section": section, "batch": batch, "warmup": 5, "repeat": repeat}
                raw[section] = _kept(arguments, section) or run_on(places, __file__, given, limit_s=300)
                if arguments.keep:
                    arguments.keep.mkdir(parents=True, exist_ok=True)
                    (arguments.keep / f"{section}.json").write_text(json.dumps(raw[section]))
    except MissingSupport as error:
        print(f"skipped: {error}")
        return
    rows, figures = report(raw)
    result = _common.result("comm_netns", rows=rows, figures=figures, repetitions=repeat, notes=NOTES)
    _common.finish(result, arguments.json)


NOTES = (
    "ratios are ours / theirs in time of a step (forward + backward + averaging), medians of steps in turn",
    "overlap = 1 - (averages complete - end of backward) / time the link was busy, median of measured steps",
    "overlap_by_control = 1 - (our step - step without communication) / time the link was busy",
    "rho = bytes / link rate over backward time without communication",
)


def _kept(arguments: argparse.Namespace, section: str) -> dict[str, object] | None:
    path = arguments.keep / f"{section}.json" if arguments.keep else None
    return json.loads(path.read_text()) if path is not None and path.is_file() else None


def report(raw: dict[str, dict[str, object]]) -> tuple[list[dict[str, object]], dict[str, float]]:
    """Rows per variant and the figures."""
    rows: list[dict[str, object]] = []
    figures: dict[str, float] = {}
    for section, outcome in raw.items():
        times = {name: [1e3 * t for t in series] for name, series in outcome["times"].items()}
        stats = outcome["stats"]
        link = json.loads(outcome["link"])["curves"]["ring"]
        slope = (link["ms"][-1] - link["ms"][-3]) / (link["nbytes"][-1] - link["nbytes"][-3])
        backward = 1e3 * statistics.median(outcome["backward_s"])
        rho = outcome["bytes"] * slope / backward
        median = {name: statistics.median(series) for name, series in times.items()}
        mine = next(name for name in median if name.startswith("ours"))
        control = 1 - (median[mine] - median["no communication"]) / stats["comm_ms_mean"]
        for name, series in times.items():
            row: dict[str, object] = {
                "section": section,
                "variant": name,
                "step_ms": _common.spread(series),
                "ours/this": median[mine] / median[name],
                "rho": rho,
            }
            if name == mine:
                row["overlap"] = _common.spread(outcome["overlap"])
                row["overlap_by_control"] = control
                row["buckets"] = stats["buckets"]
            rows.append(row)
        figures[f"rho_{section}"] = rho
        if section == "sweep":
            figures["vs_ddp_default"] = median[mine] / median["ddp default"]
            best = min((m, n) for n, m in median.items() if n.startswith("ddp"))
            figures["vs_ddp_best"] = median[mine] / best[0]
        elif section == "order":
            figures["vs_find_unused"] = median[mine] / median["ddp find_unused, swapped"]
            figures["vs_static_graph"] = median[mine] / median["ddp static_graph, swapped"]
        else:
            figures["overlap"] = statistics.median(outcome["overlap"])
            figures["overlap_by_control"] = control
            figures["vs_ddp_default_hidden"] = median[mine] / median["ddp default"]
    return rows, figures


if __name__ == "__main__":
    main()
