"""The server side: one thread that accepts, one short-lived thread per client.

Nothing of it waits in a step, and between clients nothing of it runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from loongforge.control.paths import FOLDER, alive, reachable, registry
from loongforge.errors import LoongForgeError

log = logging.getLogger("loongforge.control")
Request = Mapping[str, object]
Handler = Callable[[Request], Mapping[str, object]]
MOST_BYTES = 65_536
MOST_CLIENTS = 16
READ_TIMEOUT_S = 5.0
ACCEPT_TIMEOUT_S = 30.0
"""Longest wait of the accepting thread; :meth:`ControlServer.close` wakes it at once."""
LINGER_S = 3.0


class ControlServer:
    """Answers requests on a Unix socket of mode 0600; peers of another user are refused.

    One request is one JSON object on one line; the answer is one JSON line: ``{"ok": true, ...}`` or
    ``{"ok": false, "error": ...}``.

    Args:
        run: Run directory; the socket is ``control/rank_R_PID.sock`` in it.
        rank: This rank.
        handlers: Command name -> function that answers it, run in the client's thread.
    """

    def __init__(self, run: Path, *, rank: int, handlers: Mapping[str, Handler]) -> None:
        self._handlers = dict(handlers)
        folder = (run / FOLDER).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank_{rank:05d}_{os.getpid()}.sock"
        self._remove_stale(folder, rank)
        self._socket = socket.socket(socket.AF_UNIX)
        old = os.umask(0o177)
        try:
            with reachable(self.path) as address:
                self._socket.bind(address)
        finally:
            os.umask(old)
        self.path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        self._socket.listen(MOST_CLIENTS)
        self._socket.settimeout(ACCEPT_TIMEOUT_S)
        self._link = registry() / str(os.getpid())
        self._link.unlink(missing_ok=True)
        self._link.symlink_to(self.path)
        self._stop = threading.Event()
        self._slots = threading.BoundedSemaphore(MOST_CLIENTS)
        self._thread = threading.Thread(target=self._accept, name="loongforge-control", daemon=True)
        self._thread.start()

    @staticmethod
    def _remove_stale(folder: Path, rank: int) -> None:
        for path in folder.glob(f"rank_{rank:05d}_*.sock"):
            if not alive(path):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop accepting and remove the socket and its link."""
        self._stop.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(2)
        self.path.unlink(missing_ok=True)
        self._link.unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._stop.is_set():
            try:
                client, _ = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                client.close()
                continue
            threading.Thread(
                target=self._serve, args=(client,), name="loongforge-client", daemon=True
            ).start()

    def _serve(self, client: socket.socket) -> None:
        """Answer one client; whatever it sends, the worst that happens is a closed connection."""
        try:
            with client:
                client.settimeout(READ_TIMEOUT_S)
                answer = self._answer(client)
                client.settimeout(READ_TIMEOUT_S)
                client.sendall(json.dumps(answer).encode() + b"\n")
                _let_it_arrive(client)
        except OSError as error:
            log.debug("control client went away: %s", error)
        finally:
            self._slots.release()

    def _answer(self, client: socket.socket) -> Mapping[str, object]:
        uid = peer_uid(client)
        if uid != os.getuid() and uid != 0:
            return _refusal(f"uid {uid} may not control a training of uid {os.getuid()}")
        line = _read_line(client)
        if line is None:
            return _refusal(
                f"a request is one line of JSON of at most {MOST_BYTES} bytes, within {READ_TIMEOUT_S} s"
            )
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return _refusal("the request is not valid JSON")
        if not isinstance(request, dict) or not isinstance(request.get("command"), str):
            return _refusal('a request is an object with "command"')
        handler = self._handlers.get(request["command"])
        if handler is None:
            return _refusal(
                f"unknown command {request['command'][:80]!r}: allowed are {', '.join(self._handlers)}"
            )
        try:
            return {"ok": True, **handler(request)}
        except (LoongForgeError, ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
            return _refusal(str(error) or type(error).__name__)


def _let_it_arrive(client: socket.socket) -> None:
    """Wait, for a bounded time, until the client has closed its end.

    A socket closed with unread bytes resets the connection, and a refused client would see an error of the
    system in place of the reason.
    """
    client.shutdown(socket.SHUT_WR)
    client.settimeout(LINGER_S)
    for _ in range(64):
        if not client.recv(65_536):
            break


def peer_uid(client: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel knows it."""
    data = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", data)
    return int(uid)


def _read_line(client: socket.socket) -> bytes | None:
    data = bytearray()
    while b"\n" not in data:
        if len(data) > MOST_BYTES:
            return None
        try:
            chunk = client.recv(4096)
        except TimeoutError:
            return None
        if not chunk:
            return bytes(data) if data else None
        data += chunk
    return bytes(data.partition(b"\n")[0])


def _refusal(text: str) -> dict[str, object]:
    return {"ok": False, "error": text}
