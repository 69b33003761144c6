"""Readers that put the columns of one row into a sample, prepared once per data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from loongforge_data.contracts import DatasetView
from loongforge_data.errors import DataError
from loongforge_data.formats.columns import ObjectColumn
from loongforge_data.formats.info import Feature
from loongforge_data.modalities.depth import DepthUnit, depth_frame
from loongforge_data.modalities.images import decode_image
from loongforge_data.modalities.language import parse_language
from loongforge_data.sources import AudioReader, SeriesReader
from loongforge_data.windows import Window

ColumnReader = Callable[[dict[str, object], int, int, int], None]
"""Puts values into a sample, given the row and the bounds [start, stop) of its episode."""


def compile_readers(dataset: DatasetView) -> tuple[ColumnReader, ...]:
    """Return one reader per feature, and one for the task text and for each mask."""
    readers: list[ColumnReader] = []
    rows = dataset.rows
    for key, feature in dataset.features.items():
        window = dataset.windows.get(key)
        if key in rows.arrays:
            readers.append(_array_reader(key, rows.arrays[key], window))
        elif key in rows.objects:
            getter = _getter(feature, rows.objects[key], dataset.image_size, dataset.options.depth)
            readers.append(_object_reader(key, getter, window))
        elif key in dataset.depth_cameras:
            readers.append(_object_reader(key, _depth_getter(dataset, key), window))
        elif window is not None:
            readers.append(_mask_reader(key, window))
    if "task" not in dataset.features and dataset.tasks:
        readers.append(_task_reader(rows.arrays["task_index"], dataset.tasks))
    readers += [AudioReader(dataset, key, source) for key, source in (dataset.options.audio or {}).items()]
    readers += [SeriesReader(dataset, key, source) for key, source in (dataset.options.series or {}).items()]
    return tuple(readers)


def _array_reader(key: str, array: NDArray[np.generic], window: Window | None) -> ColumnReader:
    if window is None:
        if array.ndim == 1:

            def scalar(sample: dict[str, object], row: int, start: int, stop: int) -> None:
                sample[key] = array[row]

            return scalar

        def vector(sample: dict[str, object], row: int, start: int, stop: int) -> None:
            sample[key] = array[row].copy()

        return vector
    mask_key = f"{key}_is_pad"
    first, last, count = window.first, window.last, len(window.offsets)

    def windowed(sample: dict[str, object], row: int, start: int, stop: int) -> None:
        if window.contiguous and row + first >= start and row + last < stop:
            sample[key] = array[row + first : row + last + 1].copy()
            sample[mask_key] = np.zeros(count, np.bool_)
            return
        sample[key] = array[window.rows(row, start, stop)]
        sample[mask_key] = window.padding(row, start, stop)

    return windowed


def _getter(
    feature: Feature, column: ObjectColumn, size: tuple[int, int] | None, depth: DepthUnit
) -> Callable[[int], object]:
    if feature.kind == "image":

        def image(row: int) -> object:
            path, inside = column.place(row)
            return decode_image(column[row], feature, size=size, depth=depth, path=path, row=inside)

        return image
    if feature.kind == "language":
        return lambda row: parse_language(column[row], key=feature.key, row=row)
    return lambda row: column[row]


def _depth_getter(dataset: DatasetView, key: str) -> Callable[[int], object]:
    feature = dataset.features[key]

    def depth(row: int) -> object:
        episode = dataset.episode_of(row)
        place = dataset.placement(episode.index, key)
        index = place.first + row - dataset.episode_bounds(row)[0]
        try:
            with dataset.pool.checkout(place.path) as video:
                frame = video.frame(index)
                return depth_frame(frame, feature, size=dataset.image_size, unit=dataset.options.depth)
        except DataError as error:
            raise type(error)(error.message, path=place.path, episode=episode.index, row=row) from error

    return depth


def _object_reader(key: str, getter: Callable[[int], object], window: Window | None) -> ColumnReader:
    if window is None:

        def single(sample: dict[str, object], row: int, start: int, stop: int) -> None:
            sample[key] = getter(row)

        return single

    def windowed(sample: dict[str, object], row: int, start: int, stop: int) -> None:
        rows = window.rows(row, start, stop).tolist()
        known = {r: getter(r) for r in set(rows)}
        values = [known[r] for r in rows]
        arrays = [value for value in values if isinstance(value, np.ndarray)]
        sample[key] = np.stack(arrays) if len(arrays) == len(values) else values
        sample[f"{key}_is_pad"] = window.padding(row, start, stop)

    return windowed


def _mask_reader(key: str, window: Window) -> ColumnReader:
    def mask(sample: dict[str, object], row: int, start: int, stop: int) -> None:
        sample[f"{key}_is_pad"] = window.padding(row, start, stop)

    return mask


def _task_reader(indices: NDArray[np.generic], tasks: Mapping[int, str]) -> ColumnReader:
    def task(sample: dict[str, object], row: int, start: int, stop: int) -> None:
        sample["task"] = tasks[int(indices[row])]

    return task
