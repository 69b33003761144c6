"""From a decoded frame to RGB: crop, resize, colour matrix and rotation in one pass, straight into the
destination.

What is computed (the tests hold it against float64):

* Without a change of size, chroma samples are replicated, as FFmpeg's scaler does.
* With a change of size, every plane is resampled straight to the output grid by a triangle filter that
  widens with the scale ("bilinear, antialiased"); chroma counts as centred on the luma samples it covers.
* The matrix and range follow the tags of the stream. Files without a matrix tag are BT.601, files without
  a range tag limited; ``yuvj*`` formats are full range; grey pictures are taken as full range.

Pixel formats without a kernel here (RGB, palettes, alpha, ...) go through FFmpeg's scaler; `fallbacks`
counts them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from loongforge_data._core import FrameConverter

if TYPE_CHECKING:
    import av

Size = tuple[int, int]
"""Height and width in pixels."""
Crop = tuple[int, int, int, int]
"""Top, left, height and width in pixels of the displayed picture."""
Picture = npt.NDArray[np.uint8]

fallbacks: Counter[str] = Counter()
"""Frames that went through FFmpeg's scaler, by pixel format."""


@dataclass(frozen=True, kw_only=True)
class PixelFormat:
    """How the samples of a pixel format lie in memory."""

    depth: int
    """Bits per sample."""
    chroma: tuple[int, int] | None
    """Log2 of columns and rows per chroma sample; None without chroma."""
    full: bool = False
    """True when the format itself says full range."""


def _formats() -> dict[str, PixelFormat]:
    shifts = {"420": (1, 1), "422": (1, 0), "440": (0, 1), "444": (0, 0)}
    known = {"gray": PixelFormat(depth=8, chroma=None, full=True)}
    for bits in (9, 10, 12, 14, 16):
        known[f"gray{bits}le"] = PixelFormat(depth=bits, chroma=None, full=True)
    for name, shift in shifts.items():
        known[f"yuv{name}p"] = PixelFormat(depth=8, chroma=shift)
        known[f"yuvj{name}p"] = PixelFormat(depth=8, chroma=shift, full=True)
        for bits in (9, 10, 12, 14, 16):
            known[f"yuv{name}p{bits}le"] = PixelFormat(depth=bits, chroma=shift)
    return known


FORMATS = _formats()
# Numbers of FFmpeg's AVColorSpace; 2 is "unspecified". RGB (0), YCgCo and the constant-luminance and ICtCp
# matrices
# are left to FFmpeg.
_MATRICES = {
    1: "bt709",
    2: "bt601",
    3: "bt601",
    4: "fcc",
    5: "bt601",
    6: "bt601",
    7: "smpte240m",
    9: "bt2020",
}
_FULL_RANGE = 2
_MAX_CONVERTERS = 64
_converters: dict[tuple[object, ...], FrameConverter] = {}


def frame_to_rgb(
    frame: av.VideoFrame,
    *,
    size: Size | None = None,
    crop: Crop | None = None,
    rotation: int = 0,
    out: Picture | None = None,
) -> Picture:
    """Convert a decoded frame to RGB.

    Args:
        frame: Frame as the decoder gives it.
        size: (height, width) of the result; None keeps the size of the crop.
        crop: (top, left, height, width) taken before the resize, in pixels of the displayed (rotated)
            picture.
        rotation: Degrees counter-clockwise by which the stored picture is turned for display.
        out: (height, width, 3) uint8 array to write into, contiguous; None makes a new one.

    Returns:
        (height, width, 3) uint8, RGB, host memory. O(pixels in + pixels out).

    Raises:
        ValueError: The crop, size, rotation or output does not fit the frame.
    """
    converter = _converter_for(frame, size=size, crop=crop, rotation=rotation)
    if converter is None:
        return _by_scaler(frame, size=size, crop=crop, rotation=rotation, out=out)
    planes = frame.planes
    if out is None:
        out = np.empty((*converter.output_size, 3), dtype=np.uint8)
    elif out.shape != (*converter.output_size, 3):
        msg = f"out has shape {out.shape}, this conversion gives {(*converter.output_size, 3)}"
        raise ValueError(msg)
    converter.run(planes, [plane.line_size for plane in planes], out)
    return out


def _converter_for(
    frame: av.VideoFrame, *, size: Size | None, crop: Crop | None, rotation: int
) -> FrameConverter | None:
    """Return the prepared conversion for frames of this kind; None when only FFmpeg's scaler knows the
    format.
    """
    name = frame.format.name
    layout = FORMATS.get(name)
    matrix = _MATRICES.get(int(frame.colorspace))
    if layout is None or matrix is None:
        return None
    full = layout.full or int(frame.color_range) == _FULL_RANGE
    key = (frame.width, frame.height, name, matrix, full, rotation, crop, size)
    converter = _converters.get(key)
    if converter is None:
        converter = FrameConverter(
            width=frame.width,
            height=frame.height,
            depth=layout.depth,
            chroma_shift=layout.chroma,
            matrix=matrix,
            full_range=full,
            rotation=rotation,
            crop=crop,
            size=size,
        )
        if len(_converters) >= _MAX_CONVERTERS:
            _converters.clear()
        _converters[key] = converter
    return converter


def _by_scaler(
    frame: av.VideoFrame, *, size: Size | None, crop: Crop | None, rotation: int, out: Picture | None
) -> Picture:
    """Convert with FFmpeg's scaler, then turn, crop and resize like the kernel does."""
    fallbacks[frame.format.name] += 1
    picture = frame.to_ndarray(format="rgb24", threads=1)
    if rotation % 90:
        msg = f"rotation is {rotation}, allowed are multiples of 90 degrees"
        raise ValueError(msg)
    picture = np.rot90(picture, k=(rotation // 90) % 4)
    if crop is not None:
        top, left, height, width = crop
        inside = top >= 0 and left >= 0 and 0 < height <= picture.shape[0] - top
        if not (inside and 0 < width <= picture.shape[1] - left):
            msg = (
                f"crop is {crop}, allowed is a part of the displayed {picture.shape[0]} x "
                f"{picture.shape[1]} picture"
            )
            raise ValueError(msg)
        picture = picture[top : top + height, left : left + width]
    if size is not None and picture.shape[:2] != tuple(size):
        picture = resize_rgb(np.ascontiguousarray(picture), size)
    if out is None:
        return np.ascontiguousarray(picture)
    out[...] = picture
    return out


def resize_rgb(picture: Picture, size: Size) -> Picture:
    """Resize an RGB picture (height, width, 3) with the same filter: each channel goes through the grey
    kernel.
    """
    height, width = picture.shape[:2]
    converter = FrameConverter(
        width=width, height=height, depth=8, chroma_shift=None, matrix="bt601", full_range=True, size=size
    )
    result = np.empty((*size, 3), dtype=np.uint8)
    grey = np.empty((*size, 3), dtype=np.uint8)
    for channel in range(3):
        plane = np.ascontiguousarray(picture[:, :, channel])
        converter.run([plane], [width], grey)
        result[:, :, channel] = grey[:, :, 0]
    return result


def frame_into(
    frame: av.VideoFrame,
    target: memoryview,
    *,
    size: Size | None = None,
    crop: Crop | None = None,
    rotation: int = 0,
) -> None:
    """Convert a frame into raw bytes: like `frame_to_rgb` with ``out``, without making an array.

    Args:
        frame: Frame as the decoder gives it.
        target: Writable bytes, exactly height x width x 3.
        size: As in `frame_to_rgb`.
        crop: As in `frame_to_rgb`.
        rotation: As in `frame_to_rgb`.
    """
    converter = _converter_for(frame, size=size, crop=crop, rotation=rotation)
    if converter is None:
        picture = _by_scaler(frame, size=size, crop=crop, rotation=rotation, out=None)
        if picture.nbytes != len(target):
            msg = f"the picture has shape {picture.shape}, the target {len(target)} bytes"
            raise ValueError(msg)
        target[:] = picture.tobytes()
        return
    height, width = converter.output_size
    if height * width * 3 != len(target):
        msg = (
            f"the picture has {height} x {width} pixels, its place {len(target)} bytes: sizes differ "
            f"between files"
        )
        raise ValueError(msg)
    planes = frame.planes
    converter.run(planes, [plane.line_size for plane in planes], target)
