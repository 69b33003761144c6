"""One training run of a GR00T recipe through the trainer, measured step by step; for groot_train.py."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import _common
import torch
from _gpu_use import Utilisation, mean
from loongforge.config import build_config
from loongforge.recipes import get_recipe
from loongforge.records import StepRecord
from loongforge.runs import Run, build_run

OFF: Mapping[str, object] = {
    "mem": "off", "comm": "off", "data": "off", "fuse": "off", "graph": False, "fused_ops": False,
    "fused_optimizer": False,
}  # fmt: skip
WARM_UP = 10
"""Steps that the steady figures leave out: first kernels, two eager runs and one capture of the shape, the
probe of step 6."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to train.

    Attributes:
        name: Name of the row.
        recipe: Recipe name.
        dataset: Recording.
        device: cuda or cpu.
        steps: Optimizer steps.
        samples: Samples of a step.
        accumulation: Micro-batches of a step.
        pillars: Pillar settings.
        workers: Loader workers.
        limit_s: Seconds after which no further step starts.
        held_out: Episodes that only validate; empty means no validation.
        validate: ``first`` before the first step, ``last`` after the last, both outside what is timed.
    """

    name: str
    recipe: str
    dataset: str
    device: str
    steps: int
    samples: int
    accumulation: int
    pillars: Mapping[str, object]
    workers: int
    limit_s: float
    held_out: Sequence[int] = ()
    validate: str = ""


def warm_up(steps: int) -> int:
    """Return the number of steps that the steady figures leave out."""
    return min(WARM_UP, max(1, steps // 3))


def run_plan(plan: Plan) -> dict[str, object]:
    """Train and return the row."""
    with tempfile.TemporaryDirectory() as folder:
        run = build_run(build_config(get_recipe(plan.recipe).training, settings(plan, folder)))
        records: list[StepRecord] = []
        run.session.parts.recorder.listeners.append(lambda record, _ids: records.append(record))
        validation = run.session.validation
        # Measured by hand outside the timed steps, not at their borders.
        run.session.engine.validated = lambda step: None
        losses: dict[str, float] = {}
        try:
            if validation is not None and plan.validate == "first":
                losses["validation_first"] = validation()
            with Utilisation() as use:
                marks = drive(run, plan)
            run.session.parts.recorder.flush()
            counters = graph_counters(run)
            loader = run.session.parts.source.stats()
            ahead = {name: value for name, value in loader.items() if name.startswith("frozen_ahead")}
            if validation is not None and plan.validate == "last":
                losses["validation_last"] = validation()
        finally:
            run.session.close()
    return {**summarise(plan, records, marks, use), **losses, "graphs": counters, "ahead": ahead}


def settings(plan: Plan, folder: str) -> dict[str, object]:
    """Return the run's settings."""
    return {
        "dataset": plan.dataset,
        "recipe": plan.recipe,
        "recipe_options": {"held_out": list(plan.held_out)} if plan.held_out else {},
        "output": folder,
        "steps": plan.steps,
        "batch_size": plan.samples // plan.accumulation,
        "accumulation": plan.accumulation,
        "workers": plan.workers,
        "precision": "bf16" if plan.device.startswith("cuda") else "fp32",
        "device": plan.device,
        "control": False,
        "log_interval": 1000,
        "resume": "never",
        "pillars": dict(plan.pillars),
        "checkpoint": {"every": 0},
        "validate_every": plan.steps if plan.held_out else 0,
    }


def drive(run: Run, plan: Plan) -> tuple[float, float, float]:
    """Run the steps; return when the first began, when the warm-up ended, and when the device was done."""
    engine = run.session.engine
    began = steady = time.perf_counter()
    while engine.at.step < plan.steps and engine.run_step():
        if engine.at.step == warm_up(plan.steps):
            steady = time.perf_counter()
        if time.perf_counter() - began > plan.limit_s:
            break
    if plan.device.startswith("cuda"):
        torch.cuda.synchronize()
    return began, steady, time.perf_counter()


def graph_counters(run: Run) -> dict[str, object] | None:
    """Return captures and eager passes by reason, where a graph runner was attached."""
    executor = getattr(getattr(run.session.parts.runner, "fuser", None), "_executor", None)
    if executor is None:
        return None
    stats = asdict(executor.stats())
    names = ("captures", "recaptures", "evictions", "replays", "eager", "moved", "failures")
    return {name: stats[name] for name in names}


def summarise(
    plan: Plan, records: Sequence[StepRecord], marks: tuple[float, float, float], use: Utilisation
) -> dict[str, object]:
    """Return the row: steady figures leave the warm-up out, whole ones do not."""
    began, warm, ended = marks
    losses = [r.loss for r in records if r.loss is not None]
    steady = records[warm_up(plan.steps) :]
    step_ms = [r.step_ms for r in steady if r.step_ms]
    waits = [r.data_wait_ms or 0.0 for r in steady]
    tokens = [r.tokens_per_s_gpu for r in steady if r.tokens_per_s_gpu]
    tenth = max(1, min(10, len(losses) // 3))
    # The driver's first sample of an interval still looks at what was before it.
    steady_use, whole_use = use.between(warm, ended)[1:], use.between(began, ended)[1:]
    last = records[-1]
    return {
        "case": plan.name,
        "samples": plan.samples,
        "accumulation": plan.accumulation,
        "steps": len(records),
        "warm_up_steps": warm_up(plan.steps),
        "step_ms": _common.spread(step_ms),
        "data_wait_share": sum(waits) / max(1e-9, sum(step_ms)),
        "gpu_util": _common.spread(steady_use) if steady_use else None,
        "gpu_util_mean": mean(steady_use),
        "gpu_util_whole": mean(whole_use),
        "whole_s": ended - began,
        "warm_up_s": warm - began,
        "tokens_per_s_gpu": _common.spread(tokens) if tokens else None,
        "samples_per_s": sum(r.samples or 0 for r in steady) / max(1e-9, ended - warm),
        "peak_gib": peak_gib(plan.device),
        "loss_first": sum(losses[:tenth]) / tenth,
        "loss_last": sum(losses[-tenth:]) / tenth,
        "loss_ratio": sum(losses[-tenth:]) / sum(losses[:tenth]),
        "fused": last.fused,
        "fusion_reason": last.fusion_reason,
        "graph": last.graph,
        "graph_reason": last.graph_reason,
        "filled_samples": sum(r.filled_samples for r in records),
        "slow_steps": slow_steps(records),
    }


def slow_steps(records: Sequence[StepRecord], factor: float = 1.5) -> list[dict[str, object]]:
    """Return every step that took more than ``factor`` times the median, with what may explain it."""
    times = sorted(r.step_ms for r in records if r.step_ms)
    if not times:
        return []
    median = times[len(times) // 2]
    return [
        {
            "step": r.step,
            "epoch": r.epoch,
            "step_ms": r.step_ms,
            "samples": r.samples,
            "filled": r.filled_samples,
            "graph": r.graph,
            "reason": r.graph_reason,
            "data_wait_ms": r.data_wait_ms,
            "host_gap_ms": r.host_gap_ms,
        }
        for r in records
        if r.step_ms and r.step_ms > factor * median
    ]


def peak_gib(device: str) -> float | None:
    """Return the highest allocated memory of the process, GiB; None without a GPU."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else None
