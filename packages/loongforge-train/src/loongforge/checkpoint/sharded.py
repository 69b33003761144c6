"""Sharded checkpoints: each rank writes its own shards beside training, through torch.distributed.checkpoint.

The files lie in ``sharded/`` of the checkpoint folder and are published like all others: temporary folder,
marker of every rank, manifest, one rename. Only tensors go in, under flat names (``model/NAME``,
``optimizer/NAME/KEY``, ``average/NAME``), so that nothing but tensors is ever read back. Any number of
ranks and any strategy can load them; ``python -m torch.distributed.checkpoint.format_utils dcp_to_torch``
turns them into one file without this package.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from loongforge.checkpoint.layout import FileEntry, checksum, sync_folder
from loongforge.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SHARDS = "sharded"
METADATA = ".metadata"
MODEL, OPTIMIZER, AVERAGE = "model/", "optimizer/", "average/"


def is_sharded(folder: Path) -> bool:
    """Tell whether a checkpoint folder holds shards instead of whole files."""
    return (folder / SHARDS / METADATA).is_file()


def flat_state(
    model: nn.Module, optimizer: Optimizer, average: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return weights, moments and average under flat names; the tensors are the live ones, not copies."""
    state = {MODEL + name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                state[f"{OPTIMIZER}{name}/{key}"] = value
    return state | {AVERAGE + name: value for name, value in (average or {}).items()}


def begin_write(state: Mapping[str, Tensor], folder: Path, group: ProcessGroup) -> Future[Any]:
    """Copy the shards to host memory and start writing them; returns before they are on the disk.

    All ranks call it together, each with its own group of Gloo ranks that nothing else uses: the collectives
    of the write run in a thread of torch's.
    """
    from torch.distributed import checkpoint as dcp

    writer = dcp.FileSystemWriter(folder, sync_files=True)
    started = dcp.async_save(dict(state), storage_writer=writer, process_group=group)
    return started if isinstance(started, Future) else started.upload_completion


def end_write(writing: Future[Any], folder: Path, *, rank: int, timeout_s: float) -> dict[str, FileEntry]:
    """Wait for the write and return this rank's files with sizes and checksums.

    Raises:
        CheckpointError: The write failed on some rank, or did not end in time.
        OSError: The write failed on this rank for a reason of the system, such as a full disk.
    """
    from torch.distributed.checkpoint import CheckpointException

    try:
        writing.result(timeout=timeout_s)
    except (FutureTimeoutError, TimeoutError) as error:
        msg = f"the shards were not written within {timeout_s:.0f} s; older checkpoints are intact"
        raise CheckpointError(msg) from error
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        cause = system_error(error)
        if cause is not None:
            raise cause from error
        msg = f"the shards could not be written: {reason(error)}; older checkpoints are intact"
        raise CheckpointError(msg) from error
    own = sorted(folder.glob(f"__{rank}_*"))
    if rank == 0:
        own.append(folder / METADATA)
        _sync(folder / METADATA)
    sync_folder(folder)
    return {
        f"{SHARDS}/{path.name}": FileEntry(size=path.stat().st_size, crc32=checksum(path)) for path in own
    }


def causes(error: BaseException) -> list[tuple[str, BaseException]]:
    """Return (rank, exception) of every rank that failed in a collective, or the error itself."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, Mapping) and failures:
        return [
            (f"rank {rank}: ", entry[0] if isinstance(entry, tuple) else entry)
            for rank, entry in failures.items()
        ]
    return [("", error)]


def system_error(error: BaseException) -> OSError | None:
    """Return the OSError behind a failed collective write, whichever rank it came from."""
    for _, cause in causes(error):
        current: BaseException | None = cause
        while current is not None:
            if isinstance(current, OSError):
                return current
            current = current.__cause__ or current.__context__
    return None


def reason(error: BaseException) -> str:
    """Return the first line of the first cause, with the rank it comes from."""
    rank, cause = causes(error)[0]
    lines = str(cause).strip().splitlines()
    return rank + (lines[0] if lines else type(cause).__name__)


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and type of every tensor in the shards of a checkpoint.

    Raises:
        CheckpointError: The index of the shards is damaged.
    """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        entries = dcp.FileSystemReader(folder / SHARDS).read_metadata().state_dict_metadata
    except Exception as error:
        msg = f"{folder / SHARDS / METADATA} cannot be read: {reason(error)}"
        raise CheckpointError(msg) from error
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_whole(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Read whole tensors whose names start with ``prefix`` into host memory, without any collective."""
    state = {
        name: torch.empty(size, dtype=dtype)
        for name, (size, dtype) in stored_tensors(folder).items()
        if name.startswith(prefix)
    }
    _load(state, folder, group=None)
    return {name.removeprefix(prefix): value for name, value in state.items()}


def read_moments(folder: Path) -> dict[str, dict[str, Tensor]]:
    """Read the whole moments: parameter name -> key -> tensor."""
    moments: dict[str, dict[str, Tensor]] = {}
    for name, value in read_whole(folder, OPTIMIZER).items():
        parameter, _, key = name.rpartition("/")
        moments.setdefault(parameter, {})[key] = value
    return moments


def load_shards(state: Mapping[str, Tensor], folder: Path, group: ProcessGroup | None) -> None:
    """Read each rank's own part into ``state`` in place, from shards of any number of ranks (a collective).

    Raises:
        CheckpointError: A tensor is missing or has another shape; the message names it.
    """
    stored = stored_tensors(folder)
    missing = sorted(set(state) - set(stored))
    extra = sorted(name for name in set(stored) - set(state) if not name.startswith(AVERAGE))
    shapes = [
        f"{name} {tuple(stored[name][0])} for {tuple(value.shape)}"
        for name, value in state.items()
        if name in stored and stored[name][0] != value.shape
    ]
    problems = (
        ("not in the checkpoint", missing),
        ("only in the checkpoint", extra),
        ("of another shape", shapes),
    )
    text = "; ".join(f"{what}: {', '.join(names[:8])}" for what, names in problems if names)
    if text:
        msg = f"the shards in {folder} do not fit the model: {text}. Use the recipe and options of the run"
        raise CheckpointError(msg)
    _load(state, folder, group=group)


def _load(state: Mapping[str, Tensor], folder: Path, *, group: ProcessGroup | None) -> None:
    from torch.distributed import checkpoint as dcp

    reader = dcp.FileSystemReader(folder / SHARDS)
    try:
        with warnings.catch_warnings():
            # torch tells that it reads in one process, which is what is meant without a group.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(dict(state), storage_reader=reader, process_group=group, no_dist=group is None)
    except (Exception, dcp.CheckpointException) as error:
        msg = f"the shards in {folder} cannot be read: {reason(error)}"
        raise CheckpointError(msg) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
