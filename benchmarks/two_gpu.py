"""Two GPUs with NCCL against stock DDP: correctness, speed, link, graphs, lost ranks, a slow link, simulator
error.

Each section runs in two processes of its own with its own time limit; the JSON is written after every
section, and
inside a section after every part, so that a failure or a limit loses one part only. NVLink multicast stays
off.
``--backend gloo`` is a dry run on CPUs with small models.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import _common
import torch
import torch.distributed as dist
from comm_netns import Net
from loongforge_comm import (
    CommPlan,
    GradientScheduler,
    LinkModel,
    RankFailureError,
    SchedulerConfig,
    gradient_specs,
    measure_link,
    plan_buckets,
)
from loongforge_comm.simulate import simulate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

LIMITS_S = {"main": 120, "full": 120, "kill": 40, "stop": 40, "algorithms": 40, "sockets": 60}
ORDER = ("main", "full", "kill", "stop", "algorithms", "sockets")
QUIET = {"heartbeat_interval_s": 0.0, "heartbeat_every": 0}


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


def device() -> torch.device:
    """This rank's device."""
    gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", dist.get_rank()) if gpu else torch.device("cpu")


def wait_device() -> None:
    """Let the device finish."""
    if device().type == "cuda":
        torch.cuda.synchronize()


# ---- correctness
# ------------------------------------------------------------------------------------------------


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


# ---- speed
# --------------------------------------------------------------------------------------------------------


class Timed:
    """Times accumulation windows of one variant: forwards, backwards and averaging."""

    def __init__(self, net: nn.Module, batches: list[object], *, accumulation: int, repeat: int) -> None:
        self.net, self.batches, self.accumulation, self.repeat = net, batches, accumulation, repeat

    def __call__(
        self, call: nn.Module, no_sync: Callable[[], object], border: Callable[[], None]
    ) -> list[float]:
        """Milliseconds of each window, maximum over ranks."""
        times = []
        for k in range(self.repeat + 5):
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
            self.net.zero_grad(set_to_none=True)
            border()
            if k >= 5:
                times.append(took.item() * 1e3)
        return times


def speed(
    net: nn.Module, batches: list[object], accumulation: int, repeat: int, *, sweep: bool
) -> dict[str, object]:
    """Stock variants and ours on one module; hooks of one are gone before the next begins."""
    timed = Timed(net, batches, accumulation=accumulation, repeat=repeat)
    stock: dict[str, dict[str, object]] = {"ddp default": {}}
    if sweep:
        stock |= {f"ddp cap {cap}": {"bucket_cap_mb": cap} for cap in (5, 100, 400)}
        stock["ddp static_graph"] = {"static_graph": True}
    stock["ddp find_unused"] = {"find_unused_parameters": True}
    rows: dict[str, object] = {}
    rows["no communication"] = timed(net, nullcontext, lambda: None)
    for name, options in stock.items():
        if name == "ddp static_graph" and accumulation > 1:
            continue  # static_graph with no_sync stops synchronising in several torch versions
        try:
            call = DistributedDataParallel(net, gradient_as_bucket_view=True, **options)
            rows[name] = timed(call, call.no_sync, lambda: None)
        except Exception as error:
            rows[name] = {"error": str(error)[:300]}
        call = None
        gc.collect()
        net.zero_grad(set_to_none=True)
    scheduler = GradientScheduler(net, config=SchedulerConfig(**QUIET))
    rows["ours"] = timed(net, scheduler.no_sync, scheduler.step_end)
    stats, plan = scheduler.stats(), scheduler.plan
    model = simulate(plan, scheduler.link) if scheduler.link is not None else None
    scheduler.close()
    medians = {n: statistics.median(v) for n, v in rows.items() if isinstance(v, list)}
    # Below the spread of a host-bound step the difference says nothing: it is then unknown, not negative.
    exposed = medians["ours"] - medians["no communication"]
    known = exposed >= 0
    ddp = {n: m for n, m in medians.items() if n.startswith("ddp")}
    return {
        "times_ms": rows,
        "medians_ms": medians,
        "vs_default": medians["ours"] / medians["ddp default"] if "ddp default" in medians else None,
        "vs_best": medians["ours"] / min(ddp.values()) if ddp else None,
        "vs_find_unused": medians["ours"] / medians["ddp find_unused"]
        if "ddp find_unused" in medians
        else None,
        "exposed_ms": exposed if known else None,
        "overlap": 1 - exposed / plan_comm_ms(plan, scheduler.link) if known else None,
        "plan": plan.explain(),
        "stats": {k: v for k, v in stats.items() if k not in ("groups", "ranks")},
        "model_exposed_ms": model.exposed_ms if model is not None else None,
        "model_step_ms": medians["no communication"] + model.exposed_ms if model is not None else None,
        "model_error": (medians["no communication"] + model.exposed_ms) / medians["ours"] - 1
        if model and known
        else None,
    }


def plan_comm_ms(plan: CommPlan, used: LinkModel | None) -> float:
    """Sum of the collectives' times on the idle link."""
    return (
        sum(used.predict_ms(b.strategy, b.nbytes) for b in plan.buckets) if used is not None else float("nan")
    )


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


# ---- sections
# -----------------------------------------------------------------------------------------------------


def section_main(part: Part, options: argparse.Namespace) -> None:
    """Correctness of modes and strategies, graphs, link, speed of a small model."""
    small = options.backend == "gloo"
    width, steps = (64, 5) if small else (256, 20)
    part("correctness_fp32", lambda: correctness(torch.float32, steps, width))
    part("correctness_bf16", lambda: correctness(torch.bfloat16, steps, width))
    part("link", link)
    part("graph_replay", lambda: graph_replay(width))


def section_full(part: Part, options: argparse.Namespace) -> None:
    """The full model: correctness over 5 steps, speed with accumulation 1 and 4."""
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
    repeat = 3 if small else 5 if options.quick else 8
    part("correctness", lambda: full_correctness(*made[0], steps=2 if small else 5))
    part("accumulation_1", lambda: speed(*made[0], 1, repeat, sweep=True))
    part("accumulation_4", lambda: speed(*made[0], 4, max(3, repeat // 2), sweep=False))


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
                net(x).backward()
                net.zero_grad()
                wait_device()
                scheduler.step_end()
            except RankFailureError as error:
                text, ranks, kind = str(error), list(error.ranks), "RankFailureError"
                break
            except Exception as error:
                kind = type(error).__name__
                lost = scheduler._team.waiter.lost
                if lost:
                    text, ranks = (
                        scheduler._team.waiter.message("aborted", lost, time.monotonic() - begin),
                        list(lost),
                    )
                    break
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
    """NCCL over sockets on the loopback, limited by a token bucket where the rights allow it."""
    small = options.backend == "gloo"
    net = Net(width=128 if small else 512).to(device())
    x = torch.randn(64 if small else 4096, 64, device=device())
    part("link", link)
    part("sockets", lambda: speed(net, [x], 1, 3 if small else 6, sweep=True))


SECTIONS: dict[str, Callable[[Part, argparse.Namespace], None]] = {
    "main": section_main,
    "full": section_full,
    "kill": section_fault,
    "stop": section_fault,
    "algorithms": section_algorithms,
    "sockets": section_sockets,
}


def worker(options: argparse.Namespace) -> None:
    """One rank of one section."""
    warnings.filterwarnings("ignore")
    rank = options.rank
    store = dist.TCPStore("127.0.0.1", options.port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    if options.backend == "nccl":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        options.backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    part = Part(Path(options.out), writes=rank == 0)
    SECTIONS[options.section](part, options)
    os._exit(0)


def run_section(section: str, options: argparse.Namespace, limit_s: float) -> dict[str, object]:
    """Start two processes, end them at the limit, return what was written."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1", **os.environ}
    limited = False
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        if section == "algorithms":
            environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING,COLL,INIT"}
        if section == "sockets":
            environment |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
            limited = options.backend == "nccl" and _limit_loopback("add")
        if section in ("kill", "stop"):
            environment |= {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
        processes = []
        for rank in range(2):
            command = [sys.executable, __file__, "--worker", "--section", section, "--rank", str(rank)]
            command += ["--port", str(port), "--backend", options.backend, "--out", str(out)]
            command += ["--quick"] if options.quick else []
            log = (
                {"NCCL_DEBUG_FILE": str(Path(folder) / f"nccl{rank}.txt")} if section == "algorithms" else {}
            )
            processes.append(subprocess.Popen(command, env={**environment, **log}))
        begin = time.monotonic()
        waited = processes[:1] if section in ("kill", "stop") else processes
        codes: list[int | None] = []
        for process in waited:
            try:
                codes.append(process.wait(max(1.0, limit_s - (time.monotonic() - begin))))
            except subprocess.TimeoutExpired:
                codes.append(None)
        for process in processes:
            process.kill()
            process.wait()
        if limited:
            _limit_loopback("del")
        found = json.loads(out.read_text()) if out.is_file() else {}
        return {
            "exit_codes": codes,
            "seconds": time.monotonic() - begin,
            "rate_limited": limited,
            "parts": found,
        }


def _limit_loopback(action: str) -> bool:
    limit = ["tbf", "rate", "8gbit", "burst", "4mb", "latency", "50ms"] if action == "add" else []
    try:
        done = subprocess.run(
            ["tc", "qdisc", action, "dev", "lo", "root", *limit], check=False, capture_output=True
        )
    except FileNotFoundError:
        return False
    return done.returncode == 0


def figures(sections: dict[str, dict[str, object]]) -> dict[str, object]:
    """Flat figures from whatever sections succeeded."""

    def result(section: str, part: str) -> dict[str, object]:
        entry = sections.get(section, {}).get("parts", {}).get(part, {})
        value = entry.get("result") if isinstance(entry, dict) else None
        return value if isinstance(value, dict) else {}

    flat: dict[str, object] = {}
    for kind in ("fp32", "bf16"):
        gaps = [v for v in result("main", f"correctness_{kind}").values() if isinstance(v, float)]
        flat[f"largest_gap_{kind}"] = max(gaps) if gaps else None
    flat["largest_gap_full_bf16"] = result("full", "correctness").get("largest_gap")
    for name in ("accumulation_1", "accumulation_4"):
        for key in ("vs_default", "vs_best", "vs_find_unused", "overlap", "exposed_ms", "model_error"):
            flat[f"{name}_{key}"] = result("full", name).get(key)
    for key in ("vs_default", "vs_best", "vs_find_unused", "overlap", "model_error"):
        flat[f"sockets_{key}"] = result("sockets", "sockets").get(key)
    for kind in ("kill", "stop"):
        flat[f"{kind}_named"] = result(kind, kind).get("named")
        flat[f"{kind}_s"] = result(kind, kind).get("s")
    for key, value in result("main", "graph_replay").items():
        flat[f"graph_{key}"] = value
    return flat


def main() -> None:
    """Parse, run the sections within the budget, write after each, print the table last."""
    parser = _common.parser(__doc__)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--sections", default=",".join(ORDER), help="comma-separated, in order of importance")
    parser.add_argument("--budget-s", type=float, default=500.0, help="seconds for everything")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    for name in ("rank", "port"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    for name in ("section", "out"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    begin = time.monotonic()
    sections: dict[str, dict[str, object]] = {}
    rows: list[dict[str, object]] = []
    for section in options.sections.split(","):
        left = options.budget_s - (time.monotonic() - begin)
        if left < 15:
            rows.append({"section": section, "part": "-", "state": "no time left"})
            continue
        sections[section] = run_section(section, options, min(LIMITS_S[section], left))
        for part, entry in sections[section]["parts"].items():
            failed = isinstance(entry["result"], dict) and "error" in entry["result"]
            rows.append(
                {
                    "section": section,
                    "part": part,
                    "state": "failed" if failed else "ok",
                    "seconds": entry["seconds"],
                    "result": _short(entry["result"]),
                }
            )
        outcome = _common.result("two_gpu", rows=rows, figures=figures(sections), repetitions=8)
        outcome["sections"] = sections
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(outcome, indent=1) + "\n")
    _common.finish({k: v for k, v in outcome.items() if k != "sections"}, None)


def _short(value: object) -> str:
    if isinstance(value, dict):
        value = {k: v for k, v in value.items() if k not in ("plan", "stats", "times_ms", "link", "sample")}
    return json.dumps(value)[:400]


if __name__ == "__main__":
    main()
