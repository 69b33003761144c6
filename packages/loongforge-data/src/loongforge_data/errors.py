"""Errors of the package: all are `ValueError`, and all name the file, episode or row they concern."""

from __future__ import annotations

from pathlib import Path


class DataError(ValueError):
    """A data set or one of its files is not what it should be.

    Args:
        message: What is wrong, the actual value, what is allowed, and the way out.
        path: File the error concerns, if any.
        episode: Episode index, if known.
        row: Row inside the data set (global index), if known.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | Path | None = None,
        episode: int | None = None,
        row: int | None = None,
    ) -> None:
        place = [
            f"{name} {value}"
            for name, value in (("episode", episode), ("row", row), ("file", path))
            if value is not None
        ]
        super().__init__(f"{message} ({', '.join(place)})" if place else message)
        self.message = message
        self.path = None if path is None else str(path)
        self.episode = episode
        self.row = row

    def __reduce__(self) -> tuple[object, ...]:
        """Survive the trip between processes with the fields intact."""
        return _rebuild, (type(self), self.message, self.path, self.episode, self.row)


def _rebuild(
    kind: type[DataError], message: str, path: str | None, episode: int | None, row: int | None
) -> DataError:
    return kind(message, path=path, episode=episode, row=row)


class LayoutError(DataError):
    """The directory is not a data set this package reads, or its metadata contradicts its files."""


class TableError(DataError):
    """A parquet table is missing, unfinished, or holds rows that do not fit the declaration."""


class MediaError(DataError):
    """A video, image or audio file cannot be used at all."""


class VideoError(MediaError):
    """A video file cannot be opened, or a frame that was asked for does not exist in it."""


class DamagedVideoError(VideoError):
    """A packet of a video file cannot be decoded."""


class AudioError(MediaError):
    """An audio file cannot be opened or holds no usable samples."""
