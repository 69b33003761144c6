"""The sections of two_gpu.py; each runs on both ranks in processes of its own."""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from _two_gpu_checks import QUIET, correctness, device, forced, graph_replay, link, wait_device
from _two_gpu_speed import MANY_SAMPLES, full_batches, full_correctness, full_model, speed
from comm_netns import Net
from loongforge_comm import GradientScheduler, RankFailureError, SchedulerConfig
from torch import nn


class Part:
    """Runs parts of a section, keeps what they return or why they failed, and writes after each."""

    def __init__(self, out: Path, *, writes: bool) -> None:
        self.results: dict[str, object] = {}
        self._out, self._writes = out, writes

    def __call__(self, name: str, run: Callable[[], object]) -> None:
        """Run one part; both ranks see a failure at the same place or the section's limit ends them."""
        begin = time.monotonic()
        try:
            value = run()
        except Exception:
            value = {"error": traceback.format_exc()[-1500:]}
        self.results[name] = {"result": value, "seconds": time.monotonic() - begin}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if self._writes:
            self._out.write_text(json.dumps(self.results))


def section_main(part: Part, options: argparse.Namespace) -> None:
    """Correctness of modes and strategies, graphs, link, speed of a small model."""
    small = options.backend == "gloo"
    width, steps = (64, 5) if small else (256, 20)
    part("correctness_fp32", lambda: correctness(torch.float32, steps, width))
    part("correctness_bf16", lambda: correctness(torch.bfloat16, steps, width))
    part("link", link)
    part("graph_replay", lambda: graph_replay(width))


def section_full(part: Part, options: argparse.Namespace) -> None:
    """The full model: correctness over 5 steps, speed with accumulation 1 and 4, bound by host and by GPU."""
    small = options.backend == "gloo"
    made: list[tuple[nn.Module, list[object]]] = []

    def build() -> dict[str, float]:
        made.append(full_model(tiny=small))
        trained = [p for p in made[0][0].parameters() if p.requires_grad]
        return {
            "tensors": len(trained),
            "gradient_gb": sum(p.numel() * p.element_size() for p in trained) / 1e9,
        }

    part("build", build)
    if not made:
        return
    part("correctness", lambda: full_correctness(*made[0], steps=2 if small else 5))
    net, batches = made[0]
    # Seconds for the passes of a part; a dry run makes two.
    share = 0.0 if small else 0.5 if options.quick else 1.0
    part("accumulation_1", lambda: speed(net, batches, 1, windows=1 if small else 2, seconds=32 * share))
    part("accumulation_4", lambda: speed(net, batches, 4, windows=1, seconds=48 * share))
    many: list[object] = []
    part("many_samples", lambda: many.extend(full_batches(net, 3 if small else MANY_SAMPLES)))
    if many:
        part("gpu_bound_1", lambda: speed(net, many, 1, windows=1 if small else 2, seconds=28 * share))
        part("gpu_bound_4", lambda: speed(net, many, 4, windows=1, seconds=40 * share))


def section_fault(part: Part, options: argparse.Namespace) -> None:
    """Rank 1 is killed or stopped; rank 0 must name it."""

    def run() -> dict[str, object]:
        net = Net(width=64).to(device())
        config = SchedulerConfig(
            heartbeat_interval_s=0.2, heartbeat_timeout_s=3.0, timeout_s=15.0, link_budget_s=0.3
        )
        scheduler = GradientScheduler(net, config=config)
        x = torch.randn(16, 64, device=device())
        for step in range(6):
            net(x).backward()
            net.zero_grad()
            scheduler.step_end(step)
        wait_device()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL if options.section == "kill" else signal.SIGSTOP)
        begin = time.monotonic()
        text, ranks, kind = "", [], ""
        while time.monotonic() - begin < 20.0:
            try:
                # First: an aborted collective leaves an error of the library, the border of a step the names.
                scheduler.step_end()
                net(x).backward()
                net.zero_grad()
                wait_device()
            except RankFailureError as error:
                text, ranks = str(error), list(error.ranks)
                kind = f"RankFailureError after {kind}" if kind else "RankFailureError"
                break
            except Exception as error:
                kind = type(error).__name__
                time.sleep(0.2)
        return {
            "named": ranks == [1],
            "ranks": ranks,
            "kind": kind,
            "message": text,
            "s": time.monotonic() - begin,
        }

    part(options.section, run)


def section_algorithms(part: Part, options: argparse.Namespace) -> None:
    """Tree and ring buckets on their own NCCL communicators; what NCCL says it used."""

    def run() -> dict[str, object]:
        net = Net(width=256).to(device())
        config = SchedulerConfig(**QUIET, nccl_algorithms=True, warmup_steps=0)
        plan = forced(net, "ring")
        buckets = tuple(replace(b, strategy="tree" if b.index % 2 else "ring") for b in plan.buckets)
        with GradientScheduler(net, config=config, plan=replace(plan, buckets=buckets)):
            for _ in range(3):
                net(torch.randn(16, 64, device=device())).backward()
                net.zero_grad()
            wait_device()
        log = os.environ.get("NCCL_DEBUG_FILE", "")
        lines = Path(log).read_text().splitlines() if log and Path(log).is_file() else []
        chosen = [line for line in lines if "Algo" in line or "algo" in line]
        return {
            "lines": len(lines),
            "tree": sum("tree" in line.lower() for line in chosen),
            "ring": sum("ring" in line.lower() for line in chosen),
            "sample": chosen[:6] + chosen[-6:],
        }

    part("algorithms", run)


def section_sockets(part: Part, options: argparse.Namespace) -> None:
    """NCCL over sockets on the loopback, at the rate that gives."""
    small = options.backend == "gloo"
    net = Net(width=128 if small else 512).to(device())
    x = torch.randn(64 if small else 4096, 64, device=device())
    part("link", link)
    part("sockets", lambda: speed(net, [x], 1, windows=2, seconds=0 if small else 10))


def section_slow(part: Part, options: argparse.Namespace) -> None:
    """The same behind a limited loopback, with a backward about as long as the transfer."""
    small = options.backend == "gloo"
    net = Net(width=128 if small else 512).to(device())
    x = torch.randn(64 if small else 65536, 64, device=device())
    part("link", link)
    part("slow", lambda: speed(net, [x], 1, windows=2, seconds=0 if small else 40))


SECTIONS: dict[str, Callable[[Part, argparse.Namespace], None]] = {
    "main": section_main,
    "full": section_full,
    "kill": section_fault,
    "stop": section_fault,
    "algorithms": section_algorithms,
    "sockets": section_sockets,
    "slow": section_slow,
}
