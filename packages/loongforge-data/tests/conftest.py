"""Material for the tests: shared real data where it is there, and small clips made on the spot."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loongforge_data.formats.upgrade import convert_to_v30
from loongforge_data.synthetic import read_code, write_dataset

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


class SetTools:
    """Small data sets with painted frames, and what tests change about them, as one fixture."""

    FRONT = "observation.images.front"
    LENGTHS: ClassVar = [7, 13, 1, 29, 31]
    LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 12345\n"

    @staticmethod
    def assert_painted(dataset, rows=None):
        """Every sample shows its own episode and frame on every camera."""
        for i in range(len(dataset)) if rows is None else rows:
            sample = dataset[i]
            for camera in dataset.cameras:
                picture = sample[camera] if sample[camera].ndim == 3 else sample[camera][0]
                got = read_code(picture)
                assert got == (int(sample["episode_index"]), int(sample["frame_index"])), (i, camera)

    @staticmethod
    def edit_json(path, **changes):
        data = json.loads(path.read_text())
        data.update(changes)
        path.write_text(json.dumps(data))

    @staticmethod
    def edit_table(path, change):
        pq.write_table(change(pq.read_table(path)), path)

    @staticmethod
    def set_column(table, name, values):
        column = pa.array(values) if not isinstance(values, pa.Array) else values
        return table.set_column(table.column_names.index(name), name, column)

    @staticmethod
    def episode_table(v30):
        return v30 / "meta/episodes/chunk-000/file-000.parquet"

    @staticmethod
    def parquet(v21, episode):
        return v21 / f"data/chunk-000/episode_{episode:06d}.parquet"

    @staticmethod
    def video(v21, episode, camera=FRONT):
        return v21 / f"videos/chunk-000/{camera}/episode_{episode:06d}.mp4"

    @staticmethod
    def picture_set(root, lengths):
        """A v2.1 set whose pictures are PNG bytes in the table."""
        import io

        from loongforge_data.synthetic import render, simulate
        from PIL import Image

        write_dataset(root, episodes=len(lengths), frames=lengths, cameras=0)
        info = json.loads((root / "meta/info.json").read_text())
        info["features"]["observation.images.eye"] = {
            "dtype": "image",
            "shape": [64, 64, 3],
            "names": ["height", "width", "channels"],
        }
        (root / "meta/info.json").write_text(json.dumps(info))
        for episode, length in enumerate(lengths):
            track = simulate(0, episode, length)
            cells = []
            for t in range(length):
                data = io.BytesIO()
                Image.fromarray(render(track, t, camera=0, size=(64, 64), episode=episode)).save(data, "PNG")
                cells.append({"bytes": data.getvalue(), "path": f"frame_{t:06d}.png"})
            column = pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
            SetTools.edit_table(
                SetTools.parquet(root, episode),
                lambda t, c=column: t.append_column("observation.images.eye", c),
            )
        return root


@pytest.fixture(scope="session")
def sets() -> type[SetTools]:
    """Tools to make and change small data sets."""
    return SetTools


@pytest.fixture(scope="session")
def v21_source(tmp_path_factory):
    root = tmp_path_factory.mktemp("base") / "v21"
    return write_dataset(root, episodes=5, frames=SetTools.LENGTHS, cameras=2, size=(64, 64), gop=4)


@pytest.fixture(scope="session")
def v30_source(tmp_path_factory, v21_source):
    root = tmp_path_factory.mktemp("base") / "v30"
    convert_to_v30(v21_source, root, video_file_mb=0.02)
    return root


@pytest.fixture
def v21(tmp_path, v21_source):
    return Path(shutil.copytree(v21_source, tmp_path / "v21"))


@pytest.fixture
def v30(tmp_path, v30_source):
    return Path(shutil.copytree(v30_source, tmp_path / "v30"))
