"""Names inside a checkpoint folder, its manifest, and writing a file so that it is on the disk or not there.

epoch_E_step_S/
  model.pt  optimizer.pt  scheduler.pt       plain torch.load(weights_only=True)
  sharded/                                   instead of model.pt, with checkpoint.layout = "sharded"
  loongforge_state/
    trainer.json                             step, configuration, topology, fingerprints
    rank_00000.pt ...                        random state, data position, guard, per rank
    comm_plan.json  mdg.json  memory_00000.json  average.pt  scaler.pt
    rank_00000.done ...                      written by each rank after its files are on the disk
    COMPLETE.json                            written last: every file with size and CRC-32
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from loongforge.errors import CheckpointError

FORMAT = 1
STATE = "loongforge_state"
COMPLETE = f"{STATE}/COMPLETE.json"
TRAINER = f"{STATE}/trainer.json"
FOLDER = re.compile(r"^epoch_(\d+)_step_(\d+)$")
TEMPORARY = ".tmp_"
TRASH = ".trash_"


class Sink(Protocol):
    """What a file is written through."""

    def write(self, data: bytes, /) -> int:
        """Write bytes and return how many."""
        ...


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint."""

    size: int
    """Bytes."""
    crc32: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The completeness marker."""

    format: int
    step: int
    epoch: int
    world_size: int
    loss: float | None
    files: Mapping[str, FileEntry] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the marker's text."""
        return json.dumps(asdict(self), indent=1)


def folder_name(epoch: int, step: int) -> str:
    """Return the folder name of a checkpoint."""
    return f"epoch_{epoch}_step_{step}"


def rank_file(rank: int) -> str:
    """Return the file of one rank's own state."""
    return f"{STATE}/rank_{rank:05d}.pt"


def done_file(rank: int) -> str:
    """Return the marker a rank writes after its files."""
    return f"{STATE}/rank_{rank:05d}.done"


def memory_file(rank: int) -> str:
    """Return the free-list state of one rank."""
    return f"{STATE}/memory_{rank:05d}.json"


class _CountingFile:
    """Writes through ``os.write``, counting bytes and CRC-32; torch.save needs no more than ``write``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size = 0
        self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size += len(view)
        done = 0
        try:
            while done < len(view):
                done += os.write(self._descriptor, view[done : done + (1 << 26)])
        except OSError as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered."""


def write_file(path: Path, fill: Callable[[Sink], object]) -> FileEntry:
    """Create ``path``, let ``fill`` write into it, and fsync it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        sink = _CountingFile(descriptor)
        try:
            fill(sink)
        except Exception as error:
            # torch.save hides the cause behind an error of its own zip writer.
            if sink.error is not None:
                raise sink.error from error
            raise
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileEntry(size=sink.size, crc32=sink.crc32)


def write_text(path: Path, text: str) -> FileEntry:
    """Write a text file through :func:`write_file` under a temporary name and rename it."""
    temporary = path.with_name(path.name + ".part")
    entry = write_file(temporary, lambda sink: sink.write(text.encode()))
    temporary.replace(path)
    return entry


def save_tensors(path: Path, value: object) -> FileEntry:
    """torch.save plain tensors, numbers, strings, lists and dicts."""
    return write_file(path, lambda sink: torch.save(value, sink))  # type: ignore[arg-type]


def load_tensors(path: Path) -> object:
    """torch.load with ``weights_only=True`` onto the host.

    Raises:
        CheckpointError: The file is missing, damaged, or holds other objects.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        msg = f"{path} does not exist: the checkpoint is incomplete"
        raise CheckpointError(msg) from error
    except Exception as error:
        msg = f"{path} cannot be loaded: {error}"
        raise CheckpointError(msg) from error


def sync_folder(path: Path) -> None:
    """Sync a folder to disk, so that names in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def read_manifest(folder: Path) -> Manifest:
    """Read the completeness marker.

    Raises:
        CheckpointError: There is none, or it is damaged or of another format.
    """
    path = folder / COMPLETE
    try:
        values = json.loads(path.read_text())
        files = {name: FileEntry(**entry) for name, entry in values["files"].items()}
        manifest = Manifest(**{**values, "files": files})
    except FileNotFoundError as error:
        msg = "no completeness marker: the write was interrupted"
        raise CheckpointError(msg) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"the completeness marker is damaged ({error})"
        raise CheckpointError(msg) from error
    if manifest.format != FORMAT:
        msg = f"the checkpoint has format {manifest.format}: this version reads {FORMAT}"
        raise CheckpointError(msg)
    return manifest


def checkpoint_folders(run: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield (step, epoch, folder) of everything named like a checkpoint in a run directory."""
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(run.iterdir()):
            match = FOLDER.match(entry.name)
            if match and entry.is_dir():
                yield int(match.group(2)), int(match.group(1)), entry
