"""``loongforge verify``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from loongforge.config import TrainConfig
    from loongforge.ranks import Ranks
    from loongforge.verify import Verdict


def verify(
    dataset: Annotated[str, typer.Option(help="LeRobot data set directory.")],
    recipe: Annotated[str, typer.Option(help="Recipe name.")] = "gr00t_n1_6_tiny",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 200,
    toggle: Annotated[
        str, typer.Option(help="Pillars to prove, one at a time, separated by commas; all by default.")
    ] = "mem,data,fuse,graph,comm,optimizer,ops,precision",
    batch_size: Annotated[int, typer.Option(help="Samples per micro-batch and rank.")] = 4,
    accumulation: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 4,
    precision: Annotated[str, typer.Option(help="Precision of the reference: fp32 or bf16.")] = "fp32",
    seed: Annotated[int, typer.Option(help="Seed of every run.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    repeats: Annotated[
        int,
        typer.Option(min=1, help="On a GPU: further runs of the reference, which differs from itself there."),
    ] = 2,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="On a GPU: torch's deterministic operators, so that runs repeat."
        ),
    ] = False,
    output: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/verify"),
    plot: Annotated[Path | None, typer.Option(help="Draw the loss curves here (SVG or PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print settings and verdicts as JSON.")] = False,
) -> int:
    """Prove that a pillar changes nothing: train with and without it from the same state and compare.

    Loss and gradient norm of every step and the final weights are compared. A pillar that keeps every
    operation must be bit-exact wherever the reference repeats itself bit for bit; on a GPU it otherwise
    must stay within what repeats of the reference differ by. The others are held against tolerances by
    dtype. Exit code 0: all equal; 1: something differs.
    """
    if deterministic:
        # cuBLAS reads this when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from loongforge.config import build_config
    from loongforge.ranks import join
    from loongforge.report.text import table
    from loongforge.verify import parse_toggles, recipe_build, verdict_rows
    from loongforge.verify import plot as draw
    from loongforge.verify import verify as run_all

    toggles = parse_toggles(toggle)
    config = build_config(
        {
            "dataset": dataset,
            "recipe": recipe,
            "steps": steps,
            "batch_size": batch_size,
            "accumulation": accumulation,
            "precision": precision,
            "seed": seed,
            "device": device,
            "output": str(output),
            "log_interval": max(1, steps // 5),
        }
    )
    ranks = join(device)
    if deterministic:
        import torch

        torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        reference, results = run_all(
            config, toggles, ranks=ranks, build=recipe_build, folder=output, repeats=repeats
        )
    finally:
        ranks.close()
    verdicts = [verdict for verdict, _ in results]
    if ranks.rank == 0:
        if plot is not None:
            draw(reference, results, plot)
        text = as_text(config, ranks, verdicts, deterministic=deterministic) if as_json else None
        sys.stdout.write(text or table(verdict_rows(verdicts)))
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def as_text(config: TrainConfig, ranks: Ranks, verdicts: Sequence[Verdict], *, deterministic: bool) -> str:
    """Return settings, machine and verdicts as JSON; what is infinite or unknown becomes null."""
    import platform

    import torch

    from loongforge.control.live import clean

    names = ("recipe", "steps", "batch_size", "accumulation", "precision", "seed")
    on_gpu = ranks.device.type == "cuda"
    values = {
        **{name: getattr(config, name) for name in names},
        "dataset": Path(str(config.dataset)).name,
        "ranks": ranks.world_size,
        "device": torch.cuda.get_device_name(ranks.device) if on_gpu else "cpu",
        "deterministic": deterministic,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "verdicts": [vars(verdict) for verdict in verdicts],
    }
    return json.dumps(clean(values), indent=1) + "\n"
