"""`RobotDataset`: a map-style data set of robot episodes with exact frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from loongforge_data.access import ColumnReader, compile_readers
from loongforge_data.errors import DataError
from loongforge_data.fingerprint import fingerprint
from loongforge_data.formats.episodes import Episode, EpisodeTable
from loongforge_data.formats.info import DatasetInfo, Feature
from loongforge_data.formats.modality import Modality, read_modality
from loongforge_data.formats.placement import Placement
from loongforge_data.formats.rows import Rows
from loongforge_data.formats.statfiles import Stats, read_stats
from loongforge_data.framemap import FrameMap, FrameRequest
from loongforge_data.modalities.audio import AudioSource
from loongforge_data.modalities.depth import DepthUnit
from loongforge_data.modalities.series import SeriesSource
from loongforge_data.opening import Opened, open_files
from loongforge_data.options import ImageSize, OnMismatch, Options, Verify
from loongforge_data.planning import FrameTable
from loongforge_data.video import DecoderPool, VideoFile
from loongforge_data.video.pixels import upright_rgb
from loongforge_data.windows import Window, make_windows

Sample = dict[str, object]
_Text = TypeVar("_Text", bound=str)
_NOTHING = np.zeros(0, np.uint8)


class ImageLayout(NamedTuple):
    """Shape of the decoded pictures of one camera, known before decoding.

    Attributes:
        frames: Length of the time axis; None without a window.
        height: Rows of the upright picture after the resize.
        width: Columns of the upright picture after the resize.
        channels: 3, RGB.
        dtype: "uint8".
        size: (height, width) to resize to; None keeps the displayed size.
        crop: (top, left, height, width) in displayed pixels before the resize; None keeps all.
    """

    frames: int | None
    height: int
    width: int
    channels: int
    dtype: str
    size: ImageSize | None
    crop: tuple[int, int, int, int] | None


class RobotDataset:
    """Rows of a robot data set as samples. Made by `open_dataset`.

    A sample is a dict with the feature names of the data set as keys: numbers as numpy arrays of the declared
    dtype (float64 becomes float32), videos as uint8 RGB (height, width, 3), text as str. A key with a window
    has a leading time axis and a bool mask `<key>_is_pad`. A sample never crosses an episode.
    """

    def __init__(self, opened: Opened, options: Options) -> None:
        self.root = opened.root
        self.info: DatasetInfo = opened.info
        self.features: Mapping[str, Feature] = opened.features
        self.episodes = EpisodeTable(opened.rows.episodes)
        self.tasks: Mapping[int, str] = opened.tasks
        depth = tuple(key for key in opened.cameras if opened.features[key].is_depth)
        self.depth_cameras: tuple[str, ...] = depth
        self.cameras: tuple[str, ...] = tuple(key for key in opened.cameras if key not in depth)
        self.notices: tuple[str, ...] = tuple(opened.notices)
        self.skipped: tuple[DataError, ...] = tuple(opened.skipped)
        self.options = options
        self.windows: Mapping[str, Window] = make_windows(options.window, self.features)
        self.image_size = options.image_size
        self._rows: Rows = opened.rows
        self._starts: NDArray[np.int64] = opened.rows.starts
        self._length = int(self._starts[-1])
        self._placements = opened.placements
        self._frames = FrameMap(self._starts, self._places(), self.windows)
        self._sizes: dict[str, ImageSize] = {}
        self._pool: DecoderPool | None = None
        self._modality: Modality | None = read_modality(self.root, self.features)
        self._readers: tuple[ColumnReader, ...] = compile_readers(self)
        self._stats: Mapping[str, Stats] | None = None
        self._fingerprint: str | None = None

    def _places(self) -> dict[str, list[tuple[str, int]]]:
        """Return the (file, first frame) of each camera and episode."""
        result = {}
        for camera in (*self.cameras, *self.depth_cameras):
            spans: list[Placement] = [self._placements[e.index, camera] for e in self.episodes]
            result[camera] = [(span.path, span.first) for span in spans]
        return result

    # -- facts -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of samples: one per row of the chosen episodes."""
        return self._length

    @property
    def fps(self) -> int | float:
        """Frames per second: an int where it is whole."""
        rate: Fraction = self.info.fps
        return int(rate) if rate.denominator == 1 else float(rate)

    @property
    def modality(self) -> Modality | None:
        """The GR00T `meta/modality.json`, or None when the set has none."""
        return self._modality

    @property
    def pool(self) -> DecoderPool:
        """Decoders of the reference path, opened on first use; safe across fork."""
        if self._pool is None:
            self._pool = DecoderPool()
        return self._pool

    @property
    def stats(self) -> Mapping[str, Stats]:
        """Statistics per feature as the data set ships them (v2.1: aggregated over all episodes)."""
        if self._stats is None:
            self._stats = read_stats(self.root, self.info)
        return self._stats

    @property
    def fingerprint(self) -> str:
        """Hex digest of what decides which sample an index means: content facts and the options chosen."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self)
        return self._fingerprint

    @property
    def rows(self) -> Rows:
        """All rows as columns in memory; not to be written to."""
        return self._rows

    @property
    def episode_starts(self) -> NDArray[np.int64]:
        """(episodes + 1,) int64, first sample of each episode; the last entry is the length."""
        return self._starts

    def episode_bounds(self, i: int) -> tuple[int, int]:
        """Return the samples [start, stop) of the episode that sample i belongs to."""
        episode = self._frames.episode(self._checked(i))
        return int(self._starts[episode]), int(self._starts[episode + 1])

    def episode_of(self, i: int) -> Episode:
        """Return the episode that sample i belongs to."""
        return self.episodes[self._frames.episode(self._checked(i))]

    def placement(self, episode: int, camera: str) -> Placement:
        """Return the video file of an episode and camera, and the display index of its first frame there."""
        return self._placements[episode, camera]

    def block_starts(self) -> list[int]:
        """Return the first sample of each run that starts on a key frame of the first camera.

        Runs never cross an episode. Reads the key frames of every video file of that camera, once.
        """
        return self._frames.block_starts(self.cameras[0] if self.cameras else None)

    def text(self, i: int, key: str) -> str:
        """Return the text of a language key: "task", "sub_task", or an annotation of `modality.json`.

        Args:
            i: Sample.
            key: "task", an annotation key without the prefix ("human.task_description"), or a column that
                holds indices into the task table.

        Raises:
            KeyError: There is no such column.
        """
        row = self._checked(i)
        annotations = {} if self.modality is None else self.modality.annotation
        column = "task_index" if key == "task" else annotations.get(key, key)
        if column in self._rows.objects:
            return str(self._rows.objects[column][row])
        if column not in self._rows.arrays:
            known = ["task", *annotations, *self._rows.arrays]
            msg = f"no language key {key!r}; keys and columns: {', '.join(known)}"
            raise KeyError(msg)
        index = int(self._rows.arrays[column][row])
        if index not in self.tasks:
            msg = f"column {column!r} points to task {index}, which is not in the task table"
            raise DataError(msg, row=row)
        return self.tasks[index]

    def _checked(self, i: int) -> int:
        row = int(i)
        if row < 0:
            row += self._length
        if not 0 <= row < self._length:
            msg = f"sample {i} does not exist: the data set has {self._length} samples"
            raise IndexError(msg)
        return row

    # -- samples ---------------------------------------------------------------------------------------

    def tabular(self, i: int) -> Sample:
        """Return everything of a sample but decoded video. A few microseconds per feature."""
        row = self._checked(i)
        episode = self._frames.episode(row)
        start, stop = int(self._starts[episode]), int(self._starts[episode + 1])
        sample: Sample = {}
        for reader in self._readers:
            reader(sample, row, start, stop)
        return sample

    def frame_requests(self, i: int) -> tuple[FrameRequest, ...]:
        """Return the video frames a sample needs, camera by camera and slot by slot. Opens no file."""
        return self._frames.requests(self._checked(i), self.cameras)

    def frame_tables(self, rows: NDArray[np.int64]) -> list[FrameTable]:
        """Return the frames of many samples at once, one table per camera; see `planning.FrameTables`.

        Args:
            rows: (n,) int64 samples, each 0 <= row < len(dataset).

        Raises:
            IndexError: A sample does not exist.
        """
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self._length:
            msg = f"samples {rows.min()} to {rows.max()}: the data set has samples 0 to {self._length - 1}"
            raise IndexError(msg)
        return self._frames.tables(rows, self.cameras)

    def image_layout(self) -> Mapping[str, ImageLayout]:
        """Return the picture shapes of exactly the keys that `frame_requests` delivers.

        Without `image_size` the first file of each camera is opened once to learn its displayed size.
        """
        result = {}
        for camera in self.cameras:
            window = self.windows.get(camera)
            height, width = self.image_size or self._displayed_size(camera)
            frames = None if window is None else len(window.offsets)
            result[camera] = ImageLayout(frames, height, width, 3, "uint8", self.image_size, None)
        return result

    def _displayed_size(self, camera: str) -> ImageSize:
        known = self._sizes.get(camera)
        if known is None:
            paths = self._frames.paths(camera)
            if not paths:
                shape = self.features[camera].shape
                return (shape[0], shape[1])
            with VideoFile(paths[0]) as video:
                known = self._sizes[camera] = video.displayed_size
        return known

    def __getitem__(self, i: int) -> Sample:
        """Return one sample with its frames decoded: the plain reference path.

        Raises:
            IndexError: There is no such sample.
            VideoError: A frame cannot be decoded; names file, episode and row.
        """
        sample = self.tabular(i)
        requests = self.frame_requests(i)
        wanted: dict[str, dict[int, NDArray[np.uint8]]] = {}
        for request in requests:
            wanted.setdefault(request.path, {})[request.index] = _NOTHING
        for path, frames in wanted.items():
            try:
                with self.pool.checkout(path) as video:
                    for index, frame in video.decode(tuple(frames)):
                        frames[index] = upright_rgb(frame, size=self.image_size)
            except DataError as error:
                row = self._checked(i)
                episode = self.episodes[self._frames.episode(row)].index
                raise type(error)(error.message, path=path, episode=episode, row=row) from error
        for camera in self.cameras:
            pictures = [wanted[r.path][r.index] for r in requests if r.key == camera]
            sample[camera] = np.stack(pictures) if camera in self.windows else pictures[0]
        return sample

    def __iter__(self) -> Iterator[Sample]:
        """Yield all samples in order."""
        return (self[i] for i in range(self._length))

    def close(self) -> None:
        """Close the decoders of `__getitem__`; the data set stays usable."""
        if self._pool is not None:
            self._pool.close()

    def __reduce__(self) -> tuple[object, ...]:
        """Travel to another process by name and options; the fingerprint is compared there."""
        return _reopen, (self.root, self.options, self.fingerprint)


def open_dataset(
    root: str | Path,
    *,
    window: Mapping[str, Sequence[int]] | None = None,
    episodes: Sequence[int] | None = None,
    cameras: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    image_size: ImageSize | None = None,
    on_mismatch: OnMismatch = "error",
    verify: Verify = "auto",
    depth: DepthUnit = "metres",
    audio: Mapping[str, AudioSource] | None = None,
    series: Mapping[str, SeriesSource] | None = None,
) -> RobotDataset:
    """Open a LeRobot v2.0, v2.1, v3.0 or GR00T-flavoured data set directory.

    Args:
        root: The directory that holds `meta/info.json`.
        window: Frame offsets per feature key, e.g. ``{"action": range(16)}``: the key gets a leading time
            axis and a mask ``<key>_is_pad``. Offsets outside the episode repeat its first or last row.
        episodes: Episode indices to use; None uses all.
        cameras: Keys of the cameras to use; None uses all, () none.
        columns: Features other than cameras to use; None uses all. The standard columns are always there.
        image_size: (height, width) pictures are resized to; None keeps their own size.
        on_mismatch: What to do with an episode whose rows, files or frames do not fit together: `error`
            refuses the set and lists all of them, `skip_episode` leaves it out, `drop_tail` keeps the rows
            that have frames. What was left out is in `skipped`.
        verify: `paths` checks that files are there; `headers` also compares frame counts; `auto` is `headers`
            for up to 512 video files.
        depth: Unit of depth maps: "metres" (float32) or "raw" (the stored codes).
        audio: Sound windows to add, by the key they get in a sample.
        series: Windows of time series at rates of their own to add, by the key they get in a sample.

    Raises:
        LayoutError: Not a data set, an unsupported version, or metadata that contradicts the files.
        TableError, VideoError: Files are missing or do not fit, by the policy above.
        ValueError: An argument does not fit the data set.
    """
    options = Options(
        window={key: tuple(int(o) for o in offsets) for key, offsets in (window or {}).items()},
        episodes=None if episodes is None else tuple(int(e) for e in episodes),
        cameras=None if cameras is None else tuple(cameras),
        columns=None if columns is None else tuple(columns),
        image_size=_checked_size(image_size),
        on_mismatch=_one_of("on_mismatch", on_mismatch, ("error", "drop_tail", "skip_episode")),
        verify=_one_of("verify", verify, ("auto", "paths", "headers")),
        depth=_one_of("depth", depth, ("metres", "raw")),
        audio=None if audio is None else dict(audio),
        series=None if series is None else dict(series),
    )
    opened = open_files(
        Path(root),
        episodes=options.episodes,
        cameras=options.cameras,
        columns=options.columns,
        on_mismatch=options.on_mismatch,
        verify=options.verify,
    )
    return RobotDataset(opened, options)


def _one_of(name: str, value: _Text, allowed: tuple[str, ...]) -> _Text:
    if value not in allowed:
        msg = f"{name} must be one of {', '.join(allowed)}; got {value!r}"
        raise ValueError(msg)
    return value


def _checked_size(size: ImageSize | None) -> ImageSize | None:
    if size is None:
        return None
    if len(size) != 2 or not all(isinstance(n, int) and 1 <= n <= 16384 for n in size):
        msg = f"image_size must be (height, width) in pixels, each 1 to 16384, got {size!r}"
        raise ValueError(msg)
    return (size[0], size[1])


def _reopen(root: Path, options: Options, expected: str) -> RobotDataset:
    dataset = open_dataset(root, **options._asdict())
    if dataset.fingerprint != expected:
        msg = (
            f"the data set changed while it was in use: fingerprint {dataset.fingerprint[:12]} here, "
            f"{expected[:12]} where it was opened first"
        )
        raise DataError(
            msg,
            path=root,
        )
    return dataset
