"""Which video frames the rows of a data set need: whole-number arithmetic on columns, no file is opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loongforge_data.planning import FrameTable
from loongforge_data.video import key_frames
from loongforge_data.windows import Window


class FrameRequest(NamedTuple):
    """One video frame a sample needs.

    Attributes:
        key: Feature key of the camera.
        slot: Position in the window of that camera; 0 without a window.
        path: The video file.
        index: Display index of the frame inside that file.
    """

    key: str
    slot: int
    path: str
    index: int  # type: ignore[assignment]


class CameraFiles(NamedTuple):
    """Where the episodes of one camera lie.

    Attributes:
        paths: Video files, each once.
        file: (episodes,) int64, position in `paths` of each episode's file.
        first: (episodes,) int64, display index of each episode's first frame inside its file.
    """

    paths: tuple[str, ...]
    file: NDArray[np.int64]
    first: NDArray[np.int64]


class FrameMap:
    """Frames of rows, for single samples and for many at once.

    Args:
        starts: (episodes + 1,) int64, first row of each episode; the last entry is the number of rows.
        places: Per camera, the (file, first frame) of each episode.
        windows: Frame offsets of the cameras that have some.
    """

    def __init__(
        self,
        starts: NDArray[np.int64],
        places: Mapping[str, Sequence[tuple[str, int]]],
        windows: Mapping[str, Window],
    ) -> None:
        self._starts = starts
        lengths = np.diff(starts)
        self._episode_of = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        self._windows = windows
        self._cameras = {key: _camera_files(spans) for key, spans in places.items()}

    def episode(self, row: int) -> int:
        """Return the position of a row's episode."""
        return int(self._episode_of[row])

    def paths(self, camera: str) -> tuple[str, ...]:
        """Return the video files of a camera, each once, in the order of the episodes."""
        return self._cameras[camera].paths

    def requests(self, row: int, cameras: Sequence[str]) -> tuple[FrameRequest, ...]:
        """Return the frames of one row, camera by camera and slot by slot."""
        episode = self.episode(row)
        start, stop = int(self._starts[episode]), int(self._starts[episode + 1])
        requests: list[FrameRequest] = []
        for camera in cameras:
            files = self._cameras[camera]
            path = files.paths[files.file[episode]]
            base = int(files.first[episode]) - start
            window = self._windows.get(camera)
            if window is None:
                requests.append(FrameRequest(camera, 0, path, base + row))
                continue
            rows = window.rows(row, start, stop).tolist()
            requests += [FrameRequest(camera, slot, path, base + r) for slot, r in enumerate(rows)]
        return tuple(requests)

    def tables(self, rows: NDArray[np.int64], cameras: Sequence[str]) -> list[FrameTable]:
        """Return the frames of rows (n,), one table per camera, without a loop over rows. O(frames)."""
        episodes = self._episode_of[rows]
        starts, stops = self._starts[episodes], self._starts[episodes + 1]
        result = []
        for camera in cameras:
            files = self._cameras[camera]
            window = self._windows.get(camera)
            shown = rows[:, None]
            if window is not None:
                shown = np.clip(shown + window.offsets[None, :], starts[:, None], stops[:, None] - 1)
            indices = shown + (files.first[episodes] - starts)[:, None]
            where = np.broadcast_to(files.file[episodes][:, None], indices.shape)
            result.append(FrameTable(key=camera, paths=files.paths, files=where, indices=indices))
        return result

    def block_starts(self, camera: str | None) -> list[int]:
        """Return the first row of each run that starts on a key frame of a camera, and of each episode.

        Reads the key frames of every video file of that camera, about 0.3 ms each for a plain mp4.
        """
        found = [self._starts[:-1]]
        if camera is not None:
            files = self._cameras[camera]
            shown: dict[int, NDArray[np.int64]] = {}
            for episode, file in enumerate(files.file.tolist()):
                if file not in shown:
                    shown[file] = key_frames(files.paths[file])
                rows = shown[file] - files.first[episode] + self._starts[episode]
                found.append(rows[(rows > self._starts[episode]) & (rows < self._starts[episode + 1])])
        starts = np.unique(np.concatenate(found))
        return [int(start) for start in starts[starts < self._starts[-1]]]


def _camera_files(spans: Sequence[tuple[str, int]]) -> CameraFiles:
    names: dict[str, int] = {}
    file = [names.setdefault(path, len(names)) for path, _ in spans]
    first = [number for _, number in spans]
    return CameraFiles(tuple(names), np.asarray(file, dtype=np.int64), np.asarray(first, dtype=np.int64))
