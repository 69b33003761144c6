"""Material for the tests: shared real data where it is there, and small clips made on the spot."""

import hashlib
import os
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

os.environ.setdefault("SVT_LOG", "1")


def _find_shared() -> Path | None:
    named = os.environ.get("LOONGFORGE_TEST_DATA")
    if named:
        return Path(named)
    for parent in Path(__file__).resolve().parents:
        candidate = parent / "shared" / "data"
        if candidate.is_dir():
            return candidate
    return None


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Directory of the shared sample data; the test is skipped where it is absent."""
    found = _find_shared()
    if found is None or not found.is_dir():
        pytest.skip("shared sample data not found; set LOONGFORGE_TEST_DATA")
    return found


def grey_picture(number: int, height: int = 48, width: int = 64) -> np.ndarray:
    """A picture that says its number: 10 black or white blocks in a row, over a moving gradient."""
    picture = np.empty((height, width, 3), np.uint8)
    picture[...] = (np.arange(width) * 2 + number * 5)[None, :, None] % 200
    block = width // 10
    for bit in range(10):
        picture[: height // 2, bit * block : (bit + 1) * block] = 235 if number >> bit & 1 else 16
    return picture


def picture_number(picture: np.ndarray) -> int:
    """Read the number `grey_picture` painted."""
    height, width = picture.shape[:2]
    block = width // 10
    number = 0
    for bit in range(10):
        cell = picture[1 : height // 2 - 1, bit * block + 1 : (bit + 1) * block - 1]
        number |= int(cell.mean() > 126) << bit
    return number


def write_clip(
    path: Path,
    *,
    frames: int = 30,
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    size: tuple[int, int] = (48, 64),
    pixel_format: str = "yuv420p",
    pts: Sequence[int] | None = None,
    time_base: Fraction = Fraction(1, 30),
    container_options: dict[str, str] | None = None,
    gop: int = 12,
    pictures: Sequence[np.ndarray] | None = None,
    prepare: Callable[[object], None] | None = None,
) -> Path:
    """Encode numbered pictures; `pts` sets the time stamps, in units of `time_base`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    container = av.open(str(path), "w", options=container_options or {})
    try:
        stream = container.add_stream(codec, rate=Fraction(30))
        stream.height, stream.width, stream.pix_fmt = *size, pixel_format
        stream.time_base = time_base
        stream.codec_context.time_base = time_base
        stream.codec_context.gop_size = gop
        stream.codec_context.thread_count = 1
        if options:
            stream.codec_context.options = options
        if prepare is not None:
            prepare(stream)
        for number in range(frames):
            picture = pictures[number] if pictures is not None else grey_picture(number, *size)
            kind = "rgb24" if picture.ndim == 3 else pixel_format
            frame = av.VideoFrame.from_ndarray(picture, format=kind)
            if kind != pixel_format:
                frame = frame.reformat(format=pixel_format, threads=1)
            frame.pts = number if pts is None else pts[number]
            frame.time_base = time_base
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    finally:
        container.close()
    return path


def sequential(path: Path, thread_count: int = 1) -> list[tuple[int | None, str]]:
    """(pts, digest of the decoded planes) of a plain sequential decode: the oracle."""
    container = av.open(str(path))
    try:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = thread_count
        return [(frame.pts, digest(frame)) for frame in container.decode(stream)]
    finally:
        container.close()


def digest(frame: av.VideoFrame) -> str:
    """Digest of the visible bytes of all planes."""
    total = hashlib.blake2b(digest_size=16)
    total.update(f"{frame.format.name} {frame.width} {frame.height}".encode())
    for plane in frame.planes:
        rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[: plane.height]
        used = plane.line_size if plane.width >= plane.line_size else plane.width * _bytes(frame)
        total.update(np.ascontiguousarray(rows[:, : min(used, plane.line_size)]).tobytes())
    return total.hexdigest()


def _bytes(frame: av.VideoFrame) -> int:
    return (max(component.bits for component in frame.format.components) + 7) // 8


class ClipTools:
    """The functions above as one fixture, so that test files need no import of each other."""

    picture = staticmethod(grey_picture)
    number = staticmethod(picture_number)
    write = staticmethod(write_clip)
    sequential = staticmethod(sequential)
    digest = staticmethod(digest)


@pytest.fixture(scope="session")
def clips() -> type[ClipTools]:
    """Tools to write and check small clips."""
    return ClipTools
