"""Join video files by copying their packets: no frame is decoded or encoded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np

from loongforge_data.errors import VideoError
from loongforge_data.video.index import VideoIndex
from loongforge_data.video.probe import open_container, video_index, video_stream

if TYPE_CHECKING:
    from av.container import OutputContainer
    from av.video.stream import VideoStream


@dataclass(frozen=True, kw_only=True)
class StreamKind:
    """What two files must share so that their packets can follow each other in one stream."""

    codec: str
    width: int
    height: int
    pixel_format: str
    time_base: Fraction
    extradata: bytes


def stream_kind(path: str | Path) -> StreamKind:
    """Return the properties that decide whether files can be joined."""
    container = open_container(str(path))
    try:
        stream = video_stream(container, str(path))
        codec = stream.codec_context
        return StreamKind(
            codec=codec.name,
            width=codec.width,
            height=codec.height,
            pixel_format=str(codec.pix_fmt),
            time_base=Fraction(stream.time_base or 0),
            extradata=bytes(codec.extradata or b""),
        )
    finally:
        container.close()


def join_videos(sources: Sequence[str | Path], target: str | Path, *, fps: Fraction) -> list[int]:
    """Write the packets of several files into one, each file starting on the whole frame where it belongs.

    A file's first frame is placed at (frames before it) / fps exactly; the distances inside a file are kept.
    Decode times are made anew from the presentation times, so that they always grow: files with and without
    B-frames can follow each other.

    Args:
        sources: Files to join, in order; all of one `StreamKind`.
        target: File to write (mp4 by its name).
        fps: Frames per second of the data set.

    Returns:
        Number of frames of each source.

    Raises:
        VideoError: A source cannot be read, has no time stamps, does not start with a key frame, or is of
            another kind than the first.
    """
    indices = [_joinable(path) for path in sources]
    kinds = [stream_kind(path) for path in sources]
    for path, kind in zip(sources, kinds, strict=True):
        if kind != kinds[0]:
            msg = f"files of different kind cannot share one stream: {_difference(kinds[0], kind)}"
            raise VideoError(msg, path=path)
    base = kinds[0].time_base
    stamps = _stamps(indices, base, fps)
    decode_times = _decode_times(indices, stamps, base, fps)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    output = av.open(str(target), "w")
    try:
        stream: VideoStream | None = None
        for number, path in enumerate(sources):
            stream = _copy(str(path), output, stream, stamps[number], decode_times[number], base)
    finally:
        output.close()
    return [len(index) for index in indices]


def _joinable(path: str | Path) -> VideoIndex:
    index = video_index(path)
    if index.problem is not None or index.estimated or index.first_decodable != 0:
        reason = index.problem or (
            "packets carry no time stamps" if index.estimated else "the first frame is not a key frame"
        )
        msg = f"video cannot be copied into a joined file: {reason}"
        raise VideoError(msg, path=path)
    return index


def _difference(first: StreamKind, other: StreamKind) -> str:
    pairs = [
        f"{name} {getattr(first, name)!r} and {getattr(other, name)!r}"
        for name in ("codec", "width", "height", "pixel_format", "time_base")
        if getattr(first, name) != getattr(other, name)
    ]
    return ", ".join(pairs) or "codec parameters (extradata)"


def _stamps(indices: Sequence[VideoIndex], base: Fraction, fps: Fraction) -> list[list[int]]:
    """Return new pts per source and packet; packets without a picture get the time of their neighbour."""
    result: list[list[int]] = []
    before = 0
    for index in indices:
        offset = round(Fraction(before) / fps / base)
        by_packet = index.stamps - index.pts[0] + offset
        result.append([int(value) for value in by_packet])
        before += len(index)
    return result


def _decode_times(
    indices: Sequence[VideoIndex], stamps: Sequence[Sequence[int]], base: Fraction, fps: Fraction
) -> list[list[int]]:
    """Return growing dts: the n-th packet gets the (n - delay)-th smallest pts of the joined stream."""
    flat = np.array([value for part in stamps for value in part], np.int64)
    ordered = np.sort(flat)
    step = max(round(1 / fps / base), 1)
    # The delay is how far a frame is shown ahead of its turn in decode order.
    rank = np.empty(len(flat), np.int64)
    rank[np.argsort(flat, kind="stable")] = np.arange(len(flat))
    delay = max(int((np.arange(len(flat)) - rank).max()), 0)
    lead = ordered[0] - step * np.arange(delay, 0, -1)
    dts = np.concatenate([lead, ordered])[: len(flat)]
    result, first = [], 0
    for index in indices:
        count = len(index.display)
        result.append([int(value) for value in dts[first : first + count]])
        first += count
    return result


def _copy(
    path: str,
    output: OutputContainer,
    stream: VideoStream | None,
    stamps: Sequence[int],
    decode_times: Sequence[int],
    base: Fraction,
) -> VideoStream:
    source = open_container(path)
    try:
        origin = video_stream(source, path)
        if stream is None:
            stream = output.add_stream_from_template(origin, opaque=True)
            stream.time_base = base
        position = 0
        for packet in source.demux(origin):
            if packet.size == 0:
                continue
            packet.stream = stream
            packet.time_base = base
            packet.pts = stamps[position]
            packet.dts = decode_times[position]
            output.mux(packet)
            position += 1
        return stream
    finally:
        source.close()
