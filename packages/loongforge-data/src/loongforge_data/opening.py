"""Open the files of a data set: metadata, rows, where the frames lie, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from loongforge_data.errors import DataError, LayoutError, TableError, VideoError
from loongforge_data.files import file_state
from loongforge_data.formats.episodes import Episode, EpisodeTable, read_episodes
from loongforge_data.formats.info import DatasetInfo, Feature, read_info
from loongforge_data.formats.placement import Placement, place_videos
from loongforge_data.formats.rows import Rows, load_rows, standard_features
from loongforge_data.formats.tasks import read_tasks
from loongforge_data.options import OnMismatch, Verify
from loongforge_data.video.probe import frame_count

_AUTO_LIMIT = 512
_SHOWN = 20


@dataclass(kw_only=True)
class Opened:
    """What opening a data set has found out.

    Attributes:
        root: The directory.
        info: `meta/info.json`.
        features: Features a sample can have, standard columns included, absent cameras not.
        tasks: Task texts.
        cameras: Cameras in use.
        rows: Columns of the rows in use.
        placements: Video file and first frame by (episode index, camera).
        notices: Remarks that stop nothing: counts corrected, cameras without files.
        skipped: Problems of the episodes that were left out or cut.
    """

    root: Path
    info: DatasetInfo
    features: Mapping[str, Feature]
    tasks: Mapping[int, str]
    cameras: tuple[str, ...]
    rows: Rows
    placements: Mapping[tuple[int, str], Placement]
    notices: list[str] = field(default_factory=list)
    skipped: list[DataError] = field(default_factory=list)


def open_files(
    root: Path,
    *,
    episodes: Sequence[int] | None,
    cameras: Sequence[str] | None,
    columns: Sequence[str] | None,
    on_mismatch: OnMismatch,
    verify: Verify,
) -> Opened:
    """Read metadata and rows and match them with the video files; arguments as in `open_dataset`."""
    info = read_info(root)
    table = read_episodes(root, info)
    notices = _recount(info, table)
    chosen = _choose(table, episodes)
    problems: list[DataError] = []
    used = _cameras(info, table, cameras, notices)
    chosen = _with_files(chosen, used, problems)
    rows = load_rows(info, chosen, columns=columns, report=problems.append)
    tasks = _tasks(root, info, rows)
    placements = place_videos(
        list(table), used, info.fps, count=frame_count, report=_only(rows, problems), notice=notices.append
    )
    rows = _drop_unplaced(rows, used, placements)
    cuts: dict[int, int] = {}
    if _reads_headers(verify, rows, used, placements):
        cuts = _short_videos(rows, used, placements, problems)
    if problems and on_mismatch == "error":
        raise _together(problems, root)
    rows = _cut(rows, cuts, keep_head=on_mismatch == "drop_tail")
    features = {
        key: feature
        for key, feature in standard_features(info).items()
        if key in used or key in rows.arrays or key in rows.objects
    }
    return Opened(
        root=root,
        info=info,
        features=features,
        tasks=tasks,
        cameras=used,
        rows=rows,
        placements=placements,
        notices=notices,
        skipped=problems,
    )


def _recount(info: DatasetInfo, table: EpisodeTable) -> list[str]:
    """Compare the totals in info.json with the episode table; the table is what counts."""
    found = {"total_episodes": len(table), "total_frames": sum(episode.length for episode in table)}
    return [
        f"info.json says {name} = {info.raw[name]}, the episode table has {value}; the table is used"
        for name, value in found.items()
        if name in info.raw and info.raw[name] != value
    ]


def _choose(table: EpisodeTable, wanted: Sequence[int] | None) -> list[Episode]:
    if wanted is None:
        return [episode for episode in table if episode.length > 0]
    if len(set(wanted)) != len(wanted):
        msg = (
            f"episodes names an episode twice: {sorted(e for e in set(wanted) if list(wanted).count(e) > 1)}"
        )
        raise ValueError(msg)
    return [episode for episode in map(table.by_index, sorted(wanted)) if episode.length > 0]


def _cameras(
    info: DatasetInfo, table: EpisodeTable, wanted: Sequence[str] | None, notices: list[str]
) -> tuple[str, ...]:
    """Return the cameras to use; a declared camera without any file is left out with a notice."""
    for key in wanted or ():
        if key not in info.cameras:
            known = ", ".join(info.cameras) or "none"
            msg = f"cameras names {key!r}, which is not a video feature; cameras: {known}"
            raise ValueError(msg)
    used = []
    for key in info.cameras if wanted is None else wanted:
        spans = [episode.videos[key] for episode in table if key in episode.videos]
        folders = {Path(span.path).parent for span in spans}
        if table and not any(folder.is_dir() for folder in folders):
            notices.append(_no_folder(key, sorted(folders)))
            if wanted is not None:
                raise LayoutError(notices[-1])
            continue
        used.append(key)
    return tuple(used)


def _no_folder(key: str, folders: Sequence[Path]) -> str:
    text = (
        f"camera {key!r} is declared but has no file: {folders[0] if folders else 'no path'} does not exist"
    )
    for folder in folders[:1]:
        for parent in folder.parents:
            if parent.is_dir():
                others = sorted(p.name for p in parent.iterdir() if p.is_dir())
                return f"{text}; {parent} has {', '.join(others) or 'no folders'}"
    return text


def _with_files(
    episodes: Sequence[Episode], cameras: Sequence[str], problems: list[DataError]
) -> list[Episode]:
    """Return the episodes whose files are all there; report every one that is not."""
    seen: dict[str, str | None] = {}
    kept = []
    for episode in episodes:
        wanted: list[tuple[str, type[DataError], str]] = [(episode.data_path, TableError, "table")]
        complete = True
        for camera in cameras:
            if camera in episode.videos:
                wanted.append((episode.videos[camera].path, VideoError, "video"))
            else:
                problems.append(VideoError(f"camera {camera!r} has no file number", episode=episode.index))
                complete = False
        for path, kind, word in wanted:
            if path not in seen:
                seen[path] = file_state(path).problem
            if seen[path] is not None:
                problems.append(kind(f"{word} {seen[path]}", path=path, episode=episode.index))
                complete = False
        if complete:
            kept.append(episode)
    return kept


def _only(rows: Rows, problems: list[DataError]) -> Callable[[DataError], None]:
    """Report only problems of episodes in use."""
    used = {episode.index for episode in rows.episodes}

    def report(error: DataError) -> None:
        if error.episode is None or error.episode in used:
            problems.append(error)

    return report


def _tasks(root: Path, info: DatasetInfo, rows: Rows) -> Mapping[int, str]:
    try:
        tasks = read_tasks(root)
    except LayoutError:
        if info.raw.get("total_episodes") == 0:
            return {}
        raise
    used = {int(value) for value in np.unique(rows.arrays["task_index"])}
    unknown = sorted(used - set(tasks))
    if unknown and tasks:
        row = int(np.flatnonzero(rows.arrays["task_index"] == unknown[0])[0])
        msg = f"task_index {unknown[:10]} of the rows are not in the task table"
        raise TableError(msg, row=row)
    return tasks


def _drop_unplaced(
    rows: Rows, cameras: Sequence[str], placements: Mapping[tuple[int, str], Placement]
) -> Rows:
    lost = [
        position
        for position, episode in enumerate(rows.episodes)
        if any((episode.index, camera) not in placements for camera in cameras)
    ]
    return _keep(rows, dict.fromkeys(lost, 0))


def _reads_headers(
    verify: Verify,
    rows: Rows,
    cameras: Sequence[str],
    placements: Mapping[tuple[int, str], Placement],
) -> bool:
    if verify != "auto":
        return verify == "headers"
    paths = {placements[episode.index, camera].path for episode in rows.episodes for camera in cameras}
    return len(paths) <= _AUTO_LIMIT


def _counter() -> Callable[[str], int]:
    """Return a frame counter that opens each file once, however many episodes share it."""
    known: dict[str, int | DataError] = {}

    def count(path: str) -> int:
        if path not in known:
            try:
                known[path] = frame_count(path)
            except DataError as error:
                known[path] = error
        result = known[path]
        if isinstance(result, DataError):
            raise result
        return result

    return count


def _short_videos(
    rows: Rows,
    cameras: Sequence[str],
    placements: Mapping[tuple[int, str], Placement],
    problems: list[DataError],
) -> dict[int, int]:
    """Return the number of rows with frames, by episode position, where it differs from the rows.

    A v2 file holds one episode, so more frames than rows are a mismatch too; then the surplus is the tail and
    the count stays the number of rows.
    """
    cuts: dict[int, int] = {}
    count = _counter()
    for position, episode in enumerate(rows.episodes):
        have = int(rows.starts[position + 1] - rows.starts[position])
        for camera in cameras:
            place = placements[episode.index, camera]
            try:
                frames = count(place.path) - place.first
            except DataError as error:
                problems.append(VideoError(error.message, path=place.path, episode=episode.index))
                cuts[position] = 0
                continue
            single = episode.videos[camera].from_timestamp is None
            if frames < have or (single and frames != have):
                problems.append(
                    VideoError(
                        f"episode has {have} rows but camera {camera!r} has {max(frames, 0)} frames; choose "
                        "on_mismatch='drop_tail' or 'skip_episode' to go on",
                        path=place.path,
                        episode=episode.index,
                    )
                )
                cuts[position] = min(cuts.get(position, have), max(frames, 0))
    return cuts


def _cut(rows: Rows, cuts: Mapping[int, int], *, keep_head: bool) -> Rows:
    return _keep(rows, {position: count if keep_head else 0 for position, count in cuts.items()})


def _keep(rows: Rows, counts: Mapping[int, int]) -> Rows:
    """Shorten episodes, by position, to a number of rows; those with 0 rows are gone."""
    if not counts:
        return rows
    lengths = np.diff(rows.starts)
    pieces, episodes, kept = [], [], []
    for position, episode in enumerate(rows.episodes):
        length = min(int(lengths[position]), counts.get(position, int(lengths[position])))
        if length:
            start = int(rows.starts[position])
            pieces.append(np.arange(start, start + length))
            episodes.append(episode if length == episode.length else replace(episode, length=length))
            kept.append(length)
    take = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
    return Rows(
        arrays={key: array[take] for key, array in rows.arrays.items()},
        objects={key: column.take(take) for key, column in rows.objects.items()},
        starts=np.concatenate([[0], np.cumsum(kept, dtype=np.int64)]).astype(np.int64),
        episodes=tuple(episodes),
    )


def _together(problems: Sequence[DataError], root: Path) -> DataError:
    if len(problems) == 1:
        return problems[0]
    lines = "\n".join(f"  - {problem}" for problem in problems[:_SHOWN])
    more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    kinds = {type(problem) for problem in problems}
    kind = kinds.pop() if len(kinds) == 1 else DataError
    return kind(f"data set has {len(problems)} problems:\n{lines}{more}\n ", path=root)
