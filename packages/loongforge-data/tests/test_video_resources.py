"""Open decoders are bounded, one user each, and never shared with a child process; odd stamps."""

import ctypes
import gc
import os
import random
import struct
from fractions import Fraction
from pathlib import Path

import pytest
from loongforge_data.errors import VideoError
from loongforge_data.video import DecoderPool, VideoFile, video_index

X264 = {"bf": "2", "x264-params": "keyint=12:scenecut=0"}


def rgb(frame):
    return frame.to_ndarray(format="rgb24")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_open_decoders_are_bounded_in_number_and_memory(tmp_path, clips):
    """D47 (a part): 60 files through a pool of 8; the number of open files stays bounded."""
    source = clips.write(tmp_path / "0.mp4", frames=4, options=X264)
    paths = [source]
    for n in range(1, 60):
        path = tmp_path / f"{n}.mp4"
        path.write_bytes(source.read_bytes())
        paths.append(path)
    before = open_files()
    pool = DecoderPool(max_open=8)
    rng = random.Random(0)
    for _ in range(200):
        with pool.checkout(rng.choice(paths)) as video:
            video.frame(rng.randrange(4))
        assert pool.stats()["idle"] <= 8
    assert open_files() - before <= 8
    small = DecoderPool(max_open=100, max_bytes=3 << 20)
    for path in paths[:10]:
        with small.checkout(path) as video:
            video.frame(0)
    assert small.stats()["idle_bytes"] <= 3 << 20
    pool.close()
    small.close()
    gc.collect()
    assert open_files() <= before


class MallInfo(ctypes.Structure):
    _fields_ = [(f"before_{n}", ctypes.c_size_t) for n in range(7)] + [
        ("uordblks", ctypes.c_size_t),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def allocated() -> int:
    """Return the bytes that the C library has handed out."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        pytest.skip("this C library has no mallinfo2")
    library.mallinfo2.restype = MallInfo
    return int(library.mallinfo2().uordblks)


def test_seeks_leave_no_memory_behind(tmp_path, clips):
    """A demux generator that is left early costs about 150 bytes: over epochs of seeks that is a leak."""
    path = clips.write(tmp_path / "clip.mp4", frames=48, options=X264)
    rng = random.Random(0)
    with VideoFile(path) as video:

        def seek_often(times: int) -> int:
            for _ in range(times):
                video.frame(rng.randrange(len(video)))
            gc.collect()
            return allocated()

        before = seek_often(1000)
        seeks = video.counters.seeks
        grown = seek_often(2000) - before
        assert video.counters.seeks - seeks > 1000
    assert grown < 60_000


def test_a_changed_file_is_opened_anew(tmp_path, clips):
    """A file replaced under the same name is not served from old tables or decoders."""
    path = tmp_path / "clip.mp4"
    clips.write(path, frames=10, options=X264)
    pool = DecoderPool()
    with pool.checkout(path) as video:
        assert len(video) == 10
    clips.write(path, frames=14, options=X264)
    os.utime(path, ns=(1, 1))
    with pool.checkout(path) as video:
        assert len(video) == 14
        assert clips.number(rgb(video.frame(13))) == 13
    pool.close()


def test_a_child_process_opens_its_own_decoders(tmp_path, clips):
    """D46: decode in the parent, fork, decode in child and parent."""
    path = clips.write(tmp_path / "clip.mp4", frames=40, options=X264)
    pool = DecoderPool()
    with pool.checkout(path) as video:
        assert clips.number(rgb(video.frame(20))) == 20
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            numbers = []
            for i in (5, 33, 20, 0):
                with pool.checkout(path) as video:
                    numbers.append(clips.number(rgb(video.frame(i))))
            os.write(writer, struct.pack("4i", *numbers))
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    for i in (35, 2, 21):
        with pool.checkout(path) as video:
            assert clips.number(rgb(video.frame(i))) == i
    data = os.read(reader, 16)
    _, status = os.waitpid(child, 0)
    os.close(reader)
    assert status == 0
    assert struct.unpack("4i", data) == (5, 33, 20, 0)


def test_threads_share_a_pool_without_sharing_a_decoder(tmp_path, clips):
    from concurrent.futures import ThreadPoolExecutor

    path = clips.write(tmp_path / "clip.mp4", frames=40, options=X264)
    pool = DecoderPool(max_open=4)

    def read(seed: int) -> bool:
        rng = random.Random(seed)
        for _ in range(30):
            i = rng.randrange(40)
            with pool.checkout(path) as video:
                if clips.number(rgb(video.frame(i))) != i:
                    return False
        return True

    with ThreadPoolExecutor(4) as workers:
        assert all(workers.map(read, range(4)))
    pool.close()


def test_bad_arguments_name_the_allowed_values(tmp_path, clips):
    path = clips.write(tmp_path / "clip.mp4", frames=4, options=X264)
    with pytest.raises(ValueError, match="on_damage must be"):
        VideoFile(path, on_damage="ignore")
    with pytest.raises(ValueError, match="threads must be"):
        VideoFile(path, threads=0)
    with pytest.raises(ValueError, match="max_open"):
        DecoderPool(max_open=0)
    with VideoFile(path) as video:
        with pytest.raises(VideoError, match="indices go from 0 to 3"):
            video.frame(4)
        with pytest.raises(VideoError, match="indices go from 0 to 3"):
            list(video.decode([-1]))
        with pytest.raises(ValueError, match="rule must be"):
            video.at(0.0, rule="latest")
    with pytest.raises(VideoError, match="closed"):
        video.frame(0)


def test_a_millisecond_time_base_finds_every_frame(shared_data):
    """Trap: webm and mkv stamps of 33 and 34 ms are over 1e-4 away from n / 30; half a frame is allowed."""
    index = video_index(shared_data / "media" / "testsrc2_vp9.webm")
    for n in range(len(index)):
        assert index.at(n / 30, tolerance=0.5 / 30) == n
    with pytest.raises(VideoError, match="no frame within"):
        index.at(1 / 30, tolerance=1e-4)


@pytest.mark.parametrize(("codec", "options"), [("ffv1", {}), ("libx264", X264)])
def test_frames_with_equal_stamps_are_told_apart(tmp_path, clips, codec, options):
    """D44, reading side: a camera that stamps twice; every packet is marked, so none is lost or swapped."""
    pts = [30 * (n // 2) + (n % 2) * 10 for n in range(40)]
    path = clips.write(
        tmp_path / "clip.mkv", codec=codec, options=options, frames=40, pts=pts, time_base=Fraction(1, 30000)
    )
    with VideoFile(path) as video:
        assert len(video) == 40
        assert len(set(video.index.pts.tolist())) < 40
        expected = clips.sequential(path)
        for i in (39, 0, 1, 20, 21, 21, 20, 38, 5):
            assert clips.digest(video.frame(i)) == expected[i][1]
