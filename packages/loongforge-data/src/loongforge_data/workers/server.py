"""A clean process from which worker processes are forked, started by exec once per trainer process.

Forking the trainer itself would copy its threads' locks, its open decoders and its CUDA state into the
child. The server has none of these: it imports what workers need, then waits for requests. Each request
carries the ring's descriptor, one end of a pipe, and a pickled `WorkerSpec`; the server forks a zygote
(see `zygote`) that reads them.

The trainer's main module is not imported, so scripts need no ``if __name__ == "__main__"`` guard. What the
spec refers to must be importable; the import path is the trainer's.
"""

from __future__ import annotations

import array
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress

_LENGTH = struct.Struct("<q")
_START_SECONDS = 120.0
_COMMAND = "import sys; sys.path[:] = {path!r}; from loongforge_data.workers.server import serve; serve({fd})"


class WorkerServer:
    """The trainer's end: asks the server for zygotes."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109 - a string for sys.path
        command = [sys.executable, "-c", _COMMAND.format(path=path, fd=theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        ours.settimeout(_START_SECONDS)
        self._socket = ours
        self.owner = os.getpid()

    def fork(self, payload: bytes, descriptors: tuple[int, int]) -> int:
        """Start a zygote; returns its process id.

        Args:
            payload: Pickled arguments of the zygote.
            descriptors: The ring's, and the zygote's end of a pipe.

        Raises:
            OSError: The server is gone or does not answer.
        """
        message = _LENGTH.pack(len(payload)) + payload
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        sent = self._socket.sendmsg([message], rights)
        self._socket.sendall(message[sent:])
        answer = _receive(self._socket, _LENGTH.size)
        if len(answer) < _LENGTH.size:
            msg = (
                f"the process that worker processes are forked from has ended (exit code "
                f"{self.process.poll()})"
            )
            raise OSError(msg)
        (pid,) = _LENGTH.unpack(answer)
        return int(pid)

    def alive(self) -> bool:
        """Return whether the server runs and belongs to this process."""
        return self.owner == os.getpid() and self.process.poll() is None


_lock = threading.Lock()
_server: WorkerServer | None = None


def fork_zygote(payload: bytes, descriptors: tuple[int, int]) -> int:
    """Start a zygote through this process's server, which is started when there is none."""
    global _server
    with _lock:
        if _server is None or not _server.alive():
            _server = WorkerServer()
        try:
            return _server.fork(payload, descriptors)
        except OSError:
            with suppress(OSError):
                _server.process.kill()
            _server = None
            raise


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            break
        data += piece
    return data


def serve(descriptor: int) -> None:
    """Be the server: fork a zygote per request until the trainer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # zygotes are reaped by the system
    # Imported before the first fork, so that every worker has it at once.
    import loongforge_data.workers.zygote  # noqa: F401

    owner = os.getppid()
    try:
        owner_fd = os.pidfd_open(owner)
    except OSError:
        return
    connection = socket.socket(fileno=descriptor)
    while True:
        readable, _, _ = select.select([connection.fileno(), owner_fd], [], [])
        if connection.fileno() not in readable:
            return
        first, ancillary, _, _ = connection.recvmsg(_LENGTH.size, socket.CMSG_LEN(2 * 4))
        if len(first) < _LENGTH.size:
            return
        descriptors = array.array("i")
        for _, _, raw in ancillary:
            descriptors.frombytes(raw)
        payload = _receive(connection, _LENGTH.unpack(first)[0])
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            os.close(owner_fd)
            _be_zygote(payload, owner, descriptors[0], descriptors[1])
        for copy in descriptors:
            os.close(copy)
        connection.sendall(_LENGTH.pack(child))


def _be_zygote(payload: bytes, owner: int, ring: int, pipe: int) -> None:
    """Read the spec and serve as zygote; never returns."""
    from multiprocessing.connection import Connection

    from loongforge_data._core import Ring
    from loongforge_data.workers.zygote import zygote_main

    connection = Connection(pipe)
    try:
        spec = pickle.loads(payload)
    except BaseException as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))
        os._exit(1)
    zygote_main(connection, Ring.attach(ring), spec, owner, [])
