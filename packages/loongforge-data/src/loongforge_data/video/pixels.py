"""Decoded frames as arrays, upright and with the colours their tags ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loongforge_data.convert import frame_to_rgb

if TYPE_CHECKING:
    from av import VideoFrame


def upright_rgb(frame: VideoFrame, *, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Return a frame as (height, width, 3) uint8 RGB, turned as its display matrix says.

    Args:
        frame: A decoded frame; its own colour tags and rotation are followed (see `loongforge_data.convert`).
        size: (height, width) of the upright result; None keeps the displayed size.
    """
    return frame_to_rgb(frame, size=size, rotation=int(frame.rotation) % 360)
