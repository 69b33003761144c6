"""Checks on files before a decoder sees them: absent, empty, or a Git LFS pointer instead of content."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

_LFS_HEADER = b"version https://git-lfs.github.com/spec/"
_POINTER_LIMIT = 1024  # bytes; real pointer files have 120 to 200


@dataclass(frozen=True, kw_only=True)
class FileState:
    """What can be said about a file without decoding it.

    Attributes:
        path: The file.
        size: Size in bytes; 0 when it is absent.
        mtime_ns: Modification time in nanoseconds; 0 when it is absent.
        problem: Why the file cannot be used, or None.
    """

    path: str
    size: int
    mtime_ns: int
    problem: str | None


def file_state(path: str | Path) -> FileState:
    """Look at a file: one `stat`, and one short read for files small enough to be an LFS pointer."""
    name = str(path)
    try:
        info = Path(name).stat()
    except OSError as error:
        reason = "file is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        return FileState(path=name, size=0, mtime_ns=0, problem=reason)
    problem = None
    if not stat.S_ISREG(info.st_mode):
        problem = "is not a regular file"
    elif info.st_size == 0:
        problem = "file is empty (0 bytes)"
    elif info.st_size <= _POINTER_LIMIT and _is_pointer(name):
        problem = "is a Git LFS pointer, the content was not downloaded (run `git lfs pull`)"
    return FileState(path=name, size=info.st_size, mtime_ns=info.st_mtime_ns, problem=problem)


def _is_pointer(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(len(_LFS_HEADER)) == _LFS_HEADER
