"""Pictures kept in parquet columns: one rule for modes, alpha, orientation and bit depth.

* The declared channel count decides: 3 gives RGB, 1 gives grey or 16-bit depth, 4 gives RGBA.
* To 3 channels: grey is repeated, palettes and CMYK are converted, 1-bit becomes 0 and 255. Alpha is dropped
  and the stored colours are kept as they are (no blending).
* To 1 channel: only grey and depth pictures; a colour picture is an error, since a weighting would be a
  guess.
* The EXIF orientation is applied always, so width and height are those of the upright picture.
* 16-bit pictures stay 16-bit: they are never passed through 8-bit RGB.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from loongforge_data.errors import MediaError
from loongforge_data.formats.info import Feature
from loongforge_data.modalities.depth import DepthUnit, nearest_resize, stored_depth

_DEEP_MODES = ("I;16", "I;16B", "I;16L", "I", "F")
_PNG_HEADER = b"\x89PNG\r\n\x1a\n"


def decode_image(
    value: object,
    feature: Feature,
    *,
    size: tuple[int, int] | None = None,
    depth: DepthUnit = "metres",
    path: str | None = None,
    row: int | None = None,
) -> NDArray[np.generic]:
    """Decode one picture of a parquet column.

    Args:
        value: Bytes, or a struct with `bytes` as LeRobot writes it.
        feature: The declared feature; its shape is (height, width, channels).
        size: (height, width) of the result; None demands the declared size.
        depth: Unit of 16-bit and float pictures: "metres" gives float32, "raw" what is stored.
        path: Table the picture comes from, for errors.
        row: Row it comes from, for errors.

    Returns:
        (height, width, 3) or (height, width, 4) uint8; depth is (height, width, 1) float32, uint16 or int32.

    Raises:
        MediaError: No bytes, an unknown file format, a damaged file, or a picture that does not fit the
            declared shape.
    """
    data = value.get("bytes") if isinstance(value, Mapping) else value
    if not isinstance(data, bytes | bytearray | memoryview):
        msg = f"picture of {feature.key!r} holds no bytes (found {type(data).__name__})"
        raise MediaError(msg, path=path, row=row)
    try:
        with Image.open(io.BytesIO(data)) as image:
            picture = ImageOps.exif_transpose(image)
            picture.load()
            array = _convert(picture, feature, depth, _is_deep_color(bytes(data[:26])))
    except MediaError as error:
        raise MediaError(error.message, path=path, row=row) from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        msg = f"picture of {feature.key!r} cannot be decoded: {error}"
        raise MediaError(msg, path=path, row=row) from error
    return _fit(array, feature, size, path, row)


def _channels(feature: Feature) -> int:
    return feature.shape[2] if len(feature.shape) == 3 else 1 if len(feature.shape) == 2 else 3


def _is_deep_color(head: bytes) -> bool:
    """Tell a 16-bit colour PNG by its header: Pillow would silently keep the upper 8 bits only."""
    return head.startswith(_PNG_HEADER) and len(head) >= 26 and head[24] == 16 and head[25] in (2, 6)


def _convert(
    picture: Image.Image,
    feature: Feature,
    depth: DepthUnit,
    deep: bool,  # noqa: FBT001 - private
) -> NDArray[np.generic]:
    channels = _channels(feature)
    if deep:
        msg = (
            f"picture of {feature.key!r} is 16-bit colour, which would lose half its bits; store it as 8-bit"
        )
        raise MediaError(msg)
    if picture.mode in _DEEP_MODES:
        if channels != 1:
            msg = (
                f"picture of {feature.key!r} is 16-bit or float grey ({picture.mode}) but the declared shape "
                f"{list(feature.shape)} has {channels} channels; declare 1 channel for depth"
            )
            raise MediaError(msg)
        return stored_depth(_deep_array(picture), feature, depth)[..., None]
    if channels == 1:
        if picture.mode not in ("L", "1", "LA"):
            msg = f"picture of {feature.key!r} has mode {picture.mode}, the declared shape has 1 channel"
            raise MediaError(msg)
        grey = np.asarray(picture.convert("L"))[..., None]
        return stored_depth(grey, feature, depth) if feature.is_depth else grey
    if channels == 4:
        return np.asarray(picture.convert("RGBA"))
    if channels != 3:
        msg = f"feature {feature.key!r} declares {channels} channels; pictures have 1, 3 or 4"
        raise MediaError(msg)
    if picture.mode in ("LA", "PA", "RGBa"):
        picture = picture.convert("RGBA")
    return np.asarray(picture.convert("RGB"))


def _deep_array(picture: Image.Image) -> NDArray[np.generic]:
    array = np.asarray(picture)
    if picture.mode.startswith("I;16"):
        return array.astype(np.uint16)
    if picture.mode == "I" and array.size and int(array.min()) >= 0 and int(array.max()) <= 0xFFFF:
        return array.astype(np.uint16)
    return array


def _fit(
    array: NDArray[np.generic],
    feature: Feature,
    size: tuple[int, int] | None,
    path: str | None,
    row: int | None,
) -> NDArray[np.generic]:
    height, width = array.shape[:2]
    if size is None:
        declared = feature.shape[:2]
        if len(feature.shape) >= 2 and (height, width) != declared:
            msg = (
                f"picture of {feature.key!r} is {height} x {width}, the declared shape is "
                f"{list(feature.shape)}; correct info.json or pass image_size"
            )
            raise MediaError(msg, path=path, row=row)
        return array
    if (height, width) == size:
        return array
    if array.dtype != np.uint8 or feature.is_depth:
        return nearest_resize(array, size)
    squeezed = array[..., 0] if array.shape[2] == 1 else array
    resized = Image.fromarray(squeezed).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    result = np.asarray(resized)
    return result[..., None] if result.ndim == 2 else result
