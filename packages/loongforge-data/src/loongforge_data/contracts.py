"""What the parts of a data set need to know of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from loongforge_data.formats.episodes import Episode, EpisodeTable
from loongforge_data.formats.info import DatasetInfo, Feature
from loongforge_data.formats.placement import Placement
from loongforge_data.formats.rows import Rows
from loongforge_data.options import ImageSize, Options
from loongforge_data.video import DecoderPool
from loongforge_data.windows import Window


class DatasetView(Protocol):
    """An open data set, as its column readers and its fingerprint see it."""

    root: Path
    info: DatasetInfo
    features: Mapping[str, Feature]
    episodes: EpisodeTable
    tasks: Mapping[int, str]
    cameras: tuple[str, ...]
    depth_cameras: tuple[str, ...]
    windows: Mapping[str, Window]
    image_size: ImageSize | None
    options: Options

    @property
    def rows(self) -> Rows:
        """All rows as columns."""
        ...

    @property
    def pool(self) -> DecoderPool:
        """Decoders of the reference path."""
        ...

    def episode_of(self, i: int) -> Episode:
        """Return the episode of a sample."""
        ...

    def episode_bounds(self, i: int) -> tuple[int, int]:
        """Return the samples [start, stop) of the episode of a sample."""
        ...

    def placement(self, episode: int, camera: str) -> Placement:
        """Return where the frames of an episode and camera lie."""
        ...
