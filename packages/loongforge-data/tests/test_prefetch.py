"""L0: byte ranges of waiting jobs, files read by range, and truncation under a reader."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loongforge_data._core import Ring
from loongforge_data.dataset import open_dataset
from loongforge_data.errors import DataError
from loongforge_data.loader import ADFEDataLoader
from loongforge_data.prefetch import (
    ByteRange,
    FsspecSource,
    LocalSource,
    RangeFile,
    ReadAhead,
    frame_ranges,
    merge_ranges,
    packet_table,
    request,
)
from loongforge_data.synthetic import write_dataset
from loongforge_data.video import video_index
from loongforge_data.workers.jobs import DecodeJob, encode


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = tmp_path_factory.mktemp("l0") / "set"
    write_dataset(path, episodes=2, frames=24, cameras=1, size=(64, 96), codec="h264", gop=6, version="3.0")
    return path


@pytest.fixture(scope="module")
def video(root):
    return str(next(root.glob("videos/**/*.mp4")))


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 60)), max_size=30), st.integers(0, 20))
def test_merged_ranges_cover_the_same_bytes_and_keep_their_distance(pieces, gap):
    ranges = [ByteRange(start=a, stop=a + n) for a, n in pieces]
    merged = merge_ranges(ranges, gap)
    wanted = {b for r in ranges for b in range(r.start, r.stop)}
    covered = {b for r in merged for b in range(r.start, r.stop)}
    assert wanted <= covered
    assert all(b.start > a.stop + gap for a, b in itertools.pairwise(merged))
    if gap == 0:
        assert covered == wanted


def test_ranges_of_a_frame_hold_every_packet_that_decoding_it_reads(video):
    table = packet_table(video)
    index = video_index(video)
    with av.open(video) as container:
        packets = [(p.pos, p.size) for p in container.demux(video=0) if p.size]
    for frame in range(len(index)):
        (found,) = frame_ranges(video, [frame], table)
        for number in range(int(index.start[frame]), int(index.order[frame]) + 1):
            position, size = packets[number]
            assert found.start <= position
            assert position + size <= found.stop


@pytest.mark.parametrize("mode", ["advise", "populate"])
def test_bytes_are_asked_for_and_ranges_past_the_end_do_no_harm(video, mode):
    size = Path(video).stat().st_size
    ranges = [
        ByteRange(start=10, stop=100),
        ByteRange(start=size - 5, stop=size + 9999),
        ByteRange(start=size + 1, stop=size + 2),
    ]
    assert request(video, ranges, mode) == 95


def test_read_ahead_sees_waiting_jobs_once_and_survives_bad_files(video):
    ring = Ring(slots=2, slot_bytes=4096, items=4, jobs=8, payload=8192, workers=1)
    counts: list[tuple[str, int]] = []
    ahead = ReadAhead(ring, "advise", lambda name, amount: counts.append((name, amount)))
    targets = np.array([[3, 0, 0, 0, 0]], dtype=np.int64).tobytes()
    for path in (video, "/nowhere.mp4"):
        ring.board().push(encode(DecodeJob("camera", path, targets)))
    assert ahead.step() == 2
    assert ahead.step() == 0
    assert [name for name, amount in counts if amount > 0] == ["readahead_bytes"]


@pytest.mark.parametrize("mode", ["off", "advise", "populate"])
def test_batches_do_not_depend_on_read_ahead(root, mode):
    with ADFEDataLoader(
        open_dataset(root), 8, 2, shuffle=True, readahead=mode, persistent_workers=True
    ) as loader:
        assert sum(len(b["index"]) for b in loader) == 48
        assert loader.stats()["decoded_frames"] > 0


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_decoding_through_a_range_file_is_exact_and_reads_only_what_it_needs(video, kind):
    if kind == "memory":
        fsspec = pytest.importorskip("fsspec")
        with fsspec.open("memory://clip.mp4", "wb") as target, open(video, "rb") as source:  # noqa: PTH123
            target.write(source.read())
    source = LocalSource(video) if kind == "local" else FsspecSource("memory://clip.mp4")
    file = RangeFile(source, block_bytes=512)
    table = packet_table(video)
    file.prefetch(frame_ranges(video, [0, 1], table))
    assert 0 < file.fetched_bytes < source.size()
    with av.open(file) as ours, av.open(video) as theirs:
        for a, b in zip(ours.decode(video=0), theirs.decode(video=0), strict=True):
            np.testing.assert_array_equal(a.to_ndarray(), b.to_ndarray())


def test_range_file_reads_like_a_plain_file(tmp_path):
    path = tmp_path / "bytes"
    raw = np.random.default_rng(0).integers(0, 256, 10_000, dtype=np.uint8).tobytes()
    path.write_bytes(raw)
    file = RangeFile(LocalSource(str(path)), block_bytes=100, most_bytes=300)
    for position, length in ((0, 10), (95, 10), (9_990, 50), (10_000, 5), (123, 1_000)):
        file.seek(position)
        assert file.read(length) == raw[position : position + length]
    assert file.seek(-5, 2) == 9_995
    assert file.read() == raw[-5:]
    with pytest.raises(ValueError, match="block_bytes"):
        RangeFile(LocalSource(str(path)), block_bytes=10, most_bytes=5)


@pytest.mark.parametrize("mode", ["advise", "populate"])
def test_file_truncated_while_it_is_read_gives_an_error_never_a_signal(root, tmp_path, mode):
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    dataset = open_dataset(copy)
    loader = ADFEDataLoader(dataset, 2, 2, shuffle=True, readahead=mode, slots=4, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    for path in copy.glob("videos/**/*.mp4"):
        os.truncate(path, 700)

    def drain() -> None:
        list(iterator)
        list(loader)
        list(loader)

    with pytest.raises(DataError, match="sample"):
        drain()
    loader.close()
