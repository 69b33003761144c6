"""Decoded frames as arrays, upright and with the colours their tags ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loongforge_data.formats.info import Feature

if TYPE_CHECKING:
    from av import VideoFrame


def frame_array(
    frame: VideoFrame, feature: Feature, *, size: tuple[int, int] | None = None
) -> NDArray[np.generic]:
    """Return a frame as (height, width, 3) uint8 RGB, upright."""
    return frame_rgb(frame, size=size)


def frame_rgb(frame: VideoFrame, *, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Convert by swscale: the reference for faster converters.

    Args:
        frame: A decoded frame; its own colour tags and rotation are followed.
        size: (height, width) of the upright result; None keeps the displayed size.
    """
    turns = (frame.rotation % 360) // 90
    if size is not None and turns % 2:
        size = (size[1], size[0])
    height, width = size or (frame.height, frame.width)
    picture = frame.reformat(width=width, height=height, format="rgb24", threads=1).to_ndarray()
    return np.ascontiguousarray(np.rot90(picture, turns)) if turns else picture
