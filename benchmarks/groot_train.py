"""GR00T N1.6 at full size with random weights on one GPU: real decoding, all pillars, and the 24 GB preset.

Sections (each is time-boxed and its failure is recorded, not fatal):
  train   200 steps on a robot recording through the trainer, pillars off and on
  budget  20 steps of the 24 GB preset under a memory limit of 22 GiB
  step    forward, backward and optimizer on a batch that is already on the GPU, each work switch on and off

    uv run benchmarks/groot_train.py --dataset ../shared/data/g1_pick --json OUT
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import _common

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
    parser.add_argument("--variants", help="train variants by name, separated by ; (default: all)")
    options = parser.parse_args()
    options.steps = options.steps or (30 if options.quick else 200)
    rows: list[dict[str, object]] = []
    figures: dict[str, float | int | bool | str | None] = dict.fromkeys(
        (
            "data_wait_share",
            "gpu_util",
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


def peak_gib(device: str) -> float | None:
    return torch.cuda.max_memory_allocated() / 2**30 if device.startswith("cuda") else None


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
        chosen = recipe.options({**change, "pad_multiple": 8})
        model = recipe.build_model(chosen, 0, device=options.device)
        collate = recipe.build_collate(dataset, model, chosen)
        batch = {
            n: v.to(options.device) if isinstance(v, torch.Tensor) else v for n, v in collate(samples).items()
        }
        optimizer = torch.optim.AdamW(
            recipe.param_groups(model, 1e-5), lr=1e-4, fused=options.device.startswith("cuda")
        )
        timing = time_steps(model, optimizer, batch, options)
        tokens = int(batch["attention_mask"].sum()) + batch["action"].shape[0] * (
            chosen.config.head.action_horizon + 1
        )
        rows.append(
            {
                "section": "step",
                "case": name,
                "samples": options.batch,
                "tokens": tokens,
                "trainable_m": sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6,
                **timing,
                "peak_gib": peak_gib(options.device),
            }
        )
        print(rows[-1], flush=True)
        del model, optimizer, batch, collate


def time_steps(model, optimizer, batch, options) -> dict[str, object]:
    repetitions = 5 if options.quick else 10
    phases: dict[str, list[float]] = {"forward_ms": [], "backward_ms": [], "optimizer_ms": [], "step_ms": []}
    for repetition in range(repetitions + 3):
        drawn = model.draw(batch)
        synchronize(options.device)
        marks = [time.perf_counter()]
        with autocast(options.device):
            loss = model(drawn)["loss"]
        synchronize(options.device)
        marks.append(time.perf_counter())
        loss.backward()
        synchronize(options.device)
        marks.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        synchronize(options.device)
        marks.append(time.perf_counter())
        if repetition >= 3:
            spans = [1e3 * (b - a) for a, b in itertools.pairwise(marks)]
            for key, value in zip(phases, [*spans, 1e3 * (marks[-1] - marks[0])], strict=True):
                phases[key].append(value)
    return {key: _common.spread(values) for key, values in phases.items()}


# ---- train -----------------------------------------------------------------------------------------------

OFF = {"mem": "off", "comm": "off", "data": "off", "fuse": "off", "graph": False, "fused_ops": False}
# Name: micro-batches a step, pillars. The samples of a step are the same in all of them.
VARIANTS: dict[str, tuple[int, dict[str, object]]] = {
    "pillars off": (1, OFF),
    "pillars off, 4 micro-batches": (4, OFF),
    "data": (1, {**OFF, "data": "on"}),
    "data, graph": (1, {**OFF, "data": "on", "graph": True}),
    "data, graph, fused ops": (1, {**OFF, "data": "on", "graph": True, "fused_ops": True}),
    "all pillars": (
        4,
        {"mem": "advisor", "comm": "hybrid", "data": "on", "fuse": 4, "graph": True, "fused_ops": True},
    ),
}


def train_section(options, rows, figures, notes) -> None:
    """Train through the trainer; the last variant that works gives the figures."""
    names = options.variants.split(";") if options.variants else list(VARIANTS)
    if options.quick and not options.variants:
        names = ["pillars off", "all pillars"]
    for name in names:
        free()
        # The slow baselines need fewer steps for a stable time; the claim is about the last.
        steps = options.steps if name in ("all pillars", names[-1]) else min(options.steps, 60)
        try:
            row = train_variant(options, name, steps, options.recipe, options.batch, *VARIANTS[name])
        except Exception:
            notes.append(f"train variant '{name}' failed: {traceback.format_exc(limit=8)}")
            print(notes[-1], file=sys.stderr, flush=True)
            continue
        rows.append(row)
        print(row, flush=True)
        for key in ("data_wait_share", "tokens_per_s_gpu", "peak_gib", "loss_ratio"):
            value = row[key]
            figures[key] = value["median"] if isinstance(value, dict) else value
        figures["gpu_util"] = row["gpu_util_mean"]
        figures["step_ms"] = row["step_ms"]["median"]
        figures["variant"] = name


def train_variant(options, name, steps, recipe, samples, accumulation, pillars) -> dict[str, object]:
    from loongforge.config import build_config
    from loongforge.recipes import get_recipe
    from loongforge.runs import build_run

    with tempfile.TemporaryDirectory() as folder:
        values = {
            "dataset": str(options.dataset),
            "recipe": recipe,
            "output": folder,
            "steps": steps,
            "batch_size": samples // accumulation,
            "accumulation": accumulation,
            "workers": options.workers,
            "precision": "bf16" if options.device.startswith("cuda") else "fp32",
            "device": options.device,
            "control": False,
            "log_interval": 1000,
            "resume": "never",
            "pillars": pillars,
            "checkpoint": {"every": 0},
        }
        config = build_config(get_recipe(recipe).training, values)
        run = build_run(config)
        records: list[object] = []
        session = run.session
        session.parts.recorder.listeners.append(lambda record, _ids: records.append(record))
        sampler = Utilisation() if options.device.startswith("cuda") else None
        began = time.perf_counter()
        limit = 60 if options.quick else 150
        try:
            while session.engine.at.step < steps and session.engine.run_step():
                if sampler and session.engine.at.step == warm_up(steps):
                    sampler.start()
                if time.perf_counter() - began > limit:
                    break
            synchronize(options.device)
            utilisation = sampler.stop() if sampler else []
            session.parts.recorder.flush()
        finally:
            session.close()
    return summarise(options, name, records, utilisation, samples, accumulation)


def warm_up(steps: int) -> int:
    return max(3, steps // 5)


def summarise(options, name, records, utilisation, samples, accumulation) -> dict[str, object]:
    losses = [r.loss for r in records if r.loss is not None]
    steady = records[warm_up(len(records)) :]
    step_ms = [r.step_ms for r in steady if r.step_ms]
    waits = [r.data_wait_ms or 0.0 for r in steady]
    tokens = [r.tokens_per_s_gpu for r in steady if r.tokens_per_s_gpu]
    tenth = max(1, min(10, len(losses) // 3))
    last = records[-1]
    return {
        "section": "train",
        "case": name,
        "samples": samples,
        "accumulation": accumulation,
        "steps": len(records),
        "step_ms": _common.spread(step_ms),
        "data_wait_share": sum(waits) / max(1e-9, sum(step_ms)),
        "gpu_util": _common.spread([u / 100 for u in utilisation]) if utilisation else None,
        "gpu_util_mean": sum(utilisation) / len(utilisation) / 100 if utilisation else None,
        "tokens_per_s_gpu": _common.spread(tokens) if tokens else None,
        "samples_per_s": 1e3 * samples / (sum(step_ms) / len(step_ms)),
        "peak_gib": peak_gib(options.device),
        "loss_first": sum(losses[:tenth]) / tenth,
        "loss_last": sum(losses[-tenth:]) / tenth,
        "loss_ratio": sum(losses[-tenth:]) / sum(losses[:tenth]),
        "fused": last.fused,
        "fusion_reason": last.fusion_reason,
        "graph": last.graph,
        "graph_reason": last.graph_reason,
    }


class Utilisation:
    """Share of time in which a kernel ran, as the driver samples it, every 0.2 s."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start sampling in a thread."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        command = [
            "nvidia-smi",
            f"--id={gpu}",
            "--query-gpu=utilization.gpu",
            "--format=csv,noheader,nounits",
            "--loop-ms=200",
        ]
        try:
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
                for line in process.stdout or ():
                    with contextlib.suppress(ValueError):
                        self._values.append(float(line))
                    if self._stop.is_set():
                        process.terminate()
                        break
        except OSError:
            return

    def stop(self) -> list[float]:
        """Stop and return percentages."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        # The driver's window of the first and the last sample reaches beyond the measured steps.
        return self._values[1:-1]


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
                row = train_variant(options, "24 GB preset", 20, options.budget_recipe, batch, 1, pillars)
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
