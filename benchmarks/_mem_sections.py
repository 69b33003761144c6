"""Sections of mem_gpu.py that run in a process of their own: what each does on the GPU and reports."""

from __future__ import annotations

import json
import os
import random
import statistics
import time
import traceback
from pathlib import Path
from typing import Any

GIB = 1 << 30
# Columns of ours and what places their steps; "ours" is the mode as a user gets it.
PLANS: dict[str, Any] = {"ours": "auto", "ours_runfit": False, "ours_plan": True, "ours_block": True}
OURS = tuple(PLANS)
Job = dict[str, Any]
Row = dict[str, Any]


def run(job: Job) -> Row:
    """Run the section that ``job`` names; errors become part of the row."""
    try:
        return SECTIONS[str(job["section"])](job)
    except Exception:
        return {"error": traceback.format_exc()[-1800:]}


def orchestrator_of(job: Job) -> Any:
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
            plan=PLANS[column],
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


def _block_section(job: Job) -> Row:
    """Steps in one driver block: nothing more is taken from the driver."""
    import torch

    orchestrator = orchestrator_of(job)
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
    row: Row = {"driver_calls_after_step2": memory["driver_calls"] - after_two, **memory}
    return row | {k: s.get(k) for k in ("planned_hit_rate", "touched_bytes.peak", "plans")}


def _dynamic_section(job: Job) -> Row:
    import torch
    from _groot_shape import make_batch

    orchestrator = orchestrator_of(job)
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
    row: Row = {
        "peak_ratio": memory["peak_reserved_gb"] / memory["peak_requested_gb"],
        "step_ms": statistics.median(times),
        "steps": len(sizes),
        **memory,
    }
    if orchestrator is not None:
        s = orchestrator.stats()
        keys = (
            "placement",
            "placement_reason",
            "plans",
            "dissolved_plans",
            "planned_hits",
            "touched_bytes.peak",
            "misses.larger",
            "misses.busy",
        )
        row |= {key: s.get(key) for key in keys}
    return row


def _check_section(job: Job) -> Row:
    """One of the package's own checks on a GPU; see loongforge_mem.selfcheck."""
    from loongforge_mem.selfcheck import CHECKS

    section = str(job["section"])
    return CHECKS[section](ours=str(job["column"]) in OURS, quick=bool(job["quick"]))


def _budget_section(job: Job) -> Row:
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


def _calls_section(job: Job) -> Row:
    """The allocation calls of a recorded step alone, through torch's own entry points, with no kernel."""
    import torch

    orchestrator = orchestrator_of(job)
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
    out: Row = {"events": len(events), "first_ms": times[0]}
    out |= {"calls_ms": statistics.median(times[2:]), **_memory(torch, orchestrator)}
    if orchestrator is not None:
        s = orchestrator.stats()
        keys = (
            "placement", "planned_hit_rate", "alloc.p50_ns", "alloc.p99_ns", "alloc.p999_ns",
            "alloc.within_10us", "free.p99_ns", "alloc_ms",
        )  # fmt: skip
        out |= {key: s.get(key) for key in keys}
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
    **dict.fromkeys(
        ("graph", "capture_pool", "stress", "control", "oom", "pool", "pinned", "staging", "offload"),
        _check_section,
    ),
}
