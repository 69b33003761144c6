"""Sensors beside the table: sound and time series, cut to windows around the time of a sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from loongforge_data.contracts import DatasetView
from loongforge_data.modalities.audio import AudioCache, AudioSource
from loongforge_data.modalities.series import SeriesSource, TimeSeries, read_series
from loongforge_data.video.probe import video_index


class AudioReader:
    """Puts the sound window of a row into a sample: `key` (channels, samples), `key_is_pad` (samples,)."""

    def __init__(self, dataset: DatasetView, key: str, source: AudioSource) -> None:
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

    def __init__(self, dataset: DatasetView, key: str, source: SeriesSource) -> None:
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
