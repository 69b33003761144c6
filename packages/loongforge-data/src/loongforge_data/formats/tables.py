"""Parquet columns as numpy arrays, checked against the declared features."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from loongforge_data.errors import TableError
from loongforge_data.files import file_state
from loongforge_data.formats.info import Feature


def open_parquet(path: str | Path) -> pq.ParquetFile:
    """Open a parquet file.

    Raises:
        TableError: The file is missing, empty, an LFS pointer, or has no footer (its writer was interrupted).
    """
    state = file_state(path)
    if state.problem is not None:
        msg = f"table {state.problem}"
        raise TableError(msg, path=path)
    try:
        return pq.ParquetFile(str(path), memory_map=False)
    except (pa.ArrowException, OSError, ValueError) as error:
        text = str(error).splitlines()[0]
        msg = (
            f"table cannot be read: {text}; a file without a footer comes from an interrupted recording and "
            "has to be recorded or downloaded again"
        )
        raise TableError(
            msg,
            path=path,
        ) from error


def read_table(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a parquet file, or those of the named columns that exist in it."""
    with open_parquet(path) as file:
        present = file.schema_arrow.names
        chosen = present if columns is None else [name for name in columns if name in present]
        try:
            table = file.read(columns=chosen, use_threads=False)
            table.validate(full=True)  # lengths, offsets and the encoding of texts
            return table
        except (pa.ArrowException, OSError, ValueError) as error:
            msg = f"table is damaged: {str(error).splitlines()[0]}"
            raise TableError(msg, path=path) from error


def column_names(path: str | Path) -> tuple[str, ...]:
    """Return the names of the columns of a parquet file; reads its footer only."""
    with open_parquet(path) as file:
        return tuple(file.schema_arrow.names)


def to_numpy(column: pa.ChunkedArray, feature: Feature, path: str | Path) -> NDArray[np.generic]:
    """Turn a parquet column into an array of shape (rows, *feature.shape); shape (1,) gives (rows,).

    Lists of any nesting are flattened and their lengths checked; numbers are cast to the declared dtype when
    no value changes meaning (float64 to float32 rounds, float to integer must be whole).

    Raises:
        TableError: A row has the wrong length, a null where none is allowed, or cannot be cast.
    """
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pa.ChunkedArray):  # zero chunks
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    size = int(np.prod(feature.shape, dtype=np.int64)) if feature.shape else 1
    rows = len(array)
    values = _flatten(array, rows, size, feature, path)
    scalar = feature.shape in ((), (1,))
    shape = (rows,) if scalar else (rows, *feature.shape)
    return cast(values, feature, path).reshape(shape)


def _flatten(
    array: pa.Array, rows: int, size: int, feature: Feature, path: str | Path
) -> NDArray[np.generic]:
    depth = 0
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or _fixed(array.type):
        if array.null_count:
            raise _row_error(
                feature, path, int(np.flatnonzero(pc.is_null(array).to_numpy(False))[0]), "is null"
            )
        if depth == 0 and not _fixed(array.type):
            lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
            if len(lengths) and lengths.min() != lengths.max():
                usual = int(np.bincount(lengths).argmax())
                row = int(np.flatnonzero(lengths != usual)[0])
                raise _row_error(feature, path, row, f"has {lengths[row]} values")
        array = _values(array)
        depth += 1
    if len(array) != rows * size:
        found = len(array) // rows if rows else 0
        raise _row_error(feature, path, 0, f"has {found} values")
    if array.null_count:
        bad = int(np.flatnonzero(pc.is_null(array).to_numpy(False))[0]) // size
        if not pa.types.is_floating(array.type):
            raise _row_error(feature, path, bad, "holds a null")
    return array.to_numpy(zero_copy_only=False)


def _values(array: pa.Array) -> pa.Array:
    return pc.list_flatten(array)


def _fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind))


def _row_error(feature: Feature, path: str | Path, row: int, found: str) -> TableError:
    return TableError(
        f"row {row} of column {feature.key!r} {found}, declared shape is {list(feature.shape)}", path=path
    )


def cast(values: NDArray[np.generic], feature: Feature, path: str | Path) -> NDArray[np.generic]:
    """Cast to the declared dtype; float64 features become float32."""
    try:
        target = np.dtype(feature.dtype)
    except TypeError as error:
        msg = f"feature {feature.key!r} has unknown dtype {feature.dtype!r}"
        raise TableError(msg, path=path) from error
    if target == np.float64:
        target = np.dtype(np.float32)
    if values.dtype == target:
        return values
    if values.dtype == object:
        msg = f"column {feature.key!r} holds {type(values[0]).__name__}, not numbers"
        raise TableError(msg, path=path)
    if target.kind in "iub" and values.dtype.kind == "f":
        changed = np.flatnonzero(values != np.floor(values))
        if len(changed):
            msg = (
                f"column {feature.key!r} is declared {feature.dtype} but row {int(changed[0])} holds "
                f"{values.flat[int(changed[0])]!r}"
            )
            raise TableError(
                msg,
                path=path,
            )
    return values.astype(target)
