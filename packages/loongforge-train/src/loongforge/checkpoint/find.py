"""Finding the newest complete checkpoint, and saying why others were passed over (faults T02, T05)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loongforge.checkpoint.layout import (
    TEMPORARY,
    Manifest,
    checkpoint_folders,
    checksum,
    read_manifest,
)
from loongforge.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Found:
    """Outcome of a search."""

    folder: Path | None
    """Newest complete checkpoint, or None."""
    passed_over: tuple[tuple[Path, str], ...] = ()
    """Newer or odd entries that were not taken, each with the reason."""


def inspect(folder: Path, *, checksums: bool = False) -> str | None:
    """Return why a folder is not a complete checkpoint, or None when it is.

    Args:
        folder: Checkpoint folder.
        checksums: Also compare CRC-32 of every file (reads all bytes once).
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return str(error)
    problems = file_problems(folder, manifest, checksums=checksums)
    return "; ".join(problems) or None


def file_problems(folder: Path, manifest: Manifest, *, checksums: bool) -> list[str]:
    """Return one line per file that is missing or not what the manifest says."""
    problems = []
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError:
            problems.append(f"{name} is missing")
            continue
        if size != entry.size:
            problems.append(f"{name} has {size} bytes instead of {entry.size}")
        elif checksums and checksum(path) != entry.crc32:
            problems.append(f"{name} has another checksum than when it was written")
    return problems


def find_newest(run: Path, *, checksums: bool = True) -> Found:
    """Search a run directory for its newest complete checkpoint."""
    passed: list[tuple[Path, str]] = []
    if run.is_dir():
        for entry in sorted(run.iterdir()):
            if entry.name.startswith(TEMPORARY):
                passed.append((entry, "an unfinished write"))
            elif entry.is_dir() and entry.name.startswith(("epoch_", "ckpt", "checkpoint")):
                if not any(entry == folder for _, _, folder in checkpoint_folders(run)):
                    passed.append((entry, "not named epoch_E_step_S"))
            elif entry.is_file() and entry.name.startswith(("epoch_", "ckpt", "checkpoint")):
                passed.append((entry, "a file, not a checkpoint folder"))
    for _, _, folder in sorted(checkpoint_folders(run), reverse=True):
        reason = inspect(folder, checksums=checksums)
        if reason is None:
            return Found(folder=folder, passed_over=tuple(passed))
        passed.append((folder, reason))
    return Found(folder=None, passed_over=tuple(passed))


def require_complete(folder: Path, *, checksums: bool = True) -> None:
    """Fail unless ``folder``, named by the user, is a complete checkpoint.

    Raises:
        CheckpointError: It is not; the message says why and names a complete one beside it.
    """
    if not folder.is_dir():
        msg = f"checkpoint {folder} does not exist"
        raise CheckpointError(msg)
    reason = inspect(folder, checksums=checksums)
    if reason is None:
        return
    other = find_newest(folder.parent, checksums=False).folder
    hint = (
        f"; the newest complete one beside it is {other}" if other else "; there is no complete one beside it"
    )
    msg = f"checkpoint {folder} cannot be used: {reason}{hint}"
    raise CheckpointError(msg)
