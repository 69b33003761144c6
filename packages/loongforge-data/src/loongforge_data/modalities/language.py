"""Language columns: lists of messages per row."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loongforge_data.errors import DataError


@dataclass(frozen=True, kw_only=True)
class LanguageEntry:
    """One message of a language column.

    Attributes:
        role: Who speaks, e.g. "user", "assistant".
        content: The text, byte for byte as stored.
        style: Kind of the message, e.g. "plan"; None when unset.
        timestamp: Seconds inside the episode; only persistent messages have one.
        camera: Camera the message refers to; None when unset.
        tool_calls: Decoded JSON values.
    """

    role: str
    content: str
    style: str | None
    timestamp: float | None
    camera: str | None
    tool_calls: tuple[object, ...]


def parse_language(value: object, *, key: str, row: int | None = None) -> tuple[LanguageEntry, ...]:
    """Read one cell of a language column.

    Args:
        value: A list of structs as pyarrow gives it, or None for an empty cell.
        key: Name of the column, for errors.
        row: Row, for errors.

    Raises:
        DataError: The cell is not a list of messages.
    """
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Sequence):
        msg = f"column {key!r} must hold a list of messages, found {type(value).__name__}"
        raise DataError(msg, row=row)
    return tuple(_entry(item, key, row) for item in value)


def _entry(item: object, key: str, row: int | None) -> LanguageEntry:
    if not isinstance(item, Mapping):
        msg = f"a message of column {key!r} must be a struct, found {type(item).__name__}"
        raise DataError(msg, row=row)
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str):
        msg = f"a message of column {key!r} has no role (found {role!r})"
        raise DataError(msg, row=row)
    stamp = item.get("timestamp")
    return LanguageEntry(
        role=role,
        content=content if isinstance(content, str) else "",
        style=_text(item.get("style")),
        timestamp=float(stamp) if isinstance(stamp, int | float) else None,
        camera=_text(item.get("camera")),
        tool_calls=tuple(_json(call, key, row) for call in item.get("tool_calls") or ()),
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _json(value: object, key: str, row: int | None) -> object:
    if not isinstance(value, str | bytes):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        msg = f"a tool call in column {key!r} is not JSON: {error}"
        raise DataError(msg, row=row) from error


def active_at(
    entries: Sequence[LanguageEntry], seconds: float, *, style: str | None = None
) -> LanguageEntry | None:
    """Return the persistent message in force at a time: the last one with timestamp <= seconds.

    Args:
        entries: Messages of one cell.
        seconds: Time inside the episode.
        style: Only messages of this style; None takes all.
    """
    known = [
        entry
        for entry in entries
        if entry.timestamp is not None
        and entry.timestamp <= seconds + 1e-6
        and (style is None or entry.style == style)
    ]
    return max(known, key=lambda entry: entry.timestamp or 0.0) if known else None
