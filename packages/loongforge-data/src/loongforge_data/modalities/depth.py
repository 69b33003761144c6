"""Depth maps: 12-bit codes in video, 16-bit and float pictures, in metres or as stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from loongforge_data.errors import MediaError
from loongforge_data.formats.info import Feature

if TYPE_CHECKING:
    from av import VideoFrame

DepthUnit = Literal["metres", "raw"]
"""`metres`: float32; `raw`: the stored integers or floats, untouched."""

_GREY_BITS = {"gray": 8, "gray9le": 9, "gray10le": 10, "gray12le": 12, "gray14le": 14, "gray16le": 16}


@dataclass(frozen=True, kw_only=True)
class DepthCoding:
    """How metres map to integer codes.

    Attributes:
        minimum: Depth of code 0, in metres.
        maximum: Depth of the largest code, in metres.
        shift: Added before the logarithm, in metres; it sets how fine near depths are resolved.
        logarithmic: True for log codes, False for linear ones.
        bits: Bits per code.
    """

    minimum: float = 0.01
    maximum: float = 10.0
    shift: float = 3.5
    logarithmic: bool = True
    bits: int = 12

    def __post_init__(self) -> None:
        """Refuse ranges that have no logarithm or no extent."""
        if not self.minimum < self.maximum or self.minimum + self.shift <= 0 or not 1 <= self.bits <= 16:
            msg = (
                "depth coding needs minimum < maximum, minimum + shift > 0 and 1 to 16 bits; got "
                f"{self.minimum}, {self.maximum}, {self.shift}, {self.bits}"
            )
            raise ValueError(msg)

    @property
    def levels(self) -> int:
        """Largest code."""
        return (1 << self.bits) - 1

    def decode(self, codes: NDArray[np.generic]) -> NDArray[np.float32]:
        """Return metres for integer codes of any shape."""
        table = self._table()
        return table[np.minimum(codes, self.levels).astype(np.int64)]

    def encode(self, metres: NDArray[np.generic]) -> NDArray[np.uint16]:
        """Return the nearest codes for metres; values outside the range are clamped, NaN becomes code 0."""
        depth = np.clip(
            np.nan_to_num(metres.astype(np.float64), nan=self.minimum), self.minimum, self.maximum
        )
        if self.logarithmic:
            low, high = math.log(self.minimum + self.shift), math.log(self.maximum + self.shift)
            unit = (np.log(depth + self.shift) - low) / (high - low)
        else:
            unit = (depth - self.minimum) / (self.maximum - self.minimum)
        return np.rint(unit * self.levels).astype(np.uint16)

    def _table(self) -> NDArray[np.float32]:
        unit = np.arange(self.levels + 1, dtype=np.float64) / self.levels
        if self.logarithmic:
            low, high = math.log(self.minimum + self.shift), math.log(self.maximum + self.shift)
            return (np.exp(unit * (high - low) + low) - self.shift).astype(np.float32)
        return (self.minimum + unit * (self.maximum - self.minimum)).astype(np.float32)


def depth_coding(feature: Feature, *, bits: int) -> DepthCoding:
    """Return the coding that a video feature's info declares; the defaults are LeRobot's."""
    known = DepthCoding()

    def number(name: str, default: float) -> float:
        for key in (f"video.{name}", name):
            value = feature.info.get(key)
            if isinstance(value, int | float):
                return float(value)
        return default

    return DepthCoding(
        minimum=number("depth_min", known.minimum),
        maximum=number("depth_max", known.maximum),
        shift=number("shift", known.shift),
        logarithmic=bool(number("use_log", float(known.logarithmic))),
        bits=bits,
    )


def depth_frame(
    frame: VideoFrame, feature: Feature, *, size: tuple[int, int] | None = None, unit: DepthUnit = "metres"
) -> NDArray[np.generic]:
    """Return a decoded depth frame as (height, width, 1), upright, without padding bytes.

    Args:
        frame: Frame of a grey format of 8 to 16 bits.
        feature: The declared feature, for its coding.
        size: (height, width) of the result, by nearest neighbour: depths are never mixed across an edge.
        unit: "metres" decodes the codes to float32; "raw" gives them as uint16.

    Raises:
        MediaError: The pixel format is not grey.
    """
    name = frame.format.name
    bits = _GREY_BITS.get(name)
    if bits is None:
        known = ", ".join(_GREY_BITS)
        msg = f"depth camera {feature.key!r} holds {name} frames; depth needs a grey format ({known})"
        raise MediaError(msg)
    codes = plane_array(frame, bits)
    turns = (int(frame.rotation) % 360) // 90
    codes = np.rot90(codes, turns) if turns else codes
    if size is not None:
        codes = nearest_resize(codes, size)
    if unit == "raw":
        return codes.astype(np.uint16)[..., None]
    return depth_coding(feature, bits=bits).decode(codes)[..., None]


def plane_array(frame: VideoFrame, bits: int) -> NDArray[np.generic]:
    """Return the first plane as (height, width), the alignment bytes at the end of each row left out."""
    plane = frame.planes[0]
    dtype = np.dtype(np.uint8) if bits <= 8 else np.dtype("<u2")
    rows = np.frombuffer(plane, dtype=np.uint8).reshape(-1, plane.line_size)[: plane.height]
    return np.ascontiguousarray(rows[:, : plane.width * dtype.itemsize]).view(dtype)


def stored_depth(values: NDArray[np.generic], feature: Feature, unit: DepthUnit) -> NDArray[np.generic]:
    """Return depth kept as pictures: as stored, or in metres.

    The unit comes from `info.depth_unit` ("m" or "mm"); without it floats are metres and integers
    millimetres.
    """
    if unit == "raw":
        return values
    declared = feature.info.get("depth_unit")
    if declared not in (None, "m", "mm"):
        msg = f"depth_unit of {feature.key!r} must be 'm' or 'mm', found {declared!r}"
        raise MediaError(msg)
    metres = declared == "m" or (declared is None and values.dtype.kind == "f")
    return (values.astype(np.float64) * (1.0 if metres else 1e-3)).astype(np.float32)


def nearest_resize(array: NDArray[np.generic], size: tuple[int, int]) -> NDArray[np.generic]:
    """Resize (height, width, ...) by nearest neighbour with pixel centres aligned."""
    height, width = array.shape[:2]
    rows = np.minimum(((np.arange(size[0]) + 0.5) * height / size[0]).astype(np.int64), height - 1)
    columns = np.minimum(((np.arange(size[1]) + 0.5) * width / size[1]).astype(np.int64), width - 1)
    return array[rows][:, columns]
