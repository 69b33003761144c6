"""Memory on a GPU: our allocator against torch's two, in the eager step of a GR00T-N1.6-shaped model.

Every column is a process of its own, because torch takes an allocator once per process. Columns: ``native``
(torch's caching allocator), ``expandable`` (expandable_segments), ``ours_runfit`` (global mode without a
plan), ``ours_plan`` (virtual memory) and ``ours_block`` (one driver block of the size that ``ours_plan``
needed). Sections: eager step 1x16 and 4x4, random resolutions, captured graph beside eager work,
record_stream stress with poisoned frees, out of memory, pinned host memory, allocation calls alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import _common

GIB = 1 << 30
REPORTED = (
    "step_source", "planned_hit_rate", "step_allocations", "alloc_ms", "step_survivors", "step_device_calls",
)  # fmt: skip
TIMED = ("step", "step44", "dynamic", "calls")
OURS = ("ours_runfit", "ours_plan", "ours_block")


def main() -> None:
    parser = _common.parser(__doc__)
    parser.add_argument("--only", default="", help="comma-separated sections")
    parser.add_argument(
        "--budget-s", type=float, default=520.0, help="stop starting processes after this time"
    )
    parser.add_argument("--rounds", type=int, default=0, help="interleaved rounds (default 3, quick 1)")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _worker(json.loads(options.worker))
        return
    import torch  # noqa: F401  so that the result describes the GPU

    rounds = options.rounds or (1 if options.quick else 3)
    run = Runner(quick=options.quick, only=options.only, budget_s=options.budget_s, rounds=rounds)
    run.all()
    outcome = _common.result(
        "mem_gpu", rows=run.rows, figures=run.figures(), repetitions=run.rounds, notes=run.notes
    )
    _common.finish(outcome, options.json)


def schedule(rounds: int) -> list[tuple[str, str, dict[str, object]]]:
    """Return what is timed, most important first, so that a run cut short has lost the least.

    Rounds of columns are interleaved, because a host-bound step follows the clock of the machine.
    """
    columns = ["native", "ours_plan", "ours_runfit", "expandable"]
    steps = [
        [("step", c, {"round": r}) for c in (columns if r % 2 == 0 else columns[::-1])] for r in range(rounds)
    ]
    steps44 = [
        [
            ("step44", c, {"round": r})
            for c in (("native", "ours_plan") if r % 2 == 0 else ("ours_plan", "native"))
        ]
        for r in range(max(1, rounds - 1))
    ]
    out = [*steps[0], ("dynamic", "ours_plan", {}), ("dynamic", "native", {})]
    out += steps[1] if rounds > 1 else []
    out += [*steps44[0], ("budget", "native", {}), ("dynamic", "expandable", {}), ("step", "ours_block", {})]
    for later in range(2, rounds):
        out += [*steps[later], *(steps44[later - 1] if later - 1 < len(steps44) else [])]
    return [*out, ("calls", "native", {}), ("calls", "ours_plan", {}), ("dynamic", "ours_runfit", {})]


class Runner:
    """Starts the worker processes and collects what they measured."""

    def __init__(self, *, quick: bool, only: str, budget_s: float, rounds: int) -> None:
        self.quick, self.only = quick, {x for x in only.split(",") if x}
        self.end = time.monotonic() + budget_s
        self.rows: list[dict[str, object]] = []
        self.notes: list[str] = []
        self.rounds = rounds

    def all(self) -> None:
        """Run every section that was asked for."""
        # The checks measure no time, so they share the GPU; everything after them runs alone.
        checks = [(name, "ours_plan") for name in ("graph", "stress", "oom", "control", "offload")]
        checks += [("pool", "native"), ("pinned", "native")]
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(lambda check: self.start(*check), checks))
        need = 0.0
        for section, column, more in schedule(self.rounds):
            if column == "ours_block":
                more = {**more, "pool_gb": need * 1.3 if need else None}
            row = self.start(section, column, **more)
            if row and (section, column) == ("step", "ours_plan") and not row.get("error"):
                need = float(row["peak_reserved_gb"])

    def start(self, section: str, column: str, **more: object) -> dict[str, object] | None:
        """Run one section of one column in a process of its own; returns its row."""
        if self.only and section not in self.only:
            return None
        left = self.end - time.monotonic()
        if left < 15:
            self.notes.append(f"{section}/{column} was not started: out of time")
            return None
        job = {"section": section, "column": column, "quick": self.quick, **more}
        environment = dict(os.environ)
        environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        environment.pop("PYTORCH_ALLOC_CONF", None)
        if column == "expandable":
            environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(job)]
        # One fixed set of cores for whatever is timed: moving between sockets costs more than allocators.
        cores = sorted(os.sched_getaffinity(0))
        pinned = cores[-4:] if section in TIMED and len(cores) >= 8 else cores
        row: dict[str, object] = {"section": section, "column": column, **more}
        started = time.monotonic()
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=min(left, 150), check=False,
                preexec_fn=lambda: os.sched_setaffinity(0, pinned),
            )  # fmt: skip
            last = [line for line in done.stdout.splitlines() if line.startswith("{")]
            row |= json.loads(last[-1]) if last else {"error": (done.stderr or "no output")[-1500:]}
            if done.returncode != 0 and "error" not in row:
                row["error"] = f"exit status {done.returncode}: {done.stderr[-800:]}"
        except subprocess.TimeoutExpired:
            row["error"] = "timed out"
        row["wall_s"] = round(time.monotonic() - started, 1)
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        return row

    def of(self, section: str, column: str, key: str) -> list[float]:
        """Return the values of one key over the rounds."""
        rows = [r for r in self.rows if r["section"] == section and r["column"] == column]
        values = [r.get(key) for r in rows]
        return [float(v) for v in values if isinstance(v, int | float | bool)]

    def figures(self) -> dict[str, float | int | bool | str | None]:
        """Return the figures that the claims name."""
        out: dict[str, float | int | bool | str | None] = {}

        def ratio(name: str, a: list[float], b: list[float]) -> None:
            out[name] = (
                statistics.median(a) / statistics.median(b) if a and b and statistics.median(b) else None
            )

        native = self.of("step", "native", "step_ms")
        pairs = zip(self.of("step", "ours_plan", "step_ms"), native, strict=False)
        ratios = [a / b for a, b in pairs]
        out["step_ratio_vs_native"] = statistics.median(ratios) if ratios else None
        out["step_ratio_vs_native_min"] = min(ratios, default=None)
        out["step_ratio_vs_native_max"] = max(ratios, default=None)
        fastest = "step_fastest_ms"
        ratio(
            "step_ratio_of_fastest", self.of("step", "ours_plan", fastest), self.of("step", "native", fastest)
        )
        ratio(
            "step_ratio_vs_expandable",
            self.of("step", "ours_plan", "step_ms"),
            self.of("step", "expandable", "step_ms"),
        )
        ratio("step_ratio_runfit_vs_native", self.of("step", "ours_runfit", "step_ms"), native)
        ratio("step_ratio_block_vs_native", self.of("step", "ours_block", "step_ms"), native)
        ratio(
            "step44_ratio_vs_native",
            self.of("step44", "ours_plan", "step_ms"),
            self.of("step44", "native", "step_ms"),
        )
        calls = self.of("step", "ours_plan", "driver_calls_after_step2") + self.of(
            "step", "ours_block", "driver_calls_after_step2"
        )
        out["driver_calls_after_step2"] = max(calls) if calls else None
        for column in ("native", "expandable", "ours_runfit", "ours_plan"):
            found = self.of("dynamic", column, "peak_ratio")
            out["dynamic_peak_ratio" if column == "ours_plan" else f"dynamic_peak_ratio_{column}"] = (
                found[0] if found else None
            )
        for name, section, column, key in (
            ("pinned_ratio", "pinned", "native", "ours_ratio"),
            ("pinned_ratio_torch", "pinned", "native", "torch_ratio"),
            ("graph_bit_equal", "graph", "ours_plan", "bit_equal"),
            ("offload_bit_equal", "offload", "ours_plan", "bit_equal"),
            ("stress_corrupted", "stress", "ours_plan", "corrupted"),
            ("stress_rounds", "stress", "ours_plan", "rounds"),
            ("control_corrupted", "control", "ours_plan", "corrupted"),
            ("budget_predicted_over_measured", "budget", "native", "ratio"),
            ("alloc_ms_per_step", "step", "ours_plan", "alloc_ms"),
        ):
            found = self.of(section, column, key)
            out[name] = found[-1] if found else None
        return out


# ---- workers


def _worker(job: dict[str, object]) -> None:
    try:
        row = SECTIONS[str(job["section"])](job)
    except Exception:
        row = {"error": traceback.format_exc()[-1800:]}
    print(json.dumps(row), flush=True)


def _orchestrator(job: dict[str, object]) -> object | None:
    """Install our allocator for an ``ours`` column; None for torch's own."""
    column = str(job["column"])
    if column not in OURS:
        return None
    from loongforge_mem import MemoryConfig, MemoryOrchestrator

    block = column == "ours_block"
    return MemoryOrchestrator(
        MemoryConfig(
            mode="global",
            backend="cuda" if block else "vmm",
            pool_gb=float(job["pool_gb"]) if block and job.get("pool_gb") else None,  # type: ignore[arg-type]
            plan=column != "ours_runfit",
            # The clock is read only where its figures are asked for, after the measured steps.
            timing=job["section"] == "calls",
        )
    )


def _build(torch, samples: int):
    from _groot_shape import FULL, GrootShape, make_batch

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = GrootShape(FULL)
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    return model, optimizer, make_batch(FULL, samples, "cuda", torch.bfloat16), FULL


def _memory(torch, orchestrator) -> dict[str, float]:
    if orchestrator is None:
        raw = torch.cuda.memory_stats()
        return {
            "peak_reserved_gb": raw["reserved_bytes.all.peak"] / GIB,
            "peak_requested_gb": raw["requested_bytes.all.peak"] / GIB,
            "driver_calls": raw["num_device_alloc"],
        }
    raw = orchestrator.stats()
    return {
        "peak_reserved_gb": raw["reserved_bytes.peak"] / GIB,
        "peak_requested_gb": raw["requested_bytes.peak"] / GIB,
        "driver_calls": raw["device_allocs"] + raw["device_commits"],
    }


def _step_section(job: dict[str, object]) -> dict[str, object]:
    return _steps(job, micro_batches=1, samples=16)


def _step44_section(job: dict[str, object]) -> dict[str, object]:
    return _steps(job, micro_batches=4, samples=4)


def _steps(job: dict[str, object], *, micro_batches: int, samples: int) -> dict[str, object]:
    import torch
    from loongforge_mem import _core

    orchestrator = _orchestrator(job)
    model, optimizer, batch, _ = _build(torch, samples)
    if orchestrator is not None:
        orchestrator.attach(model, optimizer)
    losses: list[torch.Tensor] = []

    def step() -> None:
        for _ in range(micro_batches):
            loss = model(batch)["loss"] / micro_batches
            loss.backward()
            losses.append(loss.detach().clone())
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def whole() -> None:
        if orchestrator is None:
            step()
        else:
            with orchestrator.step():
                step()

    times, reports = [], []
    warm, count = 6, 10 if job["quick"] else 16
    after_two = 0.0
    for index in range(warm + count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        whole()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
        if index == 1:
            after_two = _memory(torch, orchestrator)["driver_calls"]
        if orchestrator is not None and index in (0, 1, 2, warm + count - 1):
            s = orchestrator.stats()
            reports.append({k: s.get(k) for k in REPORTED})
    measured = times[warm:]
    if orchestrator is not None:
        _core.set_timing(True)
        for _ in range(3):
            whole()
    memory = _memory(torch, orchestrator)
    row: dict[str, object] = {
        "step_ms": statistics.median(measured),
        "step_fastest_ms": min(measured),
        "step_ms_spread": _common.spread(measured),
        "first_steps_ms": [round(t, 1) for t in times[:warm]],
        "driver_calls_after_step2": memory["driver_calls"] - after_two,
        "fragmentation": 1 - memory["peak_requested_gb"] / memory["peak_reserved_gb"],
        "loss_last": float(losses[-1]),
        **memory,
    }
    if orchestrator is not None:
        s = orchestrator.stats()
        row |= {"reports": reports, "alloc_ms": s["alloc_ms"]}
        keys = ("alloc.p50_ns", "alloc.p99_ns", "alloc.p999_ns", "alloc.within_10us", "free.p99_ns", "plans",
                "plan_bytes", "touched_bytes.peak", "stream_transfers", "deferred_frees", "dissolved_plans",
                "unknown_frees", "misses.larger", "misses.busy", "misses.beyond_end", "misses.unplanned",
                "persistent_bytes.current", "migratable_bytes.current", "ephemeral_bytes.peak")  # fmt: skip
        row |= {key: s.get(key) for key in keys}
    return row


def _dynamic_section(job: dict[str, object]) -> dict[str, object]:
    import random

    import torch
    from _groot_shape import make_batch

    orchestrator = _orchestrator(job)
    model, optimizer, _, shape = _build(torch, 1)
    if orchestrator is not None:
        orchestrator.attach(model, optimizer)
    draw = random.Random(7)
    sizes = [(28 * draw.randint(4, 12), draw.randint(16, 128)) for _ in range(20 if job["quick"] else 50)]
    times = []
    for index, (size, text) in enumerate(sizes):
        batch = make_batch(shape, 16, "cuda", torch.bfloat16, image_size=size, text_tokens=text, seed=index)
        torch.cuda.synchronize()
        begin = time.perf_counter()

        def step(batch=batch) -> None:
            model(batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        if orchestrator is None:
            step()
        else:
            with orchestrator.step():
                step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
        del batch
    memory = _memory(torch, orchestrator)
    row: dict[str, object] = {
        "peak_ratio": memory["peak_reserved_gb"] / memory["peak_requested_gb"],
        "step_ms": statistics.median(times),
        "steps": len(sizes),
        **memory,
    }
    if orchestrator is not None:
        s = orchestrator.stats()
        keys = (
            "plans",
            "dissolved_plans",
            "planned_hits",
            "touched_bytes.peak",
            "misses.larger",
            "misses.busy",
        )
        row |= {key: s.get(key) for key in keys}
    return row


def _check_section(job: dict[str, object]) -> dict[str, object]:
    """One of the package's own checks on a GPU; see loongforge_mem.selfcheck."""
    from loongforge_mem.selfcheck import CHECKS

    section = str(job["section"])
    return CHECKS[section](ours=str(job["column"]) in OURS, quick=bool(job["quick"]))


def _budget_section(job: dict[str, object]) -> dict[str, object]:
    """Predicted against measured peak of the eager step under torch's own allocator."""
    import torch
    from loongforge_mem import profile_step

    model, optimizer, batch, _ = _build(torch, 16)
    begin = time.perf_counter()
    profile = profile_step(model, batch)
    took_s = time.perf_counter() - begin
    for _ in range(2):
        model(batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    model(batch)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    measured = torch.cuda.max_memory_allocated()
    return {"predicted_gb": profile.peak / GIB, "measured_gb": measured / GIB,
            "ratio": profile.peak / measured, "profile_s": took_s}  # fmt: skip


def _calls_section(job: dict[str, object]) -> dict[str, object]:
    """The allocation calls of a recorded step alone, through torch's own entry points, with no kernel."""
    import torch

    orchestrator = _orchestrator(job)
    torch.zeros(1, device="cuda")
    events = _recorded_events()
    alloc = torch._C._cuda_cudaCachingAllocator_raw_alloc
    free = torch._C._cuda_cudaCachingAllocator_raw_delete
    stream = torch.cuda.current_stream().cuda_stream
    times = []
    for _ in range(7):
        live: dict[int, int] = {}
        begin = time.perf_counter()
        if orchestrator is not None:
            with orchestrator.step():
                for kind, block, size in events:
                    if kind == "a":
                        live[block] = alloc(size, stream)
                    else:
                        free(live.pop(block))
        else:
            for kind, block, size in events:
                if kind == "a":
                    live[block] = alloc(size, stream)
                else:
                    free(live.pop(block))
        times.append((time.perf_counter() - begin) * 1e3)
        for pointer in live.values():
            free(pointer)
    out: dict[str, object] = {"events": len(events), "first_ms": times[0]}
    out |= {"calls_ms": statistics.median(times[2:]), **_memory(torch, orchestrator)}
    if orchestrator is not None:
        s = orchestrator.stats()
        out |= {k: s.get(k) for k in ("planned_hit_rate", "alloc.p50_ns", "alloc.p99_ns", "alloc.p999_ns",
                                      "alloc.within_10us", "free.p99_ns", "alloc_ms")}  # fmt: skip
    return out


def _recorded_events() -> list[list]:
    name = "traces/gr00t_n1_6_step_16_samples.json"
    roots = [os.environ.get("LOONGFORGE_TEST_DATA", "")]
    roots += [str(parent / "shared" / "data") for parent in Path(__file__).resolve().parents]
    for root in roots:
        if root and (Path(root) / name).exists():
            events = json.loads((Path(root) / name).read_text())["events"]
            return [[e[0], e[1], e[2]] for e in events]
    # The same order of magnitude where the recording is not there.
    events, live = [], []
    for index in range(5000):
        events.append(["a", index, 512 + (index * 7919) % (1 << 24)])
        live.append(index)
        if len(live) > 30:
            gone = live.pop(index % 30)
            events.append(["f", gone, 0])
    return events


SECTIONS = {
    "step": _step_section,
    "step44": _step44_section,
    "dynamic": _dynamic_section,
    "calls": _calls_section,
    "budget": _budget_section,
    **dict.fromkeys(("graph", "stress", "control", "oom", "pool", "pinned", "offload"), _check_section),
}

if __name__ == "__main__":
    main()
