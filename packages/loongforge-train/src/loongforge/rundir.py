"""What an earlier run left in a run directory, and how a new one is kept from mixing with it.

A later resume takes the checkpoint with the highest step: if the one of another run could lie there, it would
go on with other weights and say nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from loongforge.checkpoint.layout import checkpoint_folders
from loongforge.errors import ConfigError
from loongforge.records import METRICS_FILE, read_metrics

log = logging.getLogger("loongforge")
BESIDE = ("report.html", "stacks", "tensorboard", "wandb")
"""What else belongs to a run and goes with it."""


def prepare(run: Path, *, start: Path | None, resume: str, earlier: str) -> None:
    """Make sure that what lies in a run directory belongs to the run that starts there (rank 0 only).

    Args:
        run: Run directory.
        start: Checkpoint this run goes on from, or None.
        resume: The setting ``resume``.
        earlier: The setting ``earlier_run``: ``refuse`` or ``move``.

    Raises:
        ConfigError: Files of an earlier run would be mixed with those of this one; nothing was changed.
    """
    goes_on = start is not None and start.parent.resolve() == run.resolve()
    if goes_on and resume == "auto":
        # The newest complete one was taken: above it lies only what was passed over as damaged.
        return
    foreign = (
        later_checkpoints(run, start) if goes_on else [folder for _, _, folder in checkpoint_folders(run)]
    )
    records = 0 if goes_on else recorded_steps(run)
    if not goes_on and resume == "auto":
        # Nothing complete was found, or the search would have taken it: only the records could be lost.
        if records:
            kept = keep_records(run)
            log.warning("no complete checkpoint: %d earlier records are kept in %s", records, kept.name)
        return
    if not foreign and not records:
        return
    what = _describe(foreign, records)
    if earlier == "move":
        folder = move_aside(run, foreign if goes_on else _whole_run(run, foreign))
        log.warning("moved %s of an earlier run to %s", what, folder.name)
        return
    on = f"from {start.name}" if goes_on and start is not None else f"with resume {resume}"
    message = (
        f"{run} holds {what} of an earlier run, and a run that starts {on} would mix with it: allowed are "
        "--resume auto (go on from the newest checkpoint), another --output, or --earlier-run move (puts the "
        "earlier files into a folder of their own)"
    )
    raise ConfigError(message)


def later_checkpoints(run: Path, start: Path | None) -> list[Path]:
    """Return checkpoints of later steps than ``start``: a branch that this run leaves."""
    found = list(checkpoint_folders(run))
    own = [step for step, _, folder in found if start is not None and folder.name == start.name]
    return [folder for step, _, folder in found if own and step > own[0]]


def recorded_steps(run: Path) -> int:
    """Return how many step records lie in a run directory."""
    try:
        return len(read_metrics(run))
    except OSError:
        return 0


def keep_records(run: Path) -> Path:
    """Rename the records to the first free ``metrics.N.jsonl`` and return its path."""
    stem, suffix = METRICS_FILE.split(".")
    number = 1
    while (target := run / f"{stem}.{number}.{suffix}").exists():
        number += 1
    (run / METRICS_FILE).rename(target)
    return target


def move_aside(run: Path, entries: Sequence[Path]) -> Path:
    """Move entries of a run directory into the first free ``earlier-N`` and return that folder."""
    number = 1
    while (target := run / f"earlier-{number}").exists():
        number += 1
    target.mkdir()
    for entry in entries:
        entry.rename(target / entry.name)
    return target


def _whole_run(run: Path, checkpoints: Sequence[Path]) -> list[Path]:
    others = [run / METRICS_FILE, *(run / name for name in BESIDE)]
    return [*checkpoints, *(path for path in others if path.exists())]


def _describe(checkpoints: Sequence[Path], records: int) -> str:
    parts = []
    if checkpoints:
        names = ", ".join(path.name for path in checkpoints[:3])
        more = f" and {len(checkpoints) - 3} more" if len(checkpoints) > 3 else ""
        parts.append(f"{len(checkpoints)} checkpoint(s) ({names}{more})")
    if records:
        parts.append(f"{records} step record(s)")
    return " and ".join(parts)
