"""Task texts by index, from the shapes writers have used for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from loongforge_data.errors import LayoutError
from loongforge_data.formats.info import read_jsonl
from loongforge_data.formats.tables import read_table


def read_tasks(root: Path) -> Mapping[int, str]:
    """Return task texts by `task_index`, byte for byte as stored.

    Reads `meta/tasks.parquet` (text as a pandas index or as a column) or `meta/tasks.jsonl`.

    Raises:
        LayoutError: Neither file exists, or an index occurs twice with different texts.
    """
    parquet = root / "meta" / "tasks.parquet"
    lines = root / "meta" / "tasks.jsonl"
    if parquet.exists():
        return _from_parquet(parquet)
    if lines.exists():
        tasks: dict[int, str] = {}
        for row in read_jsonl(lines):
            _add(tasks, row.get("task_index"), row.get("task"), lines)
        return tasks
    msg = f"no task table: neither {parquet.name} nor {lines.name} exists"
    raise LayoutError(msg, path=root / "meta")


def _from_parquet(path: Path) -> Mapping[int, str]:
    table = read_table(path)
    texts = [
        name
        for name in table.column_names
        if pa.types.is_string(table.schema.field(name).type)
        or pa.types.is_large_string(table.schema.field(name).type)
    ]
    if "task_index" not in table.column_names or not texts:
        msg = f"task table must have 'task_index' and a text column, found {table.column_names}"
        raise LayoutError(msg, path=path)
    column = "task" if "task" in texts else texts[0]
    tasks: dict[int, str] = {}
    for index, text in zip(table["task_index"].to_pylist(), table[column].to_pylist(), strict=True):
        _add(tasks, index, text, path)
    return tasks


def _add(tasks: dict[int, str], index: object, text: object, path: Path) -> None:
    if not isinstance(index, int) or not isinstance(text, str):
        msg = f"task row needs a whole number and a text, found {index!r} and {text!r}"
        raise LayoutError(msg, path=path)
    if tasks.get(index, text) != text:
        msg = f"task_index {index} has two texts: {tasks[index]!r} and {text!r}"
        raise LayoutError(msg, path=path)
    tasks[index] = text
