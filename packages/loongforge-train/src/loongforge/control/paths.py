"""Where sockets are: in the run directory, and by pid in a folder of the user."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loongforge.errors import ControlError

FOLDER = "control"


def registry() -> Path:
    """Return the user's folder of links ``<pid>`` -> socket, made with mode 0700.

    Raises:
        ControlError: The folder belongs to somebody else.
    """
    folder = Path(tempfile.gettempdir()) / f"loongforge-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        msg = f"{folder} must belong to uid {os.getuid()} with mode 0700: remove it"
        raise ControlError(msg)
    return folder


def socket_of(*, pid: int | None = None, run: Path | None = None, rank: int = 0) -> Path:
    """Find the socket of a process by its pid, or of a rank of a run directory.

    Raises:
        ControlError: There is none; the message says what was looked for.
    """
    if pid is not None:
        link = registry() / str(pid)
        if not link.is_symlink():
            msg = f"process {pid} has no control socket here: it is no running training of this user"
            raise ControlError(msg)
        return link.readlink()
    if run is None:
        msg = "neither a pid nor a run directory is given: pass --pid P or --run DIR"
        raise ControlError(msg)
    found = sorted((run / FOLDER).glob(f"rank_{rank:05d}_*.sock"), key=lambda path: path.stat().st_mtime)
    for path in reversed(found):
        if alive(path):
            return path
    msg = (
        f"no live control socket of rank {rank} in {run / FOLDER}: the training has ended, or --run is wrong"
    )
    raise ControlError(msg)


def alive(path: Path) -> bool:
    """Tell whether somebody listens on a socket."""
    with socket.socket(socket.AF_UNIX) as probe, reachable(path) as address:
        probe.settimeout(2)
        try:
            probe.connect(address)
        except OSError:
            return False
    return True


@contextmanager
def reachable(path: Path) -> Iterator[str]:
    """Yield an address for ``path`` that is short enough for a Unix socket, however deep the folder is."""
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)
