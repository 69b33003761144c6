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
import _mem_turns

GIB = 1 << 30
OURS = ("ours_runfit", "ours_plan", "ours_block")


def main() -> None:
    parser = _common.parser(__doc__)
    parser.add_argument("--only", default="", help="comma-separated sections")
    parser.add_argument(
        "--budget-s", type=float, default=520.0, help="stop starting processes after this time"
    )
    parser.add_argument("--rounds", type=int, default=0, help="turns of every column (default 12, quick 3)")
    parser.add_argument("--rehearse", action="store_true", help="try the turns on a CPU with a tiny model")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _worker(json.loads(options.worker))
        return
    import torch  # noqa: F401  so that the result describes the GPU

    rounds = options.rounds or (3 if options.quick else 12)
    only = "step" if options.rehearse else options.only
    run = Runner(
        quick=options.quick, only=only, budget_s=options.budget_s, rounds=rounds, rehearse=options.rehearse
    )
    run.all()
    outcome = _common.result(
        "mem_gpu", rows=run.rows, figures=run.figures(), repetitions=run.rounds, notes=run.notes
    )
    _common.finish(outcome, options.json)


def environment_of(column: str) -> dict[str, str]:
    """Return the environment of a column: torch's allocator settings are its business alone."""
    environment = dict(os.environ)
    environment.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    environment.pop("PYTORCH_ALLOC_CONF", None)
    if column == "expandable":
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return environment


class Runner:
    """Starts the worker processes and collects what they measured."""

    def __init__(self, *, quick: bool, only: str, budget_s: float, rounds: int, rehearse: bool) -> None:
        self.rehearse, self.budget_s = rehearse, budget_s
        self.quick, self.only = quick, {x for x in only.split(",") if x}
        self.end = time.monotonic() + budget_s
        self.rows: list[dict[str, object]] = []
        self.notes: list[str] = []
        self.rounds = rounds

    def all(self) -> None:
        """Run every section that was asked for, the timed ones first."""
        if not self.only or "step" in self.only:
            self.turns()
        if not self.only or "calls" in self.only:
            for column in ("native", "ours_plan"):
                self.start("calls", column)
        # What follows measures memory and correctness, no time, so it shares the GPU.
        rest = [("dynamic", c) for c in ("ours_plan", "native", "expandable")]
        rest += [(name, "ours_plan") for name in ("graph", "stress", "oom", "control", "offload")]
        rest += [("budget", "native"), ("pool", "native"), ("pinned", "native"), ("dynamic", "ours_runfit")]
        with ThreadPoolExecutor(max_workers=6) as pool:
            list(pool.map(lambda check: self.start(*check), rest))
        if not self.rehearse:
            self.block()

    def turns(self) -> None:
        """Eager steps of the four columns in turns; see _mem_turns."""
        columns = ["native", "ours_plan", "ours_runfit", "expandable"]
        if self.rehearse:
            columns = ["native", "ours_plan"]
        rounds = {"step": self.rounds, "step44": max(1, self.rounds // 3)}
        rows = _mem_turns.measure(
            Path(__file__).resolve(), columns, environment=environment_of, rounds=rounds,
            end=self.end - 0.45 * self.budget_s, rehearse=self.rehearse,
        )  # fmt: skip
        for row in rows:
            self.rows.append(row)
            print(json.dumps(row), flush=True)

    def block(self) -> None:
        """The column with one driver block of a size that the plan needed."""
        need = self.of("step", "ours_plan", "peak_reserved_gb")
        if need and (not self.only or "step" in self.only):
            self.start("block", "ours_block", pool_gb=need[0] * 1.35)

    def start(self, section: str, column: str, **more: object) -> dict[str, object] | None:
        """Run one section of one column in a process of its own; returns its row."""
        if self.only and section not in self.only:
            return None
        left = self.end - time.monotonic()
        if left < 15:
            self.notes.append(f"{section}/{column} was not started: out of time")
            return None
        job = {"section": section, "column": column, "quick": self.quick, **more}
        environment = environment_of(column)
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(job)]
        row: dict[str, object] = {"section": section, "column": column, **more}
        started = time.monotonic()
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=min(left, 150), check=False
            )
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

    def turn_ratios(self, section: str, mine: str, theirs: str) -> list[float]:
        """Return the ratio of the turns of two columns, round by round."""
        turns = {}
        for row in self.rows:
            if row["section"] == section and isinstance(row.get("turn_ms"), list):
                turns[row["column"]] = row["turn_ms"]
        pairs = zip(turns.get(mine, []), turns.get(theirs, []), strict=False)  # type: ignore[arg-type]
        return [a / b for a, b in pairs]

    def figures(self) -> dict[str, float | int | bool | str | None]:
        """Return the figures that the claims name."""
        out: dict[str, float | int | bool | str | None] = {}

        def ratio(name: str, a: list[float], b: list[float]) -> None:
            out[name] = (
                statistics.median(a) / statistics.median(b) if a and b and statistics.median(b) else None
            )

        for name, section, mine, theirs in (
            ("step_ratio_vs_native", "step", "ours_plan", "native"),
            ("step_ratio_vs_expandable", "step", "ours_plan", "expandable"),
            ("step_ratio_runfit_vs_native", "step", "ours_runfit", "native"),
            ("step_ratio_expandable_vs_native", "step", "expandable", "native"),
            ("step44_ratio_vs_native", "step44", "ours_plan", "native"),
            ("step44_ratio_runfit_vs_native", "step44", "ours_runfit", "native"),
        ):
            ratios = sorted(self.turn_ratios(section, mine, theirs))
            out[name] = statistics.median(ratios) if ratios else None
            if name == "step_ratio_vs_native" and ratios:
                out[f"{name}_quartile_1"] = ratios[len(ratios) // 4]
                out[f"{name}_quartile_3"] = ratios[(3 * len(ratios)) // 4]
        fastest = "step_fastest_ms"
        ratio(
            "step_ratio_of_fastest", self.of("step", "ours_plan", fastest), self.of("step", "native", fastest)
        )
        calls = self.of("step", "ours_plan", "driver_calls_after_step2") + self.of(
            "block", "ours_block", "driver_calls_after_step2"
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
    if job["section"] == "turns":
        _mem_turns.serve(job, _orchestrator)
        return
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
            backend="host" if job.get("rehearse") else "cuda" if block else "vmm",
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


def _block_section(job: dict[str, object]) -> dict[str, object]:
    """Steps in one driver block: nothing more is taken from the driver."""
    import torch

    orchestrator = _orchestrator(job)
    model, optimizer, batch, _ = _build(torch, 16)
    orchestrator.attach(model, optimizer)
    after_two = 0.0
    for index in range(8):
        with orchestrator.step():
            model(batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if index == 1:
            after_two = _memory(torch, orchestrator)["driver_calls"]
    memory = _memory(torch, orchestrator)
    s = orchestrator.stats()
    row: dict[str, object] = {"driver_calls_after_step2": memory["driver_calls"] - after_two, **memory}
    return row | {k: s.get(k) for k in ("planned_hit_rate", "touched_bytes.peak", "plans")}


def _dynamic_section(job: dict[str, object]) -> dict[str, object]:
    import random

    import torch
    from _groot_shape import make_batch

    orchestrator = _orchestrator(job)
    model, optimizer, _, shape = _build(torch, 1)
    if orchestrator is not None:
        orchestrator.attach(model, optimizer)
    draw = random.Random(7)
    sizes = [(28 * draw.randint(4, 12), 32 * draw.randint(1, 4)) for _ in range(20 if job["quick"] else 50)]
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
    "block": _block_section,
    "dynamic": _dynamic_section,
    "calls": _calls_section,
    "budget": _budget_section,
    **dict.fromkeys(("graph", "stress", "control", "oom", "pool", "pinned", "offload"), _check_section),
}

if __name__ == "__main__":
    main()
