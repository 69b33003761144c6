"""Which frame of which video file belongs to which row, in whole frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from loongforge_data.errors import DataError, VideoError
from loongforge_data.formats.episodes import Episode


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where an episode's frames of one camera lie.

    Attributes:
        path: The video file.
        first: Display index of the episode's first frame inside the file.
    """

    path: str
    first: int


def place_videos(
    episodes: Sequence[Episode],
    cameras: Sequence[str],
    fps: Fraction,
    *,
    count: Callable[[str], int],
    report: Callable[[DataError], None],
    notice: Callable[[str], None],
) -> Mapping[tuple[int, str], Placement]:
    """Find the first frame of each episode and camera.

    `from_timestamp` times fps is snapped to the nearest whole frame and compared with the summed lengths of
    the episodes that come before in the same file. Where both agree (nearly always) no file is opened. Where
    they differ, the frame count of the file decides: if it equals the sum of lengths and no start is further
    off than one frame per earlier episode, the sums are right (drifted or cut-short times); if every snapped
    range lies inside the file without overlap, the file has gaps and the times are right; otherwise the
    metadata does not describe the file and it is an error. A correction is told by a notice, never silent.

    Args:
        episodes: All episodes of the data set (also those not asked for: they take part in the sums).
        cameras: Keys of the cameras.
        fps: Frames per second.
        count: Returns the number of frames in a file.
        report: Called with each problem; the episode then has no placement for that camera.
        notice: Called with a remark where times and lengths differ and one of them is right.

    Returns:
        Placement by (episode index, camera).
    """
    result: dict[tuple[int, str], Placement] = {}
    for camera in cameras:
        by_file: dict[str, list[tuple[Episode, float | None]]] = {}
        for episode in episodes:
            span = episode.videos.get(camera)
            if span is not None:
                by_file.setdefault(span.path, []).append((episode, span.from_timestamp))
        for path, members in by_file.items():
            firsts = _place_file(path, members, fps, count, report, notice)
            for index, first in firsts.items():
                result[index, camera] = Placement(path=path, first=first)
    return result


def _place_file(
    path: str,
    members: list[tuple[Episode, float | None]],
    fps: Fraction,
    count: Callable[[str], int],
    report: Callable[[DataError], None],
    notice: Callable[[str], None],
) -> dict[int, int]:
    if all(start is None for _, start in members):
        return {episode.index: 0 for episode, _ in members}
    members = sorted(members, key=lambda item: (item[1] or 0.0, item[0].index))
    snapped = {episode.index: round((start or 0.0) * fps) for episode, start in members}
    summed: dict[int, int] = {}
    total = 0
    for episode, _ in members:
        summed[episode.index] = total
        total += episode.length
    if snapped == summed:
        return summed
    try:
        frames = count(path)
    except DataError as error:
        for episode, _ in members:
            report(VideoError(error.message, path=path, episode=episode.index))
        return {}
    # Each end cut short by one frame moves the next start by one more: k frames at most after k episodes.
    drift = max(
        abs(snapped[episode.index] - summed[episode.index]) - k for k, (episode, _) in enumerate(members)
    )
    in_order = [episode.index for episode, _ in members] == sorted(snapped)
    if frames == total and drift <= 0 and in_order:
        notice(f"start times in {path} drift from whole frames; the lengths of the episodes are used")
        return summed
    ends = [snapped[episode.index] + episode.length for episode, _ in members]
    overlap = any(end > snapped[after.index] for end, (after, _) in zip(ends, members[1:], strict=False))
    if not overlap and ends[-1] <= frames:
        notice(f"{path} holds {frames} frames for {total} rows; start times are used, the rest is skipped")
        return snapped
    for episode, start in members:
        report(
            VideoError(
                f"video offset does not fit: from_timestamp {start or 0.0:.6f} s is frame "
                f"{snapped[episode.index]}, the lengths before it sum to {summed[episode.index]}, and "
                f"the file holds {frames} frames for {total} rows; the offsets are stale after a merge",
                path=path,
                episode=episode.index,
            )
        )
    return {}
