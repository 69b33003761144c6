"""Writing a checkpoint: temporary folder, fsync, a marker of every rank, one manifest, one rename.

Ranks meet in the file system, not in collectives, so a slow disk never counts against a collective's time
limit (fault C21) and the write can run in a thread beside training.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from loongforge.checkpoint.find import inspect
from loongforge.checkpoint.layout import (
    COMPLETE,
    FORMAT,
    TEMPORARY,
    TRASH,
    FileEntry,
    Manifest,
    checkpoint_folders,
    done_file,
    folder_name,
    read_manifest,
    save_tensors,
    sync_folder,
    write_file,
    write_text,
)
from loongforge.checkpoint.sharded import SHARDS, begin_write, end_write
from loongforge.config import CheckpointConfig
from loongforge.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("loongforge.checkpoint")
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What one rank writes: host copies, in which nothing changes while training goes on, and shards."""

    step: int
    epoch: int
    loss: float | None
    tensors: Mapping[str, object] = field(default_factory=dict)
    """Relative file name -> plain tensors and containers for torch.save."""
    weights: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Relative file name -> state dict to write as safetensors."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Relative file name -> text."""
    shards: Mapping[str, Tensor] | None = None
    """Live tensors, this rank's part of a sharded state; copied to host memory when the write begins."""


class CheckpointWriter:
    """Writes snapshots of one rank into a run directory shared by all ranks.

    Args:
        run: Run directory.
        rank: This rank.
        world_size: Number of ranks; rank 0 completes the checkpoint.
        attempt: Text that is equal on all ranks of this start and differs from other starts.
        config: Retention, background writing, time limit.
        shard_group: Gloo group for the shards of a sharded state, used by nothing else.
    """

    def __init__(
        self,
        run: Path,
        *,
        rank: int,
        world_size: int,
        attempt: str,
        config: CheckpointConfig,
        shard_group: ProcessGroup | None = None,
    ) -> None:
        self.run = run
        self._rank = rank
        self._world_size = world_size
        self._attempt = attempt
        self._config = config
        self._shard_group = shard_group
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._hurried: float | None = None
        self.last_written: Path | None = None

    def clean(self) -> list[Path]:
        """Remove what interrupted writes of earlier starts left; call on rank 0 before any rank writes."""
        removed = []
        if self.run.is_dir():
            for entry in self.run.iterdir():
                own = entry.name.endswith(f"_{self._attempt}")
                if entry.name.startswith((TEMPORARY, TRASH)) and not own:
                    shutil.rmtree(entry, ignore_errors=True)
                    removed.append(entry)
        return removed

    def write(self, snapshot: Snapshot, *, background: bool | None = None) -> None:
        """Write a snapshot, in a thread when configured; waits for the previous one first.

        Raises:
            CheckpointError: This write (or the previous one in the background) failed; the older ones are
                intact.
        """
        self.wait()
        shards = self._begin_shards(snapshot)
        if self._config.background if background is None else background:
            self._thread = threading.Thread(
                target=self._guarded, args=(snapshot, shards), name="loongforge-checkpoint"
            )
            self._thread.start()
        else:
            self._write(snapshot, shards)

    def wait(self) -> None:
        """Wait for the write in the background and raise its error, if any."""
        if self._thread is not None:
            self._thread.join(self._config.timeout_s * 2)
            if self._thread.is_alive():
                msg = f"the checkpoint write did not end within {2 * self._config.timeout_s:.0f} s"
                raise CheckpointError(msg)
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def hurry(self, limit_s: float) -> None:
        """Give a write in the background ``limit_s`` more seconds for parts of other ranks.

        For a writer that nobody asks any more: what fails is logged instead of raised.
        """
        self._hurried = time.monotonic() + limit_s

    def busy(self) -> bool:
        """Tell whether a write is going on."""
        return self._thread is not None and self._thread.is_alive()

    def _guarded(self, snapshot: Snapshot, shards: Future[object] | None) -> None:
        try:
            self._write(snapshot, shards)
        except Exception as error:  # handed to the training thread by wait()
            self._error = error
            if self._hurried is not None:
                log.warning("%s", error)

    def _temporary(self, snapshot: Snapshot) -> Path:
        return self.run / f"{TEMPORARY}{folder_name(snapshot.epoch, snapshot.step)}_{self._attempt}"

    def _begin_shards(self, snapshot: Snapshot) -> Future[object] | None:
        if snapshot.shards is None:
            return None
        if self._shard_group is None:
            msg = "the snapshot holds shards and the writer has no process group for them"
            raise CheckpointError(msg)
        return begin_write(snapshot.shards, self._temporary(snapshot) / SHARDS, self._shard_group)

    def _write(self, snapshot: Snapshot, shards: Future[object] | None) -> None:
        temporary = self._temporary(snapshot)
        name = folder_name(snapshot.epoch, snapshot.step)
        try:
            entries = self._write_files(temporary, snapshot)
            if shards is not None:
                limit = self._config.timeout_s
                entries |= end_write(shards, temporary / SHARDS, rank=self._rank, timeout_s=limit)
            marker = json.dumps({k: asdict(v) for k, v in entries.items()})
            write_text(temporary / done_file(self._rank), marker)
            if self._rank == 0:
                self._complete(temporary, self.run / name, snapshot)
                self.last_written = self.run / name
                self._retain()
        except OSError as error:
            if self._rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(self._explain(error, name)) from error

    def _write_files(self, folder: Path, snapshot: Snapshot) -> dict[str, FileEntry]:
        entries = {}
        for name, value in snapshot.tensors.items():
            entries[name] = save_tensors(folder / name, value)
        for name, state in snapshot.weights.items():
            entries[name] = _save_safetensors(folder / name, state)
        for name, text in snapshot.texts.items():
            entries[name] = write_text(folder / name, text)
        return entries

    def _complete(self, temporary: Path, final: Path, snapshot: Snapshot) -> None:
        """Wait for every rank's marker, write the manifest last, and rename."""
        files: dict[str, FileEntry] = {}
        deadline = time.monotonic() + self._config.timeout_s
        for rank in range(self._world_size):
            marker = temporary / done_file(rank)
            while not marker.exists():
                if time.monotonic() > min(deadline, self._hurried or deadline):
                    message = (
                        f"rank {rank} did not write its part of {final.name} in time (limit "
                        f"{self._config.timeout_s:.0f} s, less when ranks are lost): the checkpoint is not "
                        "completed, older ones are intact; look at that rank's log"
                    )
                    raise CheckpointError(message)
                time.sleep(0.005)
            files |= {name: FileEntry(**entry) for name, entry in json.loads(marker.read_text()).items()}
        manifest = Manifest(
            format=FORMAT,
            step=snapshot.step,
            epoch=snapshot.epoch,
            world_size=self._world_size,
            loss=snapshot.loss,
            files=files,
        )
        write_text(temporary / COMPLETE, manifest.to_json())
        for folder in {temporary, *(path.parent for path in temporary.rglob("*"))}:
            sync_folder(folder)
        if final.exists():
            _exchange(temporary, final)
            self._remove(temporary)
        else:
            temporary.rename(final)
        sync_folder(self.run)

    def _retain(self) -> None:
        """Delete old complete checkpoints; the newest always stays, incomplete ones are left for the user."""
        complete = [
            (step, folder) for step, _, folder in checkpoint_folders(self.run) if inspect(folder) is None
        ]
        complete.sort()
        keep = {folder for _, folder in complete[-self._config.keep_last :]}
        if self._config.keep_best:
            losses = [(read_manifest(folder).loss, folder) for _, folder in complete]
            ranked = sorted((loss, str(folder)) for loss, folder in losses if loss is not None)
            keep |= {Path(folder) for _, folder in ranked[: self._config.keep_best]}
        for _, folder in complete:
            if folder not in keep:
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        """Rename away first: a kill in mid-removal never leaves something that looks like a checkpoint."""
        trash = self.run / f"{TRASH}{folder.name.lstrip('.')}_{self._attempt}"
        folder.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)

    def _explain(self, error: OSError, name: str) -> str:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            free = shutil.disk_usage(self.run).free if self.run.is_dir() else 0
            return (
                f"no space for checkpoint {name} in {self.run}: {free / 2**20:.0f} MiB are free. Older "
                "checkpoints are intact; free space, lower checkpoint.keep_last, or write to another disk"
            )
        return f"checkpoint {name} could not be written in {self.run}: {error}. Older checkpoints are intact"


def _exchange(first: Path, second: Path) -> None:
    """Swap two folders in one step (renameat2): a complete checkpoint stands under the name at any time."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if code != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot swap {first} and {second}: {os.strerror(number)}")


def _save_safetensors(path: Path, state: Mapping[str, object]) -> FileEntry:
    """Write a state dict as safetensors; a tied tensor is stored once, its other names in the metadata."""
    from safetensors.torch import save

    unique: dict[str, Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        key = (value.untyped_storage().data_ptr(), value.storage_offset(), tuple(value.shape))
        if value.numel() and key in first:
            tied[name] = first[key]
        else:
            first[key] = name
            unique[name] = value.contiguous()
    data = save(unique, metadata={"tied": json.dumps(tied), "format": "pt"})
    return write_file(path, lambda sink: sink.write(data))


def load_safetensors(path: Path) -> dict[str, object]:
    """Read a safetensors state dict and put the tied names back."""
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        tied = json.loads((file.metadata() or {}).get("tied", "{}"))
    return {**state, **{name: state[origin] for name, origin in tied.items()}}
