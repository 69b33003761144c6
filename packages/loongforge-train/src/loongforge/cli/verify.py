"""``loongforge verify``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def verify(
    dataset: Annotated[str, typer.Option(help="LeRobot data set directory.")],
    recipe: Annotated[str, typer.Option(help="Recipe name.")] = "gr00t_n1_6_tiny",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 200,
    toggle: Annotated[
        str, typer.Option(help="Pillars to prove, one at a time: mem,data,fuse,graph,comm,ops,precision.")
    ] = "mem,data,fuse,graph,comm,ops,precision",
    batch_size: Annotated[int, typer.Option(help="Samples per micro-batch and rank.")] = 4,
    accumulation: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 4,
    precision: Annotated[str, typer.Option(help="Precision of the reference: fp32 or bf16.")] = "fp32",
    seed: Annotated[int, typer.Option(help="Seed of every run.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    output: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/verify"),
    plot: Annotated[Path | None, typer.Option(help="Draw the loss curves here (SVG or PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print verdicts as JSON.")] = False,
) -> int:
    """Prove that a pillar changes nothing: train with and without it from the same state and compare.

    Loss and gradient norm of every step and the final weights are held against tolerances by dtype. Exit code
    0: all equal within them; 1: something differs.
    """
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
    try:
        reference, results = run_all(config, toggles, ranks=ranks, build=recipe_build, folder=output)
    finally:
        ranks.close()
    verdicts = [verdict for verdict, _ in results]
    if ranks.rank == 0:
        if plot is not None:
            draw(reference, results, plot)
        text = (
            json.dumps([vars(v) for v in verdicts], indent=1) + "\n"
            if as_json
            else table(verdict_rows(verdicts))
        )
        sys.stdout.write(text)
    return 0 if all(verdict.passed for verdict in verdicts) else 1
