"""Decoding on an NVIDIA GPU through PyAV, taken only where it can be shown to give the CPU's frames.

Frames are downloaded to host memory by PyAV, since they go into shared slots. The download loses what a frame
says about itself (marks, colour tags, rotation), so frames are recognised by their time stamps, colour tags
come from the frame table, and the first frame of each kind of file is compared with the CPU's. Whatever does
not fit falls back to the CPU with a `Refusal`.

Not measured: on a host where downloading costs more than decoding, the CPU is faster; "cpu" is the default.
"""

from __future__ import annotations

import ctypes
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np

from loongforge_data.errors import VideoError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame

    from loongforge_data.video.index import VideoIndex

TOLERANCE = 2
"""Levels of 255 by which a frame of the GPU may differ from the CPU's."""


class Refusal(StrEnum):
    """Why frames are decoded on the CPU although the GPU was asked for."""

    BUILD = "this FFmpeg has no CUDA support"
    DRIVER = "libcuda.so.1 cannot be loaded"
    DEVICE = "no /dev/nvidia* device is visible"
    NO_VIDEO = "the data set lists no video frames"
    CODEC = "the GPU does not decode this kind of file"
    STAMPS = "frames cannot be told apart by their time stamps"
    DIFFERS = "the first frame differs from the CPU's"


@cache
def probe() -> Refusal | None:
    """Return why this host cannot decode on a GPU, or None; starts no CUDA context."""
    from av.codec.hwaccel import hwdevices_available

    if "cuda" not in hwdevices_available():
        return Refusal.BUILD
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return Refusal.DEVICE
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Refusal.DRIVER
    return None


def open_on_gpu(path: str) -> InputContainer:
    """Open a video file so that the GPU decodes it; never falls back on its own.

    Raises:
        VideoError: The GPU does not take this file.
    """
    from av.codec.hwaccel import HWAccel

    try:
        return av.open(
            path, "r", metadata_errors="ignore", hwaccel=HWAccel("cuda", allow_software_fallback=False)
        )
    except (av.error.FFmpegError, EOFError, OSError, RuntimeError, NotImplementedError) as error:
        msg = f"{Refusal.CODEC}: {error}"
        raise VideoError(msg, path=path) from error


def restore_tags(frame: VideoFrame, index: VideoIndex) -> None:
    """Give a downloaded frame the colour tags of its stream."""
    frame.colorspace = index.color_space
    frame.color_range = index.color_range


def tellable(index: VideoIndex) -> bool:
    """Return whether every frame of a file has a time stamp of its own."""
    return not index.estimated and len(np.unique(index.pts)) == len(index.pts)


def differs(ours: VideoFrame, reference: VideoFrame) -> int:
    """Return the largest difference of two frames of one size as RGB, in levels; 255 for unequal sizes."""
    from loongforge_data.convert import frame_to_rgb

    a, b = (frame_to_rgb(f, rotation=int(f.rotation) % 360) for f in (ours, reference))
    if a.shape != b.shape:
        return 255
    return int(np.abs(a.astype(np.int16) - b.astype(np.int16)).max())
