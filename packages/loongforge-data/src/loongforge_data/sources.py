"""Sensors beside the table: sound and time series, cut to windows around the time of a sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from loongforge_data.modalities.audio import AudioCache
from loongforge_data.modalities.series import SeriesSource, TimeSeries, read_series
from loongforge_data.video.probe import video_index

if TYPE_CHECKING:
    from loongforge_data.dataset import RobotDataset


@dataclass(frozen=True, kw_only=True)
class AudioSource:
    """A sound window around each sample.

    Attributes:
        rate: Samples per second of the result.
        before: Seconds before the time of the sample.
        after: Seconds after it.
        channels: Channels of the result: 1 mixes all, another number must be the track's own (or repeat 1).
        camera: Feature key of the camera whose video file carries the sound; or
        path: Template of a sound file per episode, e.g. "audio/mic/episode_{episode_index:06d}.wav".
    """

    rate: int
    before: float
    after: float = 0.0
    channels: int = 1
    camera: str | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        """Demand exactly one place the sound comes from, and a window with an extent."""
        if (self.camera is None) == (self.path is None):
            msg = f"a sound needs either camera or path, got camera={self.camera!r} and path={self.path!r}"
            raise ValueError(msg)
        if self.rate < 1 or self.channels < 1 or self.before + self.after <= 0:
            msg = (
                "a sound needs a positive rate, channels and a window with an extent; got "
                f"{self.rate}, {self.channels}, {self.before} + {self.after} s"
            )
            raise ValueError(msg)

    @property
    def samples(self) -> int:
        """Length of the window in samples: the same for every sample of the data set."""
        return round((self.before + self.after) * self.rate)


class AudioReader:
    """Puts the sound window of a row into a sample: `key` (channels, samples), `key_is_pad` (samples,)."""

    def __init__(self, dataset: RobotDataset, key: str, source: AudioSource) -> None:
        if source.camera is not None and source.camera not in dataset.info.cameras:
            known = ", ".join(dataset.info.cameras) or "none"
            msg = f"sound {key!r} names camera {source.camera!r}; cameras: {known}"
            raise ValueError(msg)
        self._dataset = dataset
        self._key = key
        self._source = source
        self._cache = AudioCache()

    def __call__(self, sample: dict[str, object], row: int, start: int, stop: int) -> None:
        """Fill in the window of one row."""
        source = self._source
        path, seconds = self._place(row, start)
        track = self._cache.get(path)
        # One rounding of the start, and a fixed length: windows of all samples have the same shape.
        first = round((seconds - source.before) * source.rate)
        edges = (first / source.rate, (first + source.samples) / source.rate)
        values, mask = track.window(*edges, rate=source.rate, channels=source.channels)
        sample[self._key] = values
        sample[f"{self._key}_is_pad"] = mask

    def _place(self, row: int, start: int) -> tuple[str, float]:
        """Return the file, and the time of the row in seconds since the first sample of its sound."""
        dataset, source = self._dataset, self._source
        episode = dataset.episode_of(row)
        if source.path is not None:
            name = source.path.format(episode_index=episode.index, episode_chunk=episode.index // 1000)
            return str(Path(dataset.root) / name), (row - start) / float(dataset.info.fps)
        place = dataset.placement(episode.index, source.camera or "")
        index = video_index(place.path)
        clock = float(index.pts[place.first + row - start] * index.time_base)
        return place.path, clock - float(self._cache.get(place.path).start)


class SeriesReader:
    """Puts the last rows of a series into a sample, as `key` (samples, D) float32 and `key_is_pad`."""

    def __init__(self, dataset: RobotDataset, key: str, source: SeriesSource) -> None:
        self._dataset = dataset
        self._key = key
        self._source = source
        self._known: tuple[int, TimeSeries] | None = None

    def __call__(self, sample: dict[str, object], row: int, start: int, stop: int) -> None:
        """Fill in the window of one row."""
        episode = self._dataset.episode_of(row)
        if self._known is None or self._known[0] != episode.index:
            name = self._source.path.format(episode_index=episode.index, episode_chunk=episode.index // 1000)
            path = Path(self._dataset.root) / name
            series = read_series(path, columns=self._source.columns, time_column=self._source.time_column)
            self._known = (episode.index, series)
        seconds = (row - start) / float(self._dataset.info.fps)
        values, mask = self._known[1].last(seconds, self._source.samples)
        sample[self._key] = np.ascontiguousarray(values)
        sample[f"{self._key}_is_pad"] = mask
