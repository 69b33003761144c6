"""Placement policies on recorded and generated training steps: how much memory each needs beyond what was
asked for.

Traces: one step of a GR00T-N1.6-shaped model recorded on an H200, and steps generated under FakeTensorMode
(every operator makes the storages it would make; no kernel runs): ViT, language models with and without
logits, recomputation, random sequence lengths, the GR00T shape at tiny and full size. Reserve overhead = 1 -
peak requested / high water. Traces of several steps with different shapes share one plan made of the largest
size of every index. The rows marked ``beside`` are steps of other depths, batches and lengths: the figure of
run fit does not count them, and they show how far its placement holds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import _common
import _mem_cache
from loongforge_mem import Trace, _core, load_trace, plan_trace, policies, simulate
from loongforge_mem.synthetic import TransformerShape, concatenate, record_steps, transformer

MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trace and what kind of step it is."""

    name: str
    make: Callable[[], list[Trace]]
    fixed: bool = True
    logits: bool = False
    beside: bool = False


def main() -> None:
    parser = _common.parser(__doc__)
    parser.add_argument("--c-abi", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.c_abi:
        _through_c(options.c_abi)
        return
    steps = 5 if options.quick else 40
    rows = [_row(case, steps) for case in cases(quick=options.quick)]
    plan = [float(r["plan"]) for r in rows]
    bound = [float(r["run_fit"]) for r in rows if r["bound"]]
    c_abi = _c_abi_row(steps)
    figures: dict[str, float | int | bool | str | None] = {
        "plan_worst_overhead": max(plan),
        "runfit_worst_overhead": max(bound),
        "runfit_worst_overhead_any_row": max(float(r["run_fit"]) for r in rows),
        "runfit_plain_worst_overhead": max(float(r["run_fit_plain"]) for r in rows if r["bound"]),
        "runfit_worst_overhead_beside": _worst(rows, "run_fit"),
        "runfit_plain_worst_overhead_beside": _worst(rows, "run_fit_plain"),
        "pure_buddy_worst_overhead": max(float(r["pure_buddy"]) for r in rows),
        "alloc_p99_us": max(float(r["heap_pair_p99_ns"]) for r in rows) / 1e3,
        "runfit_alloc_p99_us": max(float(r["runfit_pair_p99_ns"]) for r in rows) / 1e3,
        "plan_worst_ms": max(float(r["plan_ms"]) for r in rows),
        "c_abi_within_10us": c_abi.get("pair_within_10us"),
        "c_abi_pair_p99_us": float(c_abi["pair_p99_ns"]) / 1e3 if "pair_p99_ns" in c_abi else None,
    }
    cache = [] if options.quick else _cache_rows()
    ratios = [float(str(r["plan_gib"])) / float(str(r["run_fit_gib"])) for r in cache]
    figures["cache_traffic_plan_over_runfit"] = max(ratios) if ratios else None
    notes = [
        "bound: fixed-shape rows above 100 MB without large logits (target of run fit alone: 3.2 %)",
        "heap_*: alloc + free of the whole heap with a plan; runfit_*: without; two clock reads included",
    ]
    outcome = _common.result("mem_replay", rows=[*rows, {"trace": "c_abi", **c_abi}, *cache], figures=figures,
                             repetitions=steps, notes=notes)  # fmt: skip
    _common.finish(outcome, options.json)


def _worst(rows: list[dict[str, object]], policy: str) -> float | None:
    """Return the worst overhead over the rows beside the figure, None in a quick run, which has none."""
    found = [float(str(r[policy])) for r in rows if r["beside"]]
    return max(found) if found else None


def _row(case: Case, steps: int) -> dict[str, object]:
    begin = time.perf_counter()
    traces = case.make()
    made_s = time.perf_counter() - begin
    whole = concatenate(traces)
    peak = max(t.items()[2] for t in traces)
    begin = time.perf_counter()
    plan = plan_trace(*traces)
    plan_ms = (time.perf_counter() - begin) * 1e3
    plan.verify()
    row: dict[str, object] = {
        "trace": case.name,
        "steps": len(traces),
        "allocations": traces[0].num_allocations,
        "peak_mb": round(peak / MB, 1),
        "bound": case.fixed and not case.logits and not case.beside and peak > 100 * MB,
        "beside": case.beside,
    }
    for policy in policies():
        if policy == "plan":
            row["plan"] = 1 - peak / plan.high_water
        else:
            row[policy] = float(simulate(whole, policy)["reserve_overhead"])
    heap = _core.time_steps(list(traces[0].events), "heap", steps)
    online = _core.time_steps(list(traces[0].events), "run_fit", steps)
    for key in ("pair_p50_ns", "pair_p99_ns", "pair_p999_ns"):
        row[f"heap_{key}"] = heap[key]
        row[f"runfit_{key}"] = online[key]
    row |= {"planned_hits": heap["planned_hits"], "plan_ms": round(plan_ms, 2), "plan_order": plan.order,
            "recorded_in_s": round(made_s, 1)}  # fmt: skip
    return row


def cases(*, quick: bool) -> list[Case]:
    """Return the traces of the table."""
    llm = {"width": 4096, "heads": 32, "mlp": 11008, "gated": True, "causal": True}
    gpt = {"width": 1600, "heads": 25, "mlp": 6400, "vocabulary": 50257, "causal": True}
    draw = random.Random(0)
    lengths = [draw.randint(128, 1024) for _ in range(4 if quick else 12)]
    pairs = [(draw.randint(1, 8), draw.randint(128, 1024)) for _ in range(4 if quick else 12)]
    layers = 4 if quick else 12
    groot = [(16, 28 * draw.randint(4, 12), draw.randint(16, 128)) for _ in range(3 if quick else 8)]
    plain = {
        "vit_b_64x197": {"layers": 12, "width": 768, "heads": 12, "mlp": 3072, "b": 64, "t": 197},
        "vit_l_32x577": {"layers": 2 * layers, "width": 1024, "heads": 16, "mlp": 4096, "b": 32, "t": 577},
        "llm_4096_no_logits": {"layers": 4, "b": 1, "t": 4096, **llm},
        "llm_4096_no_logits_recompute": {"layers": 8, "b": 1, "t": 4096, "recompute": True, **llm},
    }
    logits = {"layers": 4, "vocabulary": 32000, **llm}
    tokens = {
        "llm_4096_logits": ([(1, 4096)], logits),
        "llm_4096_logits_recompute": ([(1, 4096)], {**logits, "recompute": True}),
        "gpt_random_lengths": ([(4, n) for n in lengths], {"layers": layers, **gpt}),
        "gpt_random_lengths_recompute": (
            [(8, n) for n in lengths], {"layers": layers, "recompute": True, **gpt},
        ),
        "gpt_random_batch_x_length": (pairs, {"layers": layers, **gpt}),
    }  # fmt: skip
    found = [Case(name=name, make=lambda s=s: _plain(**s)) for name, s in plain.items()]
    found += [
        Case(name=name, make=lambda n=n, s=s: _tokens(n, **s), fixed=len(n) == 1, logits=True)
        for name, (n, s) in tokens.items()
    ]
    found += [
        Case(name="gr00t_tiny", make=lambda: _groot("TINY", [(64, None, None)])),
        Case(name="gr00t_full_16", make=lambda: _groot("FULL", [(16, None, None)])),
        Case(name="gr00t_full_random_resolution", make=lambda: _groot("FULL", groot), fixed=False),
    ]
    if not quick:
        found.append(
            Case(name="gr00t_full_4x4", make=lambda: _groot("FULL", [(4, None, None)], micro_batches=4))
        )
        found += _beside(llm)
    recorded = _recorded()
    if recorded is not None:
        found.insert(0, Case(name="gr00t_recorded_on_h200", make=lambda: [load_trace(recorded)]))
    return found


def _beside(llm: dict[str, object]) -> list[Case]:
    """Steps of other depths, batches and lengths than those of the figure."""
    gpt = {"layers": 12, "width": 1600, "heads": 25, "mlp": 6400, "causal": True}
    vit = {"layers": 12, "width": 768, "heads": 12, "mlp": 3072}
    plain = {
        "llm_2048_8_layers": {"layers": 8, "b": 1, "t": 2048, **llm},
        "llm_8192_4_layers": {"layers": 4, "b": 1, "t": 8192, **llm},
        "gpt_1024_recompute": {"b": 8, "t": 1024, "recompute": True, **gpt},
        "vit_b_64x197_recompute": {"b": 64, "t": 197, "recompute": True, **vit},
    }
    found = [Case(name=name, make=lambda s=s: _plain(**s), beside=True) for name, s in plain.items()]
    return found + [
        Case(name=f"gr00t_full_{n}", make=lambda n=n: _groot("FULL", [(n, None, None)]), beside=True)
        for n in (8, 32)
    ]


def _plain(*, b: int, t: int, **shape: object) -> list[Trace]:
    import torch

    s = TransformerShape(**shape)  # type: ignore[arg-type]
    return record_steps(
        lambda: transformer(s),
        [lambda: {"x": torch.empty(b, t, s.width, dtype=torch.bfloat16)}],
        source=f"{s}",
    )


def _tokens(sizes: list[tuple[int, int]], **shape: object) -> list[Trace]:
    import torch

    s = TransformerShape(**shape)  # type: ignore[arg-type]
    batches = [lambda b=b, t=t: {"tokens": torch.empty(b, t, dtype=torch.long)} for b, t in sizes]
    return record_steps(lambda: transformer(s), batches, source=f"{s} {sizes}")


def _groot(
    shape: str, sizes: list[tuple[int, int | None, int | None]], *, micro_batches: int = 1
) -> list[Trace]:
    import _groot_shape as groot
    import torch

    s = getattr(groot, shape)

    def build() -> torch.nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        try:
            return groot.GrootShape(s)
        finally:
            torch.set_default_dtype(torch.float32)

    batches = [
        lambda b=b, i=i, t=t: groot.make_batch(s, b, "cpu", torch.bfloat16, image_size=i, text_tokens=t)
        for b, i, t in sizes
    ]
    return record_steps(build, batches, source=f"GR00T shape {shape} {sizes}", micro_batches=micro_batches)


def _recorded() -> Path | None:
    name = "traces/gr00t_n1_6_step_16_samples.json"
    roots = [os.environ.get("LOONGFORGE_TEST_DATA", "")]
    roots += [str(parent / "shared" / "data") for parent in Path(__file__).resolve().parents]
    return next((Path(root) / name for root in roots if root and (Path(root) / name).exists()), None)


def _cache_rows() -> list[dict[str, object]]:
    """Traffic of a modelled device cache of two sizes on the recorded step, with and without a plan."""
    found = _recorded()
    if found is None:
        return []
    trace = load_trace(found)
    rows: list[dict[str, object]] = []
    for size in (25, 50):
        row: dict[str, object] = {"trace": f"cache_of_{size}_mib"}
        row["run_fit_gib"] = _mem_cache.traffic(trace, "never", cache_mib=size)
        row["plan_gib"] = _mem_cache.traffic(trace, "always", cache_mib=size)
        rows.append(row)
    return rows


def _c_abi_row(steps: int) -> dict[str, object]:
    """The functions that torch calls, in a process of its own because the heap is the process's."""
    trace = _recorded()
    if trace is None:
        return {}
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--c-abi",
        str(trace),
        *(["--quick"] if steps < 40 else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _through_c(trace: Path) -> None:
    _core.configure("host", initial_bytes=16 << 30, grow_bytes=0)
    steps = 5 if "--quick" in sys.argv else 40
    print(json.dumps(_core.time_steps(list(load_trace(trace).events), "c_abi", steps)))


if __name__ == "__main__":
    main()
