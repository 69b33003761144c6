"""The frame cache: exact, bounded, shared by processes, and never trusted blindly."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass

import numpy as np
import pytest
from loongforge_data._core import checksum
from loongforge_data.cache import CacheConfig, FrameCache


@dataclass
class Layout:
    frames: int | None = None
    height: int = 8
    width: int = 10
    channels: int = 3
    size: tuple[int, int] | None = None
    crop: tuple[int, int, int, int] | None = None


@pytest.fixture
def videos(tmp_path):
    paths = []
    for number in range(4):
        path = tmp_path / f"video-{number}.mp4"
        path.write_bytes(bytes([number]) * 100)
        paths.append(str(path))
    return paths


def picture(value):
    return memoryview(np.full(240, value, np.uint8)).cast("B")


def put(cache, path, index, value, count=10, layout=None):
    with cache.open(path, layout or Layout()) as frames:
        frames.write(index, picture(value), count=count)


def get(cache, path, index, layout=None):
    target = np.zeros(240, np.uint8)
    with cache.open(path, layout or Layout()) as frames:
        return target if frames.read_into(index, memoryview(target)) else None


def test_frames_come_back_per_file_index_transform_and_data_set(tmp_path, videos):
    config = CacheConfig(directory=str(tmp_path / "cache"), fingerprint="a")
    cache = FrameCache(config)
    put(cache, videos[0], 3, 7)
    assert (get(FrameCache(config), videos[0], 3) == 7).all()
    assert get(cache, videos[0], 2) is None
    assert get(cache, videos[1], 3) is None
    assert get(cache, videos[0], 3, Layout(crop=(0, 0, 4, 4))) is None
    other = FrameCache(CacheConfig(directory=config.directory, fingerprint="b"))
    assert get(other, videos[0], 3) is None


def test_a_changed_video_file_is_another_file(tmp_path, videos):
    cache = FrameCache(CacheConfig(directory=str(tmp_path / "cache")))
    put(cache, videos[0], 0, 5)
    with open(videos[0], "ab") as file:  # noqa: PTH123
        file.write(b"more")
    assert get(cache, videos[0], 0) is None


def test_damaged_and_torn_frames_count_as_absent_and_can_be_written_again(tmp_path, videos):
    cache = FrameCache(CacheConfig(directory=str(tmp_path / "cache")))
    put(cache, videos[0], 0, 5)
    (pixels,) = (tmp_path / "cache").glob("*/*.pixels")
    raw = bytearray(pixels.read_bytes())
    raw[17] ^= 1
    pixels.write_bytes(raw)
    assert get(cache, videos[0], 0) is None
    put(cache, videos[0], 0, 5)
    assert (get(cache, videos[0], 0) == 5).all()
    pixels.write_bytes(b"")
    assert get(cache, videos[0], 0) is None


def test_size_is_bounded_and_the_least_recently_used_file_goes(tmp_path, videos):
    limit = 1 << 20
    cache = FrameCache(CacheConfig(directory=str(tmp_path / "cache"), max_bytes=limit))
    count = limit // 240 // 2 - 10
    for number, path in enumerate(videos):
        put(cache, path, 1, number, count=count)
        size = sum(p.stat().st_size for p in (tmp_path / "cache").glob("*/*.pixels"))
        assert size <= limit
    assert get(cache, videos[0], 1) is None
    assert (get(cache, videos[3], 1) == 3).all()


def test_file_larger_than_the_bound_is_not_cached(tmp_path, videos):
    cache = FrameCache(CacheConfig(directory=str(tmp_path / "cache"), max_bytes=1 << 20))
    put(cache, videos[0], 0, 1, count=1 << 20)
    assert get(cache, videos[0], 0) is None


def _write_many(directory, path, start):
    cache = FrameCache(CacheConfig(directory=directory))
    for index in range(200):
        put(cache, path, (index + start) % 200, (index + start) % 200, count=200)


def test_several_processes_write_the_same_file(tmp_path, videos):
    directory = str(tmp_path / "cache")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_many, args=(directory, videos[0], s)) for s in (0, 50, 150)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    cache = FrameCache(CacheConfig(directory=directory))
    for index in range(200):
        assert (get(cache, videos[0], index) == index).all()


def test_bad_limits_are_named_and_checksums_are_never_zero(tmp_path):
    with pytest.raises(ValueError, match="max_bytes"):
        CacheConfig(directory=str(tmp_path), max_bytes=5)
    assert checksum(b"") > 0
    assert checksum(bytes(100)) != checksum(bytes(101))
