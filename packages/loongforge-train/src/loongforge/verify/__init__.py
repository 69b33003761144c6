"""Proof of equality: the same training with and without each pillar, from the same state.

Loss and gradient norm of every step and the final weights are compared. A toggle is one setting that
differs from the reference, which has every pillar off. What keeps every operation must be bit-exact
wherever the reference itself is; what reorders or rounds is held against tolerances by dtype.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from loongforge.config import CheckpointConfig, TrainConfig
from loongforge.ranks import Ranks
from loongforge.records import METRICS_FILE
from loongforge.verify.curves import Build, Curve, run_curve
from loongforge.verify.draw import plot
from loongforge.verify.judge import Verdict, exact_rule, judge, verdict_rows
from loongforge.verify.toggles import REFERENCE, TOGGLES, Toggle, Tolerance, parse_toggles

__all__ = [
    "TOGGLES", "Build", "Curve", "Toggle", "Tolerance", "Verdict",
    "parse_toggles", "plot", "recipe_build", "run_curve", "verdict_rows", "verify",
]  # fmt: skip


def reference_config(config: TrainConfig, folder: Path, name: str) -> TrainConfig:
    """Return the configuration with every pillar off, in a folder of its own, without checkpoints between."""
    return dataclasses.replace(
        config,
        output=str(folder / name),
        pillars=REFERENCE,
        resume="never",
        control=False,
        probe_interval=0,
        checkpoint=CheckpointConfig(every=0, keep_last=1, background=False),
    )


def verify(
    config: TrainConfig,
    toggles: Sequence[Toggle],
    *,
    ranks: Ranks,
    build: Build,
    folder: Path,
    repeats: int = 2,
) -> tuple[Curve, list[tuple[Verdict, Curve]]]:
    """Run the reference and every toggle, and judge each.

    Args:
        config: The run; its pillars are ignored.
        toggles: What to switch on, one at a time.
        ranks: This process among its peers; all ranks verify together.
        build: Builds a run of a configuration from scratch, with equal initial weights.
        folder: Where the runs go.
        repeats: On a GPU, how often the reference is run again before a toggle that keeps every operation
            is judged: atomic additions make it differ from itself. On the CPU it repeats bit for bit and is
            run once.
    """
    forget(folder, ranks)
    base = reference_config(config, folder, "reference")
    reference = run_curve(base, ranks, build)
    again: list[Curve] = []
    if ranks.device.type != "cpu" and any(toggle.kind == "exact" for toggle in toggles):
        names = [f"repeat_{number}" for number in range(1, repeats + 1)]
        again = [run_curve(reference_config(config, folder, name), ranks, build) for name in names]
    exact = exact_rule(reference, again)
    results = []
    for toggle in toggles:
        curve = run_curve(toggle.change(reference_config(config, folder, toggle.name)), ranks, build)
        results.append((judge(toggle, base, reference, curve, exact), curve))
    return reference, results


def forget(folder: Path, ranks: Ranks) -> None:
    """Remove what an earlier verification left in its folder; anything else there is left alone."""
    if ranks.rank == 0:
        for name in ("reference", *TOGGLES, *(path.name for path in folder.glob("repeat_*"))):
            if (folder / name / METRICS_FILE).exists():
                shutil.rmtree(folder / name)
    ranks.barrier()


def recipe_build(config: TrainConfig, ranks: Ranks) -> tuple[nn.Module, Callable[[], object]]:
    """Build a run of a recipe; equal seeds give equal weights, data order and draws."""
    if torch.cuda.is_available() and ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    from loongforge.runs import build_run

    run = build_run(config, ranks=ranks)
    return run.model, run.session.train
