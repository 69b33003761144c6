"""All rows of the chosen episodes, in dataset order, as columns in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loongforge_data.errors import DataError, TableError
from loongforge_data.formats.columns import ArrowColumn, FileColumn, ObjectColumn, join_columns
from loongforge_data.formats.episodes import Episode
from loongforge_data.formats.info import STANDARD, DatasetInfo, Feature
from loongforge_data.formats.tables import column_names, read_table, to_numpy

Report = Callable[[DataError], None]
"""What to do with a problem: raise it, or keep it and go on."""

_STANDARD_DTYPE = {"timestamp": "float32"}


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Columns of all rows.

    Attributes:
        arrays: (rows, ...) array per numeric feature.
        objects: Column per text, language or image feature; pictures stay in the files until they are read.
        starts: (episodes + 1,) int64, first row of each episode; the last entry is the row count.
        episodes: The episodes that are present, in order.
    """

    arrays: Mapping[str, NDArray[np.generic]]
    objects: Mapping[str, ObjectColumn]
    starts: NDArray[np.int64]
    episodes: tuple[Episode, ...]


def standard_features(info: DatasetInfo) -> dict[str, Feature]:
    """Return the declared features plus the standard columns a set left undeclared."""
    features = dict(info.features)
    for key in STANDARD:
        if key not in features:
            features[key] = Feature(key=key, dtype=_STANDARD_DTYPE.get(key, "int64"), shape=(1,))
    return features


def load_rows(
    info: DatasetInfo,
    episodes: Sequence[Episode],
    *,
    columns: Sequence[str] | None = None,
    report: Report,
) -> Rows:
    """Read the rows of the given episodes.

    Rows are found by `episode_index` and ordered by `frame_index`, whatever file or row group they are in.

    Args:
        info: Declared layout and features.
        episodes: Episodes to read, ascending.
        columns: Features to read; None reads all but videos.
        report: Called with each problem of an episode, which is then left out if the call returns.
    """
    features = {
        key: feature
        for key, feature in standard_features(info).items()
        if feature.kind not in ("video", "audio") and (columns is None or key in columns or key in STANDARD)
    }
    by_file: dict[str, list[Episode]] = {}
    for episode in episodes:
        by_file.setdefault(episode.data_path, []).append(episode)
    parts: dict[int, _Part] = {}
    for path, members in by_file.items():
        try:
            part = _read_file(path, members, features, info)
        except DataError as error:
            for episode in members:
                report(_about(error, episode))
            continue
        for episode in members:
            if episode.index in parts:
                continue
            parts[episode.index] = part
    return _collect(episodes, parts, features, info, report)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Columns of one file, rows sorted by (episode_index, frame_index)."""

    path: str
    arrays: Mapping[str, NDArray[np.generic]]
    objects: Mapping[str, ObjectColumn]


def _about(error: DataError, episode: Episode) -> DataError:
    return type(error)(error.message, path=error.path, episode=episode.index, row=error.row)


def _read_file(
    path: str, members: Sequence[Episode], features: Mapping[str, Feature], info: DatasetInfo
) -> _Part:
    pictures = [key for key, feature in features.items() if feature.kind == "image"]
    table = read_table(path, [key for key in features if key not in pictures])
    present = set(column_names(path))
    count = table.num_rows
    arrays: dict[str, NDArray[np.generic]] = {}
    objects: dict[str, ObjectColumn] = {}
    absent: list[str] = []
    for key, feature in features.items():
        if key not in present:
            absent.append(key)
        elif feature.kind == "array":
            arrays[key] = to_numpy(table[key], feature, path)
        elif feature.kind == "image":
            objects[key] = FileColumn.whole(path, key, count)
        else:
            objects[key] = ArrowColumn(table[key])
    declared = [key for key in absent if key not in STANDARD]
    if declared:
        msg = f"declared features {declared} are not in the table; it has {sorted(present)}"
        raise TableError(msg, path=path)
    _fill(arrays, absent, members, count, info, path)
    order = np.lexsort((arrays["frame_index"], arrays["episode_index"]))
    if not np.array_equal(order, np.arange(count)):
        arrays = {key: array[order] for key, array in arrays.items()}
        objects = {key: column.take(order) for key, column in objects.items()}
    return _Part(path=path, arrays=arrays, objects=objects)


def _fill(
    arrays: dict[str, NDArray[np.generic]],
    absent: Sequence[str],
    members: Sequence[Episode],
    count: int,
    info: DatasetInfo,
    path: str,
) -> None:
    """Make standard columns a file lacks from the episode table; refuse where they cannot be known."""
    if "episode_index" in absent:
        if len(members) != 1:
            msg = "table holds several episodes but has no column 'episode_index'"
            raise TableError(msg, path=path)
        arrays["episode_index"] = np.full(count, members[0].index, np.int64)
    if "frame_index" in absent:
        if len(members) != 1:
            msg = "table holds several episodes but has no column 'frame_index'"
            raise TableError(msg, path=path)
        arrays["frame_index"] = np.arange(count, dtype=np.int64)
    if "timestamp" in absent:
        arrays["timestamp"] = (arrays["frame_index"].astype(np.float64) / float(info.fps)).astype(np.float32)
    if "task_index" in absent:
        arrays["task_index"] = np.zeros(count, np.int64)
    if "index" in absent:
        arrays["index"] = np.full(count, -1, np.int64)


def _collect(
    episodes: Sequence[Episode],
    parts: Mapping[int, _Part],
    features: Mapping[str, Feature],
    info: DatasetInfo,
    report: Report,
) -> Rows:
    kept: list[tuple[Episode, _Part, int, int]] = []
    for episode in episodes:
        part = parts.get(episode.index)
        if part is None:
            continue
        first, last = np.searchsorted(part.arrays["episode_index"], [episode.index, episode.index + 1])
        try:
            check_episode(episode, part.arrays["frame_index"][first:last], part.path)
        except DataError as error:
            report(error)
            continue
        kept.append((episode, part, int(first), int(last)))
    lengths = [last - first for _, _, first, last in kept]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    arrays: dict[str, NDArray[np.generic]] = {}
    objects: dict[str, ObjectColumn] = {}
    for key, feature in features.items():
        if feature.kind == "array":
            pieces = [part.arrays[key][first:last] for _, part, first, last in kept]
            arrays[key] = _join(pieces, feature)
        else:
            pieces_of = [part.objects[key].take(np.arange(first, last)) for _, part, first, last in kept]
            objects[key] = join_columns(pieces_of)
    if "index" in arrays and len(arrays["index"]) and int(arrays["index"].min()) < 0:
        arrays["index"] = np.arange(len(arrays["index"]), dtype=np.int64)
    return Rows(arrays=arrays, objects=objects, starts=starts, episodes=tuple(e for e, _, _, _ in kept))


def check_episode(episode: Episode, frames: NDArray[np.generic], path: str) -> None:
    """Check that an episode's rows are exactly frames 0 to length - 1.

    Raises:
        TableError: Rows are missing, doubled, or their number differs from the episode table.
    """
    steps = np.arange(len(frames), dtype=np.int64)
    wrong = np.flatnonzero(frames != steps)
    if len(wrong):
        row = int(wrong[0])
        word = "occurs twice" if row and frames[row] == frames[row - 1] else "leaves a hole"
        msg = f"frame_index {word}: row {row} of the episode has {int(frames[row])}, expected {row}"
        raise TableError(
            msg,
            path=path,
            episode=episode.index,
        )
    if len(frames) != episode.length:
        msg = f"episode has {len(frames)} rows, the episode table says {episode.length}"
        raise TableError(
            msg,
            path=path,
            episode=episode.index,
        )


def _join(pieces: Sequence[NDArray[np.generic]], feature: Feature) -> NDArray[np.generic]:
    if pieces:
        return np.ascontiguousarray(np.concatenate(pieces)) if len(pieces) > 1 else np.array(pieces[0])
    shape = (0,) if feature.shape in ((), (1,)) else (0, *feature.shape)
    return np.zeros(shape, feature.dtype)
