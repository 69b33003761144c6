"""GR00T N1.6 at full size with random weights on one GPU: real decoding, all pillars, and the 24 GB preset.

Sections (each is time-boxed and its failure is recorded, not fatal):
  train   200 steps on a robot recording through the trainer, pillars off and on. gpu_util is the mean of the
          driver's samples after the warm-up steps, epoch borders included; gpu_util_whole that of the whole
          run from its first step on, first kernels and captures included
  budget  20 steps of the 24 GB preset under a memory limit of 22 GiB
  step    forward with backward (one replay) and optimizer on a batch that is already on the GPU, each work
          switch on and off

    uv run benchmarks/groot_train.py --dataset ../shared/data/g1_pick --json OUT
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import _common
from _groot_train import OFF, Plan, peak_gib, run_plan
from loongforge_fuse import GraphConfig, GraphRunner

SECTIONS = ("train", "budget", "step")


def main() -> None:
    parser = _common.parser(__doc__)
    parser.add_argument("--dataset", type=Path, default=Path("../shared/data/g1_pick"))
    parser.add_argument("--recipe", default="unitree_g1")
    parser.add_argument("--budget-recipe", default="unitree_g1_24gb")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="steps of the train section (default 200, quick 30)")
    parser.add_argument("--batch", type=int, default=16, help="samples per step")
    parser.add_argument("--workers", type=int, default=8, help="decoding threads")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--variants", help=f"train variants separated by ; of: {'; '.join(VARIANTS)}")
    parser.add_argument("--held-out", default="6,7", help="episodes that only validate")
    options = parser.parse_args()
    options.steps = options.steps or (30 if options.quick else 200)
    rows: list[dict[str, object]] = []
    figures: dict[str, float | int | bool | str | None] = dict.fromkeys(
        (
            "data_wait_share",
            "gpu_util",
            "gpu_util_whole",
            "warm_up_steps",
            "tokens_per_s_gpu",
            "peak_gib",
            "loss_ratio",
            "step_ms",
            "budget_peak_gib",
        )
    )
    notes: list[str] = []
    for section in options.sections.split(","):
        began = time.perf_counter()
        try:
            {"step": step_section, "train": train_section, "budget": budget_section}[section](
                options, rows, figures, notes
            )
        except Exception:
            notes.append(f"section {section} failed: {traceback.format_exc(limit=6)}")
            print(notes[-1], file=sys.stderr)
        rows.append({"section": section, "case": "section time", "seconds": time.perf_counter() - began})
        free()
        outcome = _common.result(
            "groot_train", rows=rows, figures=figures, repetitions=options.steps, notes=notes
        )
        # Written after each section: a run that is cut short still leaves what it measured.
        _common.finish(outcome, options.json)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def autocast(device: str) -> contextlib.AbstractContextManager[object]:
    return (
        torch.autocast("cuda", dtype=torch.bfloat16)
        if device.startswith("cuda")
        else contextlib.nullcontext()
    )


# ---- step ------------------------------------------------------------------------------------------------


def step_section(options, rows, figures, notes) -> None:
    """Time forward, backward and optimizer with each switch, on one resident batch of real frames."""
    from loongforge.recipes import get_recipe

    recipe = get_recipe(options.recipe)
    base = recipe.options()
    dataset = recipe.build_dataset(str(options.dataset), base)
    cases = {
        "all switches on": {},
        "logits computed": {"config.work.skip_logits": False},
        "dense cross-attention": {"config.work.split_cross_attention": False},
        "autograd below the first trainable layer": {"config.work.frozen_without_autograd": False},
        "all embodiment slots": {"live_slots": "off"},
        "recompute": {"config.work.recompute": True},
        "unused tensors dropped": {"config.work.keep_unused": False},
    }
    if options.quick:
        cases = {name: cases[name] for name in ("all switches on", "logits computed", "all embodiment slots")}
    samples = [dataset[i * 7 % len(dataset)] for i in range(options.batch)]
    for name, change in cases.items():
        free()
        try:
            row = step_case(recipe, dataset, samples, change, options)
        except Exception:
            notes.append(f"step case '{name}' failed: {traceback.format_exc(limit=6)}")
            print(notes[-1], file=sys.stderr, flush=True)
            continue
        rows.append({"section": "step", "case": name, **row})
        print(rows[-1], flush=True)


def step_case(recipe, dataset, samples, change, options) -> dict[str, object]:
    """Build the full model with one switch changed and time it."""
    chosen = recipe.options({**change, "pad_multiple": 8})
    model = recipe.build_model(chosen, 0, device=options.device)
    host = recipe.build_collate(dataset, model, chosen)(samples)
    batch = {n: v.to(options.device) if isinstance(v, torch.Tensor) else v for n, v in host.items()}
    fused = options.device.startswith("cuda")
    optimizer = torch.optim.AdamW(recipe.param_groups(model, 1e-5), lr=1e-4, fused=fused)
    timing = time_steps(model, optimizer, batch, options)
    actions = batch["action"].shape[0] * (chosen.config.head.action_horizon + 1)
    return {
        "samples": options.batch,
        "tokens": int(batch["attention_mask"].sum()) + actions,
        "trainable_m": sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6,
        **timing,
        "peak_gib": peak_gib(options.device),
    }


def time_steps(model, optimizer, batch, options) -> dict[str, object]:
    """Time forward with backward as one graph replay, and the optimizer, by the device's own clock.

    Run eagerly such a step is bound by the host's launches, which hides what a switch saves on the device.
    """
    repetitions = 5 if options.quick else 20
    runner = GraphRunner(model, GraphConfig(warmup_steps=1))
    phases: dict[str, list[float]] = {"pass_ms": [], "optimizer_ms": [], "step_ms": []}
    reasons: set[str] = set()
    try:
        for repetition in range(repetitions + 3):
            marks = [Mark(options.device)]
            with autocast(options.device):
                result = runner.run(model.draw(batch))
            marks.append(Mark(options.device))
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            marks.append(Mark(options.device))
            synchronize(options.device)
            if repetition >= 3:
                spans = [end.since(start) for start, end in itertools.pairwise(marks)]
                for key, value in zip(phases, [*spans, marks[-1].since(marks[0])], strict=True):
                    phases[key].append(value)
                reasons.add(result.reason or "replayed")
    finally:
        runner.release()
    return {**{key: _common.spread(values) for key, values in phases.items()}, "ran": ", ".join(reasons)}


class Mark:
    """A moment on the device's clock, or on the host's without a GPU."""

    def __init__(self, device: str) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.startswith("cuda") else None
        if self._event is not None:
            self._event.record()
        self._host = time.perf_counter()

    def since(self, other: Mark) -> float:
        """Return the milliseconds from ``other`` to this one; the device must have passed both."""
        if self._event is not None and other._event is not None:
            return other._event.elapsed_time(self._event)
        return 1e3 * (self._host - other._host)


# ---- train -----------------------------------------------------------------------------------------------

ALL: Mapping[str, object] = {
    "mem": "advisor", "comm": "hybrid", "data": "on", "fuse": 4, "graph": True, "fused_ops": True,
    "fused_optimizer": True,
}  # fmt: skip
# Name: micro-batches a step, pillars. The samples of a step are the same in all of them.
VARIANTS: dict[str, tuple[int, dict[str, object]]] = {
    "pillars off": (1, {**OFF}),
    "pillars off, 4 micro-batches": (4, {**OFF}),
    "data": (1, {**OFF, "data": "on"}),
    "data, graph": (1, {**OFF, "data": "on", "graph": True}),
    "data, graph, fused ops": (1, {**OFF, "data": "on", "graph": True, "fused_ops": True}),
    "windows not filled": (4, {**ALL, "fill_windows": False}),
    "frozen part in its step": (4, {**ALL, "frozen_ahead": False}),
    "weight gradients in their place": (4, {**ALL, "late_weight_gradients": False}),
    "torch's AdamW": (4, {**ALL, "fused_optimizer": False}),
    "all pillars": (4, {**ALL}),
}


def train_section(options, rows, figures, notes) -> None:
    """Train through the trainer; the last variant that works gives the figures."""
    names = options.variants.split(";") if options.variants else ["pillars off", "all pillars"]
    held_out = [int(number) for number in options.held_out.split(",") if number]
    for number, name in enumerate(names):
        free()
        # The slow baselines need fewer steps for a stable time; the claim is about the last.
        last = number == len(names) - 1
        accumulation, pillars = VARIANTS[name]
        plan = Plan(
            name=name,
            recipe=options.recipe,
            dataset=str(options.dataset),
            device=options.device,
            steps=options.steps if last else min(options.steps, 60),
            samples=options.batch,
            accumulation=accumulation,
            pillars=pillars,
            workers=options.workers,
            limit_s=60 if options.quick else 150,
            held_out=held_out,
            # All variants start from the same weights: the first one's loss before training holds for all.
            validate="last" if last else "first" if number == 0 else "",
        )
        try:
            row = run_plan(plan)
        except Exception:
            notes.append(f"train variant '{name}' failed: {traceback.format_exc(limit=8)}")
            print(notes[-1], file=sys.stderr, flush=True)
            continue
        rows.append({"section": "train", **row})
        print(rows[-1], flush=True)
        for key in ("data_wait_share", "tokens_per_s_gpu", "peak_gib", "loss_ratio", "step_ms"):
            value = row[key]
            figures[key] = value["median"] if isinstance(value, dict) else value
        figures["gpu_util"] = row["gpu_util_mean"]
        figures["gpu_util_whole"] = row["gpu_util_whole"]
        figures["warm_up_steps"] = row["warm_up_steps"]
        figures["variant"] = name
    found = {key: row[key] for row in rows for key in ("validation_first", "validation_last") if key in row}
    if len(found) == 2:
        figures["validation_ratio"] = found["validation_last"] / found["validation_first"]


# ---- budget ----------------------------------------------------------------------------------------------


def budget_section(options, rows, figures, notes) -> None:
    """Run the 24 GB preset with the process limited to 22 GiB of the device."""
    from loongforge.recipes import get_recipe

    limit = 22.0
    if options.device.startswith("cuda"):
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    try:
        recipe = get_recipe(options.budget_recipe)
        batch = int(recipe.training.get("batch_size", 8))
        for pillars in ({**OFF, "data": "on", "graph": True}, {**OFF, "data": "on"}):
            try:
                row = run_plan(
                    Plan(
                        name="24 GB preset",
                        recipe=options.budget_recipe,
                        dataset=str(options.dataset),
                        device=options.device,
                        steps=20,
                        samples=batch,
                        accumulation=1,
                        pillars=pillars,
                        workers=options.workers,
                        limit_s=60,
                    )
                )
                break
            except Exception:
                notes.append(f"24 GB preset with {pillars} failed: {traceback.format_exc(limit=6)}")
                free()
        else:
            return
        row["section"] = "budget"
        if options.device.startswith("cuda"):
            row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        rows.append(row)
        figures["budget_peak_gib"] = row.get("reserved_gib", row["peak_gib"])
        figures["budget_steps"] = row["steps"]
        print(row, flush=True)
    finally:
        if options.device.startswith("cuda"):
            torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    main()
