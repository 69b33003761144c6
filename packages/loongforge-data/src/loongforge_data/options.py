"""Arguments of `open_dataset` as one value, kept to open a data set again in another process."""

from __future__ import annotations

from typing import Literal, NamedTuple

from loongforge_data.modalities.audio import AudioSource
from loongforge_data.modalities.depth import DepthUnit
from loongforge_data.modalities.series import SeriesSource

OnMismatch = Literal["error", "drop_tail", "skip_episode"]
Verify = Literal["auto", "paths", "headers"]
ImageSize = tuple[int, int]


class Options(NamedTuple):
    """Arguments of `open_dataset`; see there."""

    window: dict[str, tuple[int, ...]]
    episodes: tuple[int, ...] | None
    cameras: tuple[str, ...] | None
    columns: tuple[str, ...] | None
    image_size: ImageSize | None
    on_mismatch: OnMismatch
    verify: Verify
    depth: DepthUnit
    audio: dict[str, AudioSource] | None
    series: dict[str, SeriesSource] | None
