"""Columns that are not numbers: texts and messages in memory, pictures in their files."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from loongforge_data.errors import TableError
from loongforge_data.formats.tables import open_parquet

_CACHE_BYTES = 1 << 30


class ObjectColumn(Protocol):
    """A column of Python objects, by row."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def __getitem__(self, row: int) -> object:
        """Return the value of a row."""
        ...

    def take(self, rows: NDArray[np.int64]) -> ObjectColumn:
        """Return a column of the chosen rows."""
        ...

    def place(self, row: int) -> tuple[str | None, int]:
        """Return file and row in it, for errors."""
        ...


class ArrowColumn:
    """A column kept in memory as Arrow data: no Python object per row until it is asked for."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: int) -> object:
        return self.column[int(row)].as_py()

    def take(self, rows: NDArray[np.int64]) -> ArrowColumn:
        """Return a column of the chosen rows."""
        return ArrowColumn(self.column.take(rows))

    def place(self, row: int) -> tuple[str | None, int]:
        """Return no file: the rows are in memory."""
        return None, int(row)


@dataclass(frozen=True)
class FileColumn:
    """A column left in its parquet files; row groups are read when needed and kept up to a bound.

    Attributes:
        paths: Files.
        key: Name of the column.
        file: (rows,) int32, position in `paths` of each row.
        row: (rows,) int64, row inside that file.
    """

    paths: tuple[str, ...]
    key: str
    file: NDArray[np.int32]
    row: NDArray[np.int64]

    @classmethod
    def whole(cls, path: str, key: str, count: int) -> FileColumn:
        """Return the column of all rows of one file."""
        return cls((path,), key, np.zeros(count, np.int32), np.arange(count, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, row: int) -> object:
        return _groups.value(self.paths[self.file[row]], self.key, int(self.row[row]))

    def take(self, rows: NDArray[np.int64]) -> FileColumn:
        """Return a column of the chosen rows."""
        return FileColumn(self.paths, self.key, self.file[rows], self.row[rows])

    def place(self, row: int) -> tuple[str | None, int]:
        """Return file and row in it."""
        return self.paths[self.file[row]], int(self.row[row])


def join_columns(parts: Sequence[ObjectColumn]) -> ObjectColumn:
    """Return one column with the rows of all parts, in order."""
    files = [part for part in parts if isinstance(part, FileColumn)]
    if files:
        paths = tuple(dict.fromkeys(path for part in files for path in part.paths))
        slot = {path: i for i, path in enumerate(paths)}
        moved = [np.array([slot[p] for p in part.paths], np.int32)[part.file] for part in files]
        return FileColumn(
            paths, files[0].key, np.concatenate(moved), np.concatenate([part.row for part in files])
        )
    chunks = [chunk for part in parts if isinstance(part, ArrowColumn) for chunk in part.column.chunks]
    return ArrowColumn(pa.chunked_array(chunks) if chunks else pa.chunked_array([], pa.string()))


class _RowGroups:
    """Row groups of picture columns, least recently used out first; empty again after a fork."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._borders: dict[str, NDArray[np.int64]] = {}
        self._groups: OrderedDict[tuple[str, str, int], pa.ChunkedArray] = OrderedDict()
        self._bytes = 0

    def value(self, path: str, key: str, row: int) -> object:
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            borders = self._borders.get(path)
        if borders is None:
            borders = _row_group_borders(path)
            with self._lock:
                self._borders[path] = borders
        group = int(np.searchsorted(borders, row, side="right")) - 1
        with self._lock:
            column = self._groups.get((path, key, group))
            if column is not None:
                self._groups.move_to_end((path, key, group))
        if column is None:
            column = self._read(path, key, group)
        return column[row - int(borders[group])].as_py()

    def _read(self, path: str, key: str, group: int) -> pa.ChunkedArray:
        with open_parquet(path) as file:
            try:
                column = file.read_row_group(group, columns=[key], use_threads=False)[key]
            except (pa.ArrowException, OSError, ValueError) as error:
                msg = f"row group {group} is damaged: {str(error).splitlines()[0]}"
                raise TableError(msg, path=path) from error
        with self._lock:
            if (path, key, group) not in self._groups:
                self._groups[path, key, group] = column
                self._bytes += column.nbytes
            while self._bytes > self.max_bytes and len(self._groups) > 1:
                _, dropped = self._groups.popitem(last=False)
                self._bytes -= dropped.nbytes
        return column


def _row_group_borders(path: str) -> NDArray[np.int64]:
    with open_parquet(path) as file:
        meta = file.metadata
        counts = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


_groups = _RowGroups(_CACHE_BYTES)
