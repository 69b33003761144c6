"""`loongforge-data validate`: every problem of a data set at once, with file, episode and row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from loongforge_data.errors import DataError
from loongforge_data.files import file_state
from loongforge_data.formats.episodes import Episode, EpisodeTable, read_episodes
from loongforge_data.formats.info import DatasetInfo, read_info
from loongforge_data.formats.modality import read_modality
from loongforge_data.formats.placement import Placement, place_videos
from loongforge_data.formats.rows import Rows, load_rows, standard_features
from loongforge_data.formats.statfiles import read_stats
from loongforge_data.formats.tasks import read_tasks
from loongforge_data.modalities.images import decode_image
from loongforge_data.video import VideoFile, video_index
from loongforge_data.video.probe import frame_count

Severity = Literal["error", "warning"]
_Result = TypeVar("_Result")
_TIME_TOLERANCE = 1e-4  # seconds, LeRobot's own


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem.

    Attributes:
        severity: `error` makes training wrong or impossible; `warning` is odd but handled.
        kind: Short name of the check, e.g. "video-frames".
        message: What is wrong, with the values.
        path: File, if it concerns one.
        episode: Episode index, if known.
        row: Row inside the data set, if known.
    """

    severity: Severity
    kind: str
    message: str
    path: str | None = None
    episode: int | None = None
    row: int | None = None

    def __str__(self) -> str:
        place = [f"{k} {v}" for k, v in (("episode", self.episode), ("row", self.row)) if v is not None]
        where = ", ".join([*place, *([self.path] if self.path else [])])
        return f"{self.severity}: {self.kind}: {self.message}" + (f" [{where}]" if where else "")

    def as_dict(self) -> dict[str, object]:
        """Return the fields as a flat dict."""
        return asdict(self)


class Report:
    """Collects findings."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def add(
        self,
        severity: Severity,
        kind: str,
        message: str,
        *,
        path: str | Path | None = None,
        episode: int | None = None,
        row: int | None = None,
    ) -> None:
        """Add a finding, unless the same one is there."""
        finding = Finding(
            severity=severity,
            kind=kind,
            message=message,
            path=None if path is None else str(path),
            episode=episode,
            row=row,
        )
        if finding not in self.findings:
            self.findings.append(finding)

    def error(self, kind: str, error: DataError) -> None:
        """Add an exception as a finding."""
        self.add("error", kind, error.message, path=error.path, episode=error.episode, row=error.row)

    @property
    def errors(self) -> list[Finding]:
        """Findings that are errors."""
        return [finding for finding in self.findings if finding.severity == "error"]


def validate_dataset(root: str | Path, *, decode: bool = False) -> Report:
    """Check a data set completely and never stop at the first problem.

    Checks: metadata, task and episode tables, presence and state of every file, rows per episode, order of
    frames, time stamps, finite values, task indices, frame counts and offsets of videos, displayed sizes,
    declared against real codec, pictures in tables, statistics, and `modality.json`.

    Args:
        root: The directory.
        decode: Also decode every frame of every video, which finds damage inside files.
    """
    report = Report()
    root = Path(root)
    try:
        info = read_info(root)
    except DataError as error:
        report.error("info", error)
        return report
    table = _guard(report, "episodes", lambda: read_episodes(root, info))
    tasks = _guard(report, "tasks", lambda: read_tasks(root))
    _guard(report, "modality", lambda: read_modality(root, standard_features(info)))
    _guard(report, "stats", lambda: _check_stats(root, info, report))
    if table is None:
        return report
    _check_totals(info, table, tasks, report)
    cameras = _check_files(info, table, report)
    rows = _check_rows(info, table, report)
    _check_values(rows, tasks or {}, info, report)
    _check_pictures(rows, info, report)
    _check_videos(info, table, cameras, report, decode)
    return report


def _guard(report: Report, kind: str, check: Callable[[], _Result]) -> _Result | None:
    try:
        return check()
    except DataError as error:
        report.error(kind, error)
        return None


def _check_totals(
    info: DatasetInfo, table: EpisodeTable, tasks: Mapping[int, str] | None, report: Report
) -> None:
    found = {"total_episodes": len(table), "total_frames": sum(episode.length for episode in table)}
    if tasks is not None:
        found["total_tasks"] = len(tasks)
    for name, value in found.items():
        if name in info.raw and info.raw[name] != value:
            message = f"info.json says {name} = {info.raw[name]}, the tables have {value}"
            report.add("warning", "totals", message)
    if len(table) == 0:
        report.add("warning", "empty", "data set has no episodes")
    for episode in table:
        if episode.length == 0:
            report.add("warning", "empty-episode", "episode has length 0", episode=episode.index)


def _check_files(info: DatasetInfo, table: EpisodeTable, report: Report) -> tuple[str, ...]:
    """Report every missing, empty or pointer file; return the cameras that have any file."""
    seen: dict[str, str | None] = {}
    cameras = []
    for key in info.cameras:
        spans = [episode.videos[key].path for episode in table if key in episode.videos]
        if table and not any(Path(path).exists() for path in spans):
            message = (
                f"camera {key!r} is declared but has no file (looked for {spans[0] if spans else 'nothing'})"
            )
            report.add("warning", "camera-without-files", message)
            continue
        cameras.append(key)
    for episode in table:
        if episode.length == 0:
            continue
        paths = [("table", episode.data_path)]
        for key in cameras:
            if key in episode.videos:
                paths.append(("video", episode.videos[key].path))
            else:
                report.add("error", "files", f"camera {key!r} has no file number", episode=episode.index)
        for word, path in paths:
            if path not in seen:
                seen[path] = file_state(path).problem
            if seen[path] is not None:
                report.add("error", "files", f"{word} {seen[path]}", path=path, episode=episode.index)
    return tuple(cameras)


def _check_rows(info: DatasetInfo, table: EpisodeTable, report: Report) -> Rows:
    usable = [e for e in table if e.length > 0 and file_state(e.data_path).problem is None]
    return load_rows(info, usable, report=lambda error: report.error("rows", error))


def _check_values(rows: Rows, tasks: Mapping[int, str], info: DatasetInfo, report: Report) -> None:
    for position, episode in enumerate(rows.episodes):
        part = slice(int(rows.starts[position]), int(rows.starts[position + 1]))
        _check_stamps(rows.arrays["timestamp"][part], part.start, episode, info, report)
        used = np.unique(rows.arrays["task_index"][part])
        unknown = [int(value) for value in used if int(value) not in tasks]
        if unknown:
            message = f"task_index {unknown} is not in the task table"
            report.add("error", "tasks", message, path=episode.data_path, episode=episode.index)
        for key, array in rows.arrays.items():
            if array.dtype.kind != "f" or key == "timestamp":
                continue
            bad = np.flatnonzero(~np.isfinite(array[part].reshape(part.stop - part.start, -1)).all(axis=1))
            if len(bad):
                listed = ", ".join(str(int(row)) for row in bad[:10])
                message = f"column {key!r} is not finite in {len(bad)} rows of the episode: {listed}"
                report.add(
                    "error",
                    "values",
                    message,
                    path=episode.data_path,
                    episode=episode.index,
                    row=part.start + int(bad[0]),
                )
    index = rows.arrays["index"]
    wrong = np.flatnonzero(np.diff(index.astype(np.int64)) <= 0)
    if len(wrong):
        message = (
            f"column 'index' does not grow: {int(index[wrong[0]])} is followed by {int(index[wrong[0] + 1])}"
        )
        report.add("warning", "index", message, row=int(wrong[0]) + 1)


def _check_stamps(
    stamps: NDArray[np.generic], first: int, episode: Episode, info: DatasetInfo, report: Report
) -> None:
    """Time stamps must grow; other than at 1/fps they are only odd, since frames go by frame_index."""
    values = stamps.astype(np.float64)
    back = np.flatnonzero(~(np.diff(values) > 0))
    if len(back):
        row = int(back[0]) + 1
        message = (
            f"timestamp does not grow: row {row} of the episode has {values[row]:.6f} s after "
            f"{values[row - 1]:.6f} s"
        )
        report.add(
            "error", "timestamps", message, path=episode.data_path, episode=episode.index, row=first + row
        )
        return
    due = np.arange(len(values)) / float(info.fps)
    # A float32 stamp is off by up to 2**-24 of its value: no fault of the recording.
    late = np.flatnonzero(np.abs(values - due) > _TIME_TOLERANCE + due * 2.0**-23)
    if len(late):
        row = int(late[0])
        message = (
            f"timestamp differs from frame_index / fps in {len(late)} rows, first in row {row} of the "
            f"episode: {values[row]:.6f} s, expected {due[row]:.6f} s; frames are found by frame_index"
        )
        report.add(
            "warning", "timestamps", message, path=episode.data_path, episode=episode.index, row=first + row
        )


def _check_pictures(rows: Rows, info: DatasetInfo, report: Report) -> None:
    """Decode the first picture of each episode and picture feature."""
    for key, feature in info.features.items():
        if feature.kind != "image" or key not in rows.objects:
            continue
        column = rows.objects[key]
        for position, episode in enumerate(rows.episodes):
            row = int(rows.starts[position])
            path, inside = column.place(row)
            try:
                decode_image(column[row], feature, path=path, row=inside)
            except DataError as error:
                report.add("error", "pictures", error.message, path=path, episode=episode.index, row=row)


def _check_videos(
    info: DatasetInfo,
    table: EpisodeTable,
    cameras: Sequence[str],
    report: Report,
    decode: bool,  # noqa: FBT001
) -> None:
    broken: set[str] = set()

    def report_offset(error: DataError) -> None:
        report.error("video-offset", error)

    def note(text: str) -> None:
        report.add("warning", "video-offset", text)

    def count(path: str) -> int:
        return len(video_index(path)) if file_state(path).problem is None else frame_count(path)

    usable = [e for e in table if e.length > 0 and all(_readable(e, camera) for camera in cameras)]
    placements = place_videos(usable, cameras, info.fps, count=count, report=report_offset, notice=note)
    for episode in usable:
        for camera in cameras:
            place = placements.get((episode.index, camera))
            if place is not None and place.path not in broken:
                _check_span(episode, camera, place, report, broken)
    for camera in cameras:
        for path in sorted({e.videos[camera].path for e in usable} - broken):
            _check_file(info, camera, path, report, decode)


def _readable(episode: Episode, camera: str) -> bool:
    return camera in episode.videos and file_state(episode.videos[camera].path).problem is None


def _check_span(episode: Episode, camera: str, place: Placement, report: Report, broken: set[str]) -> None:
    try:
        index = video_index(place.path)
    except DataError as error:
        broken.add(place.path)
        report.add("error", "video-open", error.message, path=place.path, episode=episode.index)
        return
    have = len(index) - place.first
    single = episode.videos[camera].from_timestamp is None
    if have < episode.length or (single and have != episode.length):
        message = f"episode has {episode.length} rows but camera {camera!r} has {max(have, 0)} frames"
        report.add("error", "video-frames", message, path=place.path, episode=episode.index)
    if index.first_decodable > place.first:
        last = index.first_decodable - 1
        message = f"frames {place.first} to {last} have no key frame before them and no picture"
        report.add("error", "video-start", message, path=place.path, episode=episode.index)


def _check_file(info: DatasetInfo, camera: str, path: str, report: Report, decode: bool) -> None:  # noqa: FBT001
    feature = info.features[camera]
    try:
        with VideoFile(path, on_damage="skip") as video:
            if video.index.problem is not None:
                report.add("error", "video-damage", video.index.problem, path=path)
            declared, there = video.index.declared_frames, len(video.index.display)
            if declared > there:
                message = f"header declares {declared} frames, the file holds {there}: it is cut short"
                report.add("error", "video-damage", message, path=path)
            if video.index.estimated:
                report.add(
                    "warning", "video-times", "packets carry no time stamps; times are estimated", path=path
                )
            size = video.displayed_size
            if len(feature.shape) == 3 and size != feature.shape[:2]:
                message = (
                    f"camera {camera!r} shows {size[0]} x {size[1]} pixels, info.json declares "
                    f"{list(feature.shape)}"
                )
                report.add("error", "video-size", message, path=path)
            codec = feature.info.get("video.codec")
            if isinstance(codec, str) and codec not in (video.index.codec, "libsvtav1", "h265"):
                message = f"info.json says codec {codec}, the file holds {video.index.codec}"
                report.add("warning", "video-codec", message, path=path)
            if decode:
                _decode_all(video, path, report)
    except DataError as error:
        report.add("error", "video-damage", error.message, path=path)


def _decode_all(video: VideoFile, path: str, report: Report) -> None:
    shown = sum(1 for _ in video.decode(range(len(video))))
    lost = sorted(video.missing)
    if lost:
        message = (
            f"{shown} of {len(video)} frames can be decoded; without a picture: {_ranges(lost)}; suspect: "
            f"{_ranges(sorted(video.suspects)) or 'none'}"
        )
        report.add("error", "video-damage", message, path=path)


def _ranges(numbers: Sequence[int]) -> str:
    """Write sorted numbers as ranges: 3-5, 9."""
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in _runs(numbers))


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = previous = None
    for number in numbers:
        if start is None or previous is None:
            start = previous = number
        elif number == previous + 1:
            previous = number
        else:
            yield start, previous
            start = previous = number
    if start is not None and previous is not None:
        yield start, previous


def _check_stats(root: Path, info: DatasetInfo, report: Report) -> None:
    stats = read_stats(root, info)
    if not stats:
        report.add("warning", "stats", "data set ships no statistics")
    for key, entry in stats.items():
        for name, value in entry.items():
            if not np.isfinite(value).all():
                report.add("error", "stats", f"statistic {name} of {key!r} is not finite")
