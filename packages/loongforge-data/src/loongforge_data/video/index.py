"""The frame table of a video file: which packet holds which frame, and where decoding has to start.

The table comes from the index of an mp4 or from one pass over the packets (no decoding): presentation times
sorted into display order, the decode position of each frame, and the key packet from which it can be
decoded. Files whose packets carry no presentation times are decoded once to learn the order; their times are
then made from order and rate and marked as estimated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loongforge_data.errors import VideoError

Rule = Literal["nearest", "played"]
"""How a time picks a frame: `nearest` pts, or the frame `played` at that time (last pts <= t)."""


@dataclass(frozen=True, kw_only=True)
class VideoIndex:
    """Frame table of one video stream.

    "Display index" counts frames in the order of presentation from 0; "decode position" counts the packets of
    the stream in file order from 0.

    Attributes:
        path: The file.
        pts: (frames,) int64, presentation time of each display index in units of `time_base`.
        order: (frames,) int32, decode position of each display index.
        display: (packets,) int32, display index of each packet; -1 for packets without a picture.
        keys: (key packets,) int32, decode positions of key packets.
        start: (frames,) int32, decode position of the key packet to start from; -1 when there is none.
        seek: (packets,) int64, time stamp to seek with for each packet (dts, or pts where dts is unset).
        stamps: (packets,) int64, what identifies a packet after a seek: pts, or dts when pts is unset.
        time_base: Seconds per unit of `pts`.
        rate: Frames per second the container declares; 0 when it declares none.
        declared_frames: Frame count in the container header; 0 when unset.
        width: Coded width in pixels, before rotation.
        height: Coded height in pixels, before rotation.
        codec: Name of the coded format, e.g. "h264", "av1".
        pixel_format: Name of the decoder's pixel format, e.g. "yuv420p".
        color_range: FFmpeg number: 0 unset, 1 limited, 2 full.
        color_space: FFmpeg number of the matrix: 1 BT.709, 5/6 BT.601, 9/10 BT.2020, 2 unset.
        estimated: True when times were made from order and rate because packets carry none.
        seekable: True when a packet found after a seek can be told apart from all others.
        problem: Why the pass over the packets ended early, or None.
    """

    path: str
    pts: NDArray[np.int64]
    order: NDArray[np.int32]
    display: NDArray[np.int32]
    keys: NDArray[np.int32]
    start: NDArray[np.int32]
    seek: NDArray[np.int64]
    stamps: NDArray[np.int64]
    time_base: Fraction
    rate: Fraction
    declared_frames: int
    width: int
    height: int
    codec: str
    pixel_format: str
    color_range: int
    color_space: int
    estimated: bool
    seekable: bool
    problem: str | None

    def __len__(self) -> int:
        """Number of frames."""
        return len(self.pts)

    @property
    def nbytes(self) -> int:
        """Memory held by the arrays, in bytes."""
        arrays = (self.pts, self.order, self.display, self.keys, self.start, self.seek, self.stamps)
        return sum(array.nbytes for array in arrays)

    @property
    def times(self) -> NDArray[np.float64]:
        """(frames,) float64, seconds since the first frame: the start offset of the stream is taken off."""
        if not len(self.pts):
            return np.zeros(0, np.float64)
        return (self.pts - self.pts[0]).astype(np.float64) * float(self.time_base)

    @property
    def first_decodable(self) -> int:
        """Display index of the first frame that has a picture (0 unless the first key frame is lost)."""
        found = np.flatnonzero(self.start >= 0)
        return int(found[0]) if len(found) else len(self.pts)

    @property
    def variable_rate(self) -> bool:
        """True when frame distances differ by more than the rounding of one time-base unit."""
        if len(self.pts) < 3:
            return False
        steps = np.diff(self.pts)
        return bool(int(steps.max()) - int(steps.min()) > 1)

    def gop(self, index: int) -> tuple[int, int]:
        """Return the range [first, last) of decode positions of the GOP that holds a frame."""
        first = int(self.start[index])
        after = int(np.searchsorted(self.keys, first, side="right"))
        last = int(self.keys[after]) if after < len(self.keys) else len(self.display)
        return max(first, 0), last

    def at(self, seconds: float, *, rule: Rule = "nearest", tolerance: float | None = None) -> int:
        """Return the display index of the frame at a time, by the real pts table.

        Args:
            seconds: Time since the first frame, in seconds.
            rule: `nearest` takes the frame whose pts is closest (the earlier one of two equally close ones);
                `played` takes the last frame with pts <= time.
            tolerance: Largest allowed distance in seconds, inclusive; float32 noise in `seconds` is forgiven.
                None means no limit.

        Raises:
            VideoError: The file has no frames, or the distance exceeds the tolerance.
        """
        times = self.times
        if not len(times):
            msg = "no frame can be found by time: the file has no frames"
            raise VideoError(msg, path=self.path)
        # A stamp that went through float32 is off by up to 2**-24 of its value; the boundary is inclusive.
        noise = abs(seconds) * 2.0**-23 + 1e-9
        if rule == "played":
            index = int(np.searchsorted(times, seconds + noise, side="right")) - 1
            index = max(index, 0)
        elif rule == "nearest":
            right = int(np.searchsorted(times, seconds, side="left"))
            candidates = [i for i in (right - 1, right) if 0 <= i < len(times)]
            index = min(candidates, key=lambda i: (abs(float(times[i]) - seconds), i))
        else:
            msg = f"rule must be 'nearest' or 'played', got {rule!r}"
            raise ValueError(msg)
        distance = abs(float(times[index]) - seconds)
        if tolerance is not None and distance > tolerance + noise:
            msg_0 = (
                f"no frame within {tolerance:g} s of {seconds:.6f} s: the closest one, frame {index}, "
                f"is at {float(times[index]):.6f} s; use a larger tolerance or frame indices"
            )
            raise VideoError(
                msg_0,
                path=self.path,
            )
        return index


UNSET = np.iinfo(np.int64).min
"""Stands for a time stamp a packet does not have."""


@dataclass(frozen=True, kw_only=True)
class PacketTable:
    """Packets of a stream in file order.

    Attributes:
        pts: (packets,) int64 presentation times; `UNSET` where there is none.
        dts: (packets,) int64 decode times; `UNSET` where there is none.
        key: (packets,) bool, True where decoding can start.
        picture: (packets,) bool, False for packets that are never shown.
        problem: Why the list ends early, or None.
    """

    pts: NDArray[np.int64]
    dts: NDArray[np.int64]
    key: NDArray[np.bool_]
    picture: NDArray[np.bool_]
    problem: str | None = None

    def __len__(self) -> int:
        return len(self.pts)


@dataclass(frozen=True, kw_only=True)
class PacketOrder:
    """Display order worked out from packets."""

    pts: NDArray[np.int64]
    order: NDArray[np.int32]
    display: NDArray[np.int32]
    keys: NDArray[np.int32]
    start: NDArray[np.int32]
    seek: NDArray[np.int64]
    stamps: NDArray[np.int64]
    seekable: bool


def order_packets(packets: PacketTable, emitted: Sequence[int] | None = None) -> PacketOrder:
    """Sort packets into display order and find the key packet each frame starts from.

    Args:
        packets: Packets in file order.
        emitted: Decode positions in the order the decoder put the frames out, for streams whose pts are
            missing or occur twice; None sorts by pts.

    Complexity: O(n log n).
    """
    count = len(packets)
    if emitted is None:
        shown = np.flatnonzero(packets.picture).astype(np.int32)
        stamps = packets.pts
        order = shown[np.argsort(stamps[shown], kind="stable")]
        pts = stamps[order]
    else:
        order = np.array(emitted, np.int32)
        timed = not (packets.pts == UNSET).any()
        pts = packets.pts[order] if timed else np.arange(len(order), dtype=np.int64)
        stamps = packets.pts if timed else packets.dts
    display = np.full(count, -1, np.int32)
    display[order] = np.arange(len(order), dtype=np.int32)
    keys = np.flatnonzero(packets.key).astype(np.int32)
    seek = np.where(packets.dts != UNSET, packets.dts, np.where(packets.pts != UNSET, packets.pts, 0))
    return PacketOrder(
        pts=pts,
        order=order,
        display=display,
        keys=keys,
        start=_starts(display, order, keys),
        seek=seek,
        stamps=stamps,
        seekable=count > 0 and len(np.unique(stamps)) == count and not (stamps == UNSET).any(),
    )


def _starts(
    display: NDArray[np.int32], order: NDArray[np.int32], keys: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Return for each display index the last key packet shown at or before it and decoded at or before it.

    Frames that are decoded after a key packet but shown before it (leading pictures of an open GOP) need the
    key packet before that one, so the comparison is in display order.
    """
    shown = keys[display[keys] >= 0]
    shown = shown[np.argsort(display[shown], kind="stable")]
    slot = np.searchsorted(display[shown], np.arange(len(order)), side="right") - 1
    start = np.where(slot >= 0, shown[np.maximum(slot, 0)] if len(shown) else -1, -1).astype(np.int32)
    for index in np.flatnonzero(start > order):
        before = shown[: slot[index]]
        before = before[before <= order[index]]
        start[index] = before[-1] if len(before) else -1
    return start
