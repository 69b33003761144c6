"""Reading torch memory snapshots (``torch.cuda.memory._dump_snapshot``) as traces, without running them.

A snapshot is a pickle of dictionaries, lists, strings and numbers. A pickle may name any class of any module,
so the reader here refuses every class.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from loongforge_mem.trace import MAX_FILE_BYTES, Event, Trace


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        msg = f"the snapshot names the class {module}.{name}; a memory snapshot holds plain data only"
        raise pickle.UnpicklingError(msg)

    def persistent_load(self, pid: object) -> NoReturn:
        msg = f"the snapshot refers to the outside object {pid!r}; a memory snapshot holds plain data only"
        raise pickle.UnpicklingError(msg)


def load_snapshot(path: str | Path, *, device: int | None = None) -> Trace:
    """Read the allocations of one device from a torch memory snapshot.

    Args:
        path: file written by ``torch.cuda.memory._dump_snapshot``, recorded with history enabled.
        device: CUDA device index; ``None`` takes the device with the most events.

    Returns:
        The trace. Blocks freed inside the recording but made before it are left out; blocks that live on are
        never freed in it. ``owners`` names the first frame outside torch of every block.

    Raises:
        ValueError: not a snapshot, it holds anything but plain data, or no allocation was recorded.
        FileNotFoundError: no such file.
    """
    file = Path(path)
    size = file.stat().st_size
    if size > MAX_FILE_BYTES:
        msg = f"{file} has {size} bytes; allowed up to {MAX_FILE_BYTES}"
        raise ValueError(msg)
    try:
        body = _PlainUnpickler(io.BytesIO(file.read_bytes())).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError) as error:
        msg = f"{file} is not a readable memory snapshot: {error}"
        raise ValueError(msg) from None
    traces = body.get("device_traces") if isinstance(body, dict) else None
    if not isinstance(traces, list):
        msg = f"{file} has no 'device_traces'; record with torch.cuda.memory._record_memory_history()"
        raise ValueError(msg)  # noqa: TRY004
    if device is None:
        device = max(range(len(traces)), key=lambda i: len(traces[i]), default=0)
    if not 0 <= device < len(traces):
        msg = f"device is {device}; {file} has devices 0..{len(traces) - 1}"
        raise ValueError(msg)
    owners: dict[int, str] = {}
    events = tuple(_events(traces[device], owners))
    if not events:
        msg = f"{file} records no allocation on device {device}; start the history before the step"
        raise ValueError(msg)
    return Trace(events=events, source=f"{file.name}, device {device}", owners=owners)


def _events(entries: list[Mapping[str, Any]], owners: dict[int, str]) -> Iterator[Event]:
    live: dict[int, int] = {}
    count = 0
    for entry in entries:
        action, address = entry.get("action"), entry.get("addr", entry.get("address"))
        if not isinstance(address, int):
            continue
        if action == "alloc" and int(entry.get("size", 0)) > 0:
            if address in live:
                # The free was lost at the edge of the ring buffer of the recorder.
                yield False, live.pop(address), 0
            live[address] = count
            site = _site(entry.get("frames") or ())
            if site:
                owners[count] = site
            yield True, count, int(entry["size"])
            count += 1
        elif action in ("free_completed", "free") and address in live:
            yield False, live.pop(address), 0


def _site(frames: object) -> str:
    """Return the first frame that is not torch's own, as ``file:line function``."""
    if not isinstance(frames, list | tuple):
        return ""
    for frame in frames:
        name = str(frame.get("filename", ""))
        if name.endswith(".py") and "/torch/" not in name:
            return f"{Path(name).name}:{frame.get('line', 0)} {frame.get('name', '')}"
    return ""
