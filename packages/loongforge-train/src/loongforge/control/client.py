"""The client side of the control socket."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from loongforge.control.paths import reachable
from loongforge.errors import ControlError


def ask(path: Path, command: str, *, timeout_s: float = 30.0, **arguments: object) -> dict[str, object]:
    """Send one request and return the answer.

    Args:
        path: Socket, as :func:`loongforge.control.paths.socket_of` finds it.
        command: Command name.
        timeout_s: Longest wait for the answer, seconds.
        arguments: Further fields of the request.

    Raises:
        ControlError: The process cannot be reached, does not answer in time, or refuses.
    """
    request = json.dumps({"command": command, **arguments}).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX) as client, reachable(path) as address:
            client.settimeout(timeout_s)
            client.connect(address)
            client.sendall(request)
            data = bytearray()
            while not data.endswith(b"\n"):
                chunk = client.recv(65_536)
                if not chunk:
                    break
                data += chunk
    except TimeoutError as error:
        msg = f"no answer from {path} within {timeout_s:.0f} s"
        raise ControlError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be reached: {error}"
        raise ControlError(msg) from error
    try:
        answer = json.loads(data)
    except ValueError as error:
        msg = f"{path} closed the connection without an answer"
        raise ControlError(msg) from error
    if not isinstance(answer, dict) or not answer.get("ok"):
        msg = f"refused: {answer.get('error') if isinstance(answer, dict) else answer}"
        raise ControlError(msg)
    return answer
