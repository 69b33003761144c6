"""Memory on a GPU: our allocator against torch's two, in the eager step of a GR00T-N1.6-shaped model.

Every column is a process of its own, because torch takes an allocator once per process. Columns: ``native``
(torch's caching allocator), ``expandable`` (expandable_segments), ``ours`` (mode global as it comes: run fit,
or a plan where that saves memory; the row tells which and why), ``ours_runfit`` and ``ours_plan`` (one of the
two for certain) and ``ours_block`` (one driver block of the size that ``ours_plan`` needed). Sections: eager
step 1x16 and 4x4, random resolutions, captured graph beside eager work, a capture pool, record_stream stress
with poisoned frees, out of memory, pinned host memory, allocation calls alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import _common
import _mem_sections
import _mem_turns

COLUMNS = ("native", "ours", "expandable", "ours_plan", "ours_runfit")


def main() -> None:
    parser = _common.parser(__doc__)
    parser.add_argument("--only", default="", help="comma-separated sections")
    parser.add_argument(
        "--budget-s", type=float, default=350.0, help="stop starting processes after this time"
    )
    parser.add_argument("--rounds", type=int, default=0, help="turns per generation (default 6, quick 2)")
    parser.add_argument("--generations", type=int, default=3, help="fresh starts of every column")
    parser.add_argument("--rehearse", action="store_true", help="try the turns on a CPU with a tiny model")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        job = json.loads(options.worker)
        if job["section"] == "turns":
            _mem_turns.serve(job, _mem_sections.orchestrator_of)
        else:
            print(json.dumps(_mem_sections.run(job)), flush=True)
        return
    import torch  # noqa: F401  so that the result describes the GPU

    rounds = options.rounds or (2 if options.quick else 6)
    only = "step" if options.rehearse else options.only
    run = Runner(
        quick=options.quick, only=only, budget_s=options.budget_s, rounds=rounds,
        generations=1 if options.quick else options.generations, rehearse=options.rehearse,
    )  # fmt: skip
    run.all()
    repetitions = run.rounds * run.generations
    outcome = _common.result(
        "mem_gpu", rows=run.rows, figures=run.figures(), repetitions=repetitions, notes=run.notes
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

    def __init__(
        self, *, quick: bool, only: str, budget_s: float, rounds: int, generations: int, rehearse: bool
    ) -> None:
        self.rehearse, self.budget_s, self.generations = rehearse, budget_s, generations
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
            for column in ("native", "ours", "ours_plan"):
                self.start("calls", column)
        # What follows measures memory and correctness, no time, so it shares the GPU.
        rest = [("dynamic", c) for c in ("ours", "ours_plan", "native", "expandable")]
        rest += [
            (name, "ours")
            for name in ("graph", "stress", "oom", "control", "offload", "capture_pool", "staging")
        ]
        rest += [("budget", "native"), ("pool", "native"), ("pinned", "native")]
        with ThreadPoolExecutor(max_workers=6) as pool:
            list(pool.map(lambda check: self.start(*check), rest))
        if not self.rehearse:
            self.block()

    def turns(self) -> None:
        """Eager steps of the columns in turns; see _mem_turns."""
        columns = ["native", "ours", "ours_plan"] if self.rehearse else list(COLUMNS)
        generations = [{"step": self.rounds} for _ in range(self.generations)]
        generations[-1]["step44"] = max(1, self.rounds // 2)
        rows = _mem_turns.measure(
            Path(__file__).resolve(), columns, environment=environment_of, generations=generations,
            end=self.end - 0.35 * self.budget_s, rehearse=self.rehearse,
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
            ("step_ratio_vs_native", "step", "ours", "native"),
            ("step_ratio_vs_expandable", "step", "ours", "expandable"),
            ("step_ratio_plan_vs_native", "step", "ours_plan", "native"),
            ("step_ratio_runfit_vs_native", "step", "ours_runfit", "native"),
            ("step_ratio_plan_vs_runfit", "step", "ours_plan", "ours_runfit"),
            ("step_ratio_expandable_vs_native", "step", "expandable", "native"),
            ("step44_ratio_vs_native", "step44", "ours", "native"),
            ("step44_ratio_plan_vs_native", "step44", "ours_plan", "native"),
        ):
            ratios = sorted(self.turn_ratios(section, mine, theirs))
            out[name] = statistics.median(ratios) if ratios else None
            if name == "step_ratio_vs_native" and ratios:
                out[f"{name}_quartile_1"] = ratios[len(ratios) // 4]
                out[f"{name}_quartile_3"] = ratios[(3 * len(ratios)) // 4]
        fastest = "step_fastest_ms"
        ratio("step_ratio_of_fastest", self.of("step", "ours", fastest), self.of("step", "native", fastest))
        for column in ("ours", "ours_plan", "expandable"):
            ratio(
                f"step_cpu_ratio_{column}",
                self.of("step", column, "cpu_ms"),
                self.of("step", "native", "cpu_ms"),
            )
        ratio(
            "kernel_ratio_vs_native",
            self.of("step", "ours", "kernel_ms"),
            self.of("step", "native", "kernel_ms"),
        )
        ratio(
            "kernel_ratio_plan_vs_runfit",
            self.of("step", "ours_plan", "kernel_ms"), self.of("step", "ours_runfit", "kernel_ms"),
        )  # fmt: skip
        calls = [
            calls
            for section, column in (("step", "ours"), ("step", "ours_plan"), ("block", "ours_block"))
            for calls in self.of(section, column, "driver_calls_after_step2")
        ]
        out["driver_calls_after_step2"] = max(calls) if calls else None
        for column in ("native", "expandable", "ours_plan", "ours"):
            found = self.of("dynamic", column, "peak_ratio")
            out["dynamic_peak_ratio" if column == "ours" else f"dynamic_peak_ratio_{column}"] = (
                found[0] if found else None
            )
        for section in ("step", "dynamic"):
            chosen = [
                r.get("placement") for r in self.rows if (r["section"], r["column"]) == (section, "ours")
            ]
            out[f"{section}_placement"] = str(chosen[-1]) if chosen else None
        for name, section, column, key in (
            ("pinned_ratio", "pinned", "native", "ours_ratio"),
            ("pinned_ratio_torch", "pinned", "native", "torch_ratio"),
            ("graph_bit_equal", "graph", "ours", "bit_equal"),
            ("capture_pool_bit_equal", "capture_pool", "ours", "bit_equal"),
            ("offload_bit_equal", "offload", "ours", "bit_equal"),
            ("stress_corrupted", "stress", "ours", "corrupted"),
            ("stress_rounds", "stress", "ours", "rounds"),
            ("control_corrupted", "control", "ours", "corrupted"),
            ("staging_mixed", "staging", "ours", "mixed"),
            ("oom_is_torch_error", "oom", "ours", "is_torch_error"),
            ("budget_predicted_over_measured", "budget", "native", "ratio"),
            ("alloc_ms_per_step", "step", "ours", "alloc_ms"),
            ("alloc_ms_per_step_plan", "step", "ours_plan", "alloc_ms"),
            ("calls_ms", "calls", "ours", "calls_ms"),
            ("calls_ms_native", "calls", "native", "calls_ms"),
        ):
            found = self.of(section, column, key)
            out[name] = found[-1] if found else None
        native, calls_ms = self.of("step", "native", "step_ms"), self.of("calls", "native", "calls_ms")
        # What the step would take of the native one if our calls took no time at all.
        out["step_ratio_if_calls_were_free"] = (
            1.0 - calls_ms[-1] / native[-1] if native and calls_ms else None
        )
        return out


if __name__ == "__main__":
    main()
