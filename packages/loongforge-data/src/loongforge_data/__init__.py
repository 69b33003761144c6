"""LoongForge data: the exact, fast loader for robot video.

Names are imported when they are first used, so that ``import loongforge_data`` stays cheap and needs
neither torch nor a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loongforge_data.collate import DynamicPadCollator, default_collate
    from loongforge_data.dataset import FrameRequest, RobotDataset, open_dataset
    from loongforge_data.errors import DataError
    from loongforge_data.loader import ADFEDataLoader
    from loongforge_data.modalities.audio import AudioSource
    from loongforge_data.modalities.series import SeriesSource
    from loongforge_data.validate import validate_dataset
    from loongforge_data.video import DecoderPool, VideoFile

__all__ = [
    "ADFEDataLoader",
    "AudioSource",
    "DataError",
    "DecoderPool",
    "DynamicPadCollator",
    "FrameRequest",
    "RobotDataset",
    "SeriesSource",
    "VideoFile",
    "default_collate",
    "open_dataset",
    "validate_dataset",
]

_HOME = {
    "ADFEDataLoader": "loader",
    "AudioSource": "modalities.audio",
    "DataError": "errors",
    "DecoderPool": "video",
    "DynamicPadCollator": "collate",
    "FrameRequest": "dataset",
    "RobotDataset": "dataset",
    "SeriesSource": "modalities.series",
    "VideoFile": "video",
    "default_collate": "collate",
    "open_dataset": "dataset",
    "validate_dataset": "validate",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
