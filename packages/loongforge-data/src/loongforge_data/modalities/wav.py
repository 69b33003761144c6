"""WAV files (RIFF, RIFX, RF64) read to the sample, also those whose headers lie."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from loongforge_data.errors import AudioError

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_UNKNOWN_SIZE = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class WavFormat:
    """Content of the `fmt ` chunk.

    Attributes:
        code: 1 PCM, 3 float, others are compressed and left to FFmpeg.
        channels: Number of channels.
        rate: Samples per second and channel.
        width: Bytes per sample; fewer valid bits are left-justified in them.
        big_endian: True for RIFX.
    """

    code: int
    channels: int
    rate: int
    width: int
    big_endian: bool


@dataclass(frozen=True, kw_only=True)
class WavAudio:
    """Samples and what was odd about the file.

    Attributes:
        samples: (channels, samples) float32, integers scaled to [-1, 1).
        rate: Samples per second.
        notes: Remarks such as a data size larger than the file.
    """

    samples: NDArray[np.float32]
    rate: int
    notes: tuple[str, ...]


def is_wav(path: str | Path) -> bool:
    """Return whether a file begins like a WAV file of any byte order."""
    with Path(path).open("rb") as file:
        head = file.read(12)
    return head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:12] == b"WAVE"


def read_wav(path: str | Path) -> WavAudio | None:
    """Read a WAV file; None when its samples are compressed and FFmpeg has to read them.

    Only the data chunk becomes sound; other chunks, before and after it, are passed over with their pad byte.
    A data size beyond the end of the file (or the 0 and 0xFFFFFFFF of unfinished writers) is cut to the bytes
    that are there, and noted.

    Raises:
        AudioError: No format, no data, an impossible format, or no sample at all.
    """
    notes: list[str] = []
    with Path(path).open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        big = file.read(4) == b"RIFX"
        file.seek(12)
        layout: WavFormat | None = None
        real_size: int | None = None
        while True:
            head = file.read(8)
            if len(head) < 8:
                break
            name, length = head[:4], struct.unpack(">I" if big else "<I", head[4:])[0]
            start = file.tell()
            if name == b"ds64" and length >= 16:
                real_size = struct.unpack("<Q", file.read(16)[8:])[0]
            elif name == b"fmt ":
                layout = _format(file.read(min(length, 40)), big, path)
            elif name == b"data":
                if layout is None:
                    msg = "WAV file has its data before its format"
                    raise AudioError(msg, path=path)
                if layout.code not in (_PCM, _FLOAT):
                    return None
                count = _data_size(length, real_size, size - start, notes)
                return _samples(file, layout, count, notes, path)
            file.seek(start + length + (length & 1))
    what = "has no data chunk" if layout else "has no format chunk"
    msg = f"WAV file {what}: it is unfinished or damaged"
    raise AudioError(msg, path=path)


def _format(data: bytes, big: bool, path: str | Path) -> WavFormat:  # noqa: FBT001 - private
    if len(data) < 16:
        msg = f"format chunk has {len(data)} bytes, at least 16 are needed"
        raise AudioError(msg, path=path)
    order = ">" if big else "<"
    code, channels, rate, _, block, _ = struct.unpack(order + "HHIIHH", data[:16])
    if code == _EXTENSIBLE and len(data) >= 28:
        # The sub-format is a GUID; big-endian writers differ in the byte order of its first field.
        fields = struct.unpack("<I", data[24:28]) + struct.unpack(">I", data[24:28])
        code = next((field for field in fields if field < 256), code)
    if code not in (_PCM, _FLOAT):
        return WavFormat(code=code, channels=channels, rate=rate, width=0, big_endian=big)
    width = block // channels if channels else 0
    if not channels or not rate or block % channels or not 1 <= width <= 8:
        msg = f"impossible WAV format: {channels} channels at {rate} Hz in blocks of {block} bytes"
        raise AudioError(msg, path=path)
    if code == _FLOAT and width not in (4, 8):
        msg = f"float WAV needs 4 or 8 bytes per sample, found {width}"
        raise AudioError(msg, path=path)
    return WavFormat(code=code, channels=channels, rate=rate, width=width, big_endian=big)


def _data_size(length: int, real: int | None, there: int, notes: list[str]) -> int:
    claimed = real if real is not None and length == _UNKNOWN_SIZE else length
    if claimed in (0, _UNKNOWN_SIZE) and there:
        notes.append(
            f"data size {claimed:#x} is a placeholder of an unfinished writer; {there} bytes are there"
        )
        return there
    if claimed > there:
        notes.append(f"header claims {claimed} bytes of data, {there} are there")
        return there
    return claimed


def _samples(file: BinaryIO, layout: WavFormat, count: int, notes: list[str], path: str | Path) -> WavAudio:
    block = layout.width * layout.channels
    data = file.read(count - count % block)
    if count % block:
        notes.append(f"{count % block} bytes at the end do not make a whole block of {block}")
    if not data:
        msg = "WAV file holds no samples"
        raise AudioError(msg, path=path)
    values = _decode(np.frombuffer(data, np.uint8), layout)
    samples = np.ascontiguousarray(values.reshape(-1, layout.channels).T)
    return WavAudio(samples=samples, rate=layout.rate, notes=tuple(notes))


def _decode(raw: NDArray[np.uint8], layout: WavFormat) -> NDArray[np.float32]:
    width = layout.width
    order = ">" if layout.big_endian else "<"
    if layout.code == _FLOAT:
        return raw.view(f"{order}f{width}").astype(np.float32)
    if width == 1:
        return (raw.astype(np.float32) - 128.0) / 128.0
    if width in (2, 4, 8):
        values = raw.view(f"{order}i{width}").astype(np.float64)
        return (values / float(1 << (8 * width - 1))).astype(np.float32)
    # Odd widths: put the bytes at the top of the next wider integer; the sign comes along.
    wide = 4 if width < 4 else 8
    padded = np.zeros((len(raw) // width, wide), np.uint8)
    body = raw.reshape(-1, width)
    padded[:, wide - width :] = body[:, ::-1] if layout.big_endian else body
    values = padded.reshape(-1).view(f"<i{wide}").astype(np.float64)
    return (values / float(1 << (8 * wide - 1))).astype(np.float32)
