"""The packet table of an mp4 from its index alone, without reading a frame.

One pass over the packets reads the whole file; the sample tables in the `moov` box say the same in a few
kilobytes. Only plain files are taken: one sample description, at most one edit that starts at or after time
0 and covers everything, no fragments, no sample groups that move key frames, and every sample inside the
file. For all others the answer is None, and the pass over the packets decides.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

_MAX_INDEX = 256 << 20  # bytes of a moov box that are still read
_KEY_GROUPS = (b"rap ", b"sync", b"roll", b"prol")


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """Samples of the video track in decode order.

    Attributes:
        pts: (packets,) int64, presentation times in units of 1 / `timescale`, edit list applied.
        dts: (packets,) int64, decode times, edit list applied.
        key: (packets,) bool.
        timescale: Units per second.
        coding: Four-character code of the sample description, e.g. b"avc1".
    """

    pts: NDArray[np.int64]
    dts: NDArray[np.int64]
    key: NDArray[np.bool_]
    timescale: int
    coding: bytes


def read_samples(path: str, track_id: int | None) -> SampleTable | None:
    """Return the sample table of a video track, or None when the file is not plain enough.

    Args:
        path: The file.
        track_id: Number of the track in the file; None takes the only video track.

    Complexity: O(samples), reads the index of the file only.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a handle is needed
            size = file.seek(0, 2)
            moov = _find_moov(file, size)
            return None if moov is None else _from_moov(moov, size, track_id)
    except (struct.error, ValueError, IndexError, OSError):
        return None


def _find_moov(file: BinaryIO, size: int) -> bytes | None:
    """Return the content of the `moov` box; None for other files and for fragmented ones."""
    position, moov = 0, None
    while position + 8 <= size:
        file.seek(position)
        head = file.read(16)
        length, kind = struct.unpack(">I4s", head[:8])
        start = 8
        if length == 1:
            length, start = struct.unpack(">Q", head[8:16])[0], 16
        elif length == 0:
            length = size - position
        if length < start or (position == 0 and kind != b"ftyp"):
            return None
        if kind == b"moof":
            return None
        if kind == b"moov":
            if moov is not None or position + length > size or length > _MAX_INDEX:
                return None
            file.seek(position + start)
            moov = file.read(length - start)
        position += length
    return moov


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    position = 0
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        start = 8
        if length == 1:
            length, start = struct.unpack_from(">Q", data, position + 8)[0], 16
        elif length == 0:
            length = len(data) - position
        if length < start or position + length > len(data):
            msg = "box leaves its parent"
            raise ValueError(msg)
        yield kind, data[position + start : position + length]
        position += length


def _children(data: bytes) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = {}
    for kind, content in _boxes(data):
        found.setdefault(kind, []).append(content)
    return found


def _only(found: dict[bytes, list[bytes]], kind: bytes) -> bytes:
    boxes = found.get(kind, [])
    if len(boxes) != 1:
        msg = f"expected one {kind!r} box, found {len(boxes)}"
        raise ValueError(msg)
    return boxes[0]


def _from_moov(moov: bytes, size: int, track_id: int | None) -> SampleTable | None:
    movie = _children(moov)
    if b"mvex" in movie or b"cmov" in movie:
        return None
    movie_scale = _timescale(_only(movie, b"mvhd"))
    every = [_children(track) for track in movie.get(b"trak", [])]
    tracks = [t for t in every if _handler(t) == b"vide" and track_id in (None, _number(t))]
    if len(tracks) != 1:
        return None
    track = tracks[0]
    media = _children(_only(track, b"mdia"))
    scale = _timescale(_only(media, b"mdhd"))
    table = _children(_only(_children(_only(media, b"minf")), b"stbl"))
    if any(box[4:8] in _KEY_GROUPS for box in table.get(b"sbgp", [])) or b"stdp" in table:
        return None
    described = _only(table, b"stsd")
    if struct.unpack_from(">I", described, 4)[0] != 1:
        return None
    durations = _runs(_only(table, b"stts"), ">u4", size)
    count = len(durations)
    if not count or not _inside(table, count, size):
        return None
    dts = np.concatenate([[0], np.cumsum(durations[:-1])]).astype(np.int64)
    offsets = _runs(_only(table, b"ctts"), ">i4", size) if b"ctts" in table else np.zeros(count, np.int64)
    if len(offsets) != count:
        return None
    pts = dts + offsets
    shift = _edit_start(track, pts, int(durations[-1]), movie_scale, scale)
    if shift is None:
        return None
    key = np.ones(count, np.bool_)
    if b"stss" in table:
        key[:] = False
        numbers = np.frombuffer(_only(table, b"stss")[8:], ">u4").astype(np.int64) - 1
        key[numbers] = True
    return SampleTable(pts=pts - shift, dts=dts - shift, key=key, timescale=scale, coding=described[12:16])


def _handler(track: dict[bytes, list[bytes]]) -> bytes:
    return _only(_children(_only(track, b"mdia")), b"hdlr")[8:12]


def _number(track: dict[bytes, list[bytes]]) -> int:
    header = _only(track, b"tkhd")
    return int(struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)[0])


def _timescale(header: bytes) -> int:
    """Return the units per second of an `mvhd` or `mdhd` box."""
    return int(struct.unpack_from(">I", header, 20 if header[0] == 1 else 12)[0])


def _runs(box: bytes, kind: str, limit: int) -> NDArray[np.int64]:
    """Expand a table of (count, value) pairs; a damaged count must not ask for more than `limit` values."""
    pairs = np.frombuffer(box[8:], ">u4").reshape(-1, 2)[: struct.unpack_from(">I", box, 4)[0]]
    if int(pairs[:, 0].astype(np.int64).sum()) > limit:
        msg = "more samples than bytes in the file"
        raise ValueError(msg)
    return np.repeat(pairs[:, 1].astype(">u4").view(kind).astype(np.int64), pairs[:, 0].astype(np.int64))


def _edit_start(
    track: dict[bytes, list[bytes]], pts: NDArray[np.int64], last: int, movie_scale: int, scale: int
) -> int | None:
    """Return the media time the only edit starts at; None when edits drop or move anything."""
    if b"edts" not in track:
        return 0
    box = _only(_children(_only(track, b"edts")), b"elst")
    if struct.unpack_from(">I", box, 4)[0] != 1:
        return None
    duration, start, rate, _ = struct.unpack_from(">QqhH" if box[0] == 1 else ">IihH", box, 8)
    # The duration is rounded to the movie's coarser clock, so one of its units is forgiven.
    end = start + (duration + 1) * scale / movie_scale
    if rate != 1 or start < 0 or start != int(pts.min()) or end < int(pts.max()) + last:
        return None
    return int(start)


def _inside(table: dict[bytes, list[bytes]], count: int, size: int) -> bool:
    """Return whether every sample lies inside the file: a truncated file has an index of more."""
    sizes_box = _only(table, b"stsz")
    uniform, total = struct.unpack_from(">II", sizes_box, 4)
    if total != count:
        return False
    sizes = (
        np.full(total, uniform, np.int64)
        if uniform
        else np.frombuffer(sizes_box[12:], ">u4").astype(np.int64)
    )
    wide = b"co64" in table
    chunks = np.frombuffer(_only(table, b"co64" if wide else b"stco")[8:], ">u8" if wide else ">u4").astype(
        np.int64
    )
    runs = np.frombuffer(_only(table, b"stsc")[8:], ">u4").reshape(-1, 3).astype(np.int64)
    if len(sizes) != count or not len(runs) or not (sizes > 0).all():
        return False
    spans = np.diff(np.append(runs[:, 0], len(chunks) + 1))
    if (spans <= 0).any() or int(spans.sum()) != len(chunks):
        return False
    per_chunk = np.repeat(runs[:, 1], spans)
    if len(per_chunk) != len(chunks) or int(per_chunk.sum()) != count:
        return False
    after = np.cumsum(per_chunk)
    totals = np.concatenate([[0], np.cumsum(sizes)])
    ends = chunks + totals[after] - totals[after - per_chunk]
    return bool((ends <= size).all())
