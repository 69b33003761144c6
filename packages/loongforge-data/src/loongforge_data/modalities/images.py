"""Pictures kept in parquet columns."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from loongforge_data.errors import MediaError
from loongforge_data.formats.info import Feature


def decode_image(
    value: object, feature: Feature, *, size: tuple[int, int] | None = None
) -> NDArray[np.uint8]:
    """Decode one picture of a parquet column to (height, width, 3) uint8 RGB."""
    data = value.get("bytes") if isinstance(value, Mapping) else value
    if not isinstance(data, bytes | bytearray):
        msg = f"picture of {feature.key!r} holds no bytes (found {type(data).__name__})"
        raise MediaError(msg)
    with Image.open(io.BytesIO(data)) as image:
        picture = ImageOps.exif_transpose(image).convert("RGB")
        if size is not None and picture.size != (size[1], size[0]):
            picture = picture.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        return np.asarray(picture)
