"""Commands that read runs and checkpoints: validate-checkpoint, report, compare, doctor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def validate_checkpoint(
    folder: Annotated[Path, typer.Argument(help="Checkpoint folder (epoch_E_step_S).")],
    model: Annotated[
        str | None, typer.Option(help="Recipe the checkpoint should fit, e.g. gr00t_n1_6_tiny.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings as JSON.")] = False,
) -> int:
    """Check every file, name, shape, fingerprint, plan and free list of a checkpoint before a run.

    Exit code 0: usable; 74: not, with what to delete or change.
    """
    from loongforge.checkpoint import validate_checkpoint as validate
    from loongforge.errors import CheckpointError

    built = None
    if model is not None:
        from loongforge.recipes import get_recipe

        recipe = get_recipe(model)
        built = recipe.build_model(recipe.options(stored_options(folder, model)), 0)
    findings = validate(folder, model=built)
    if as_json:
        sys.stdout.write(json.dumps([vars(finding) for finding in findings], indent=1) + "\n")
    else:
        for finding in findings:
            sys.stdout.write(f"{'ok  ' if finding.ok else 'BAD '} {finding.part}: {finding.detail}\n")
            if finding.remedy and not finding.ok:
                sys.stdout.write(f"     what to do: {finding.remedy}\n")
    return 0 if all(finding.ok for finding in findings) else CheckpointError.exit_code


def stored_options(folder: Path, recipe: str) -> dict[str, object]:
    """Return the recipe options a checkpoint was written with, when it is of the same recipe."""
    from loongforge.checkpoint.layout import TRAINER

    try:
        config = json.loads((folder / TRAINER).read_text())["config"]
    except (OSError, ValueError, KeyError):
        return {}
    return dict(config["recipe_options"]) if config.get("recipe") == recipe else {}


def report(
    run: Annotated[Path, typer.Argument(help="Run directory with metrics.jsonl.")],
    html: Annotated[
        Path | None, typer.Option(help="Where the HTML page goes; by default RUN/report.html.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the diagnosis as JSON.")] = False,
) -> int:
    """Say where the time goes and what to change: one screen, and a self-contained HTML page."""
    import dataclasses

    from loongforge.report.bottleneck import diagnose
    from loongforge.report.html import page
    from loongforge.report.text import screen

    records = read(run)
    diagnosis = diagnose(records)
    target = html if html is not None else run / "report.html"
    target.write_text(
        page(diagnosis, records, title=f"LoongForge run {run.resolve().name}"), encoding="utf-8"
    )
    if as_json:
        sys.stdout.write(json.dumps(dataclasses.asdict(diagnosis), indent=1) + "\n")
    else:
        from loongforge.elastic.notice import ranks_over_time

        text = screen(diagnosis, title=run.resolve().name) + ranks_over_time(run)
        sys.stdout.write(f"{text}page: {target.resolve()}\n")
    return 0


def compare(
    first: Annotated[Path, typer.Argument(help="Run directory.")],
    second: Annotated[Path, typer.Argument(help="Run directory to compare with it.")],
) -> int:
    """Show two runs side by side: times, rates, memory, and how far the losses differ."""
    from loongforge.report.compare import compare as side_by_side

    names = (first.resolve().name, second.resolve().name)
    sys.stdout.write(side_by_side(read(first), read(second), names=names))
    return 0


def read(run: Path) -> list[dict[str, object]]:
    """Read the records of a run, or fail saying what is missing."""
    from loongforge.errors import DataExhaustedError
    from loongforge.records import read_metrics

    try:
        records = read_metrics(run)
    except FileNotFoundError as error:
        msg = f"{run} has no metrics.jsonl: give the --output directory of a training"
        raise DataExhaustedError(msg) from error
    if not records:
        msg = f"{run} has no finished step yet"
        raise DataExhaustedError(msg)
    return records


def doctor(
    dataset: Annotated[str | None, typer.Option(help="Data set to look at.")] = None,
    output: Annotated[Path, typer.Option(help="Where checkpoints would go.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> int:
    """Look at the machine before a run: driver, NCCL, codecs, /dev/shm, limits, disk, data set, versions.

    Exit code 0: nothing is wrong (warnings are fine); 1: something must be fixed first.
    """
    from loongforge.doctor import examine

    checks = examine(dataset=dataset, output=output)
    if as_json:
        sys.stdout.write(json.dumps([vars(check) for check in checks], indent=1) + "\n")
    else:
        for check in checks:
            sys.stdout.write(f"{check.state:<5} {check.name}: {check.detail}\n")
            if check.remedy:
                sys.stdout.write(f"      {check.remedy}\n")
    return 1 if any(check.state == "bad" for check in checks) else 0
