"""What a video file can do to a reader: each case of the fault catalogue that concerns one file."""

import gc
import os
import random
import struct
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from loongforge_data.errors import DamagedVideoError, VideoError
from loongforge_data.video import DecoderPool, VideoFile, video_index
from loongforge_data.video.pixels import upright_rgb

X264 = {"bf": "2", "x264-params": "keyint=12:scenecut=0"}


def rgb(frame):
    return frame.to_ndarray(format="rgb24")


# -- time ------------------------------------------------------------------------------------------------


def test_time_boundary_is_inclusive_and_forgives_float32(tmp_path, clips):
    """D05: a distance equal to the tolerance, or one float32 rounding off, is no error."""
    for fps in (10, 30):
        pts = [n * (30 // fps) for n in range(20)]
        index = video_index(clips.write(tmp_path / f"{fps}.mp4", frames=20, pts=pts))
        for n in range(20):
            exact = n / fps
            for value in (
                exact,
                float(np.float32(exact)),
                float(np.nextafter(np.float32(exact), np.float32(9))),
            ):
                assert index.at(value, tolerance=1e-4) == n
        half = 0.5 / fps
        assert index.at(3 / fps + half, tolerance=half) in (3, 4)
        assert index.at(float(np.float32(19 / fps + half)), tolerance=half) == 19
        with pytest.raises(VideoError, match="no frame within"):
            index.at(19 / fps + half + 1e-3, tolerance=half)


def test_noisy_stamps_find_the_nearest_frame_or_name_both_times(tmp_path, clips):
    """D04: jitter of 8 ms finds the frame; 20 ms late on the last frame is outside a half-frame tolerance."""
    index = video_index(clips.write(tmp_path / "clip.mp4", frames=100))
    rng = np.random.default_rng(0)
    for n in range(100):
        assert index.at(n / 30 + rng.uniform(-0.008, 0.008), tolerance=0.5 / 30) == n
    assert index.at(99 / 30 + 0.02) == 99
    with pytest.raises(VideoError, match=r"3\.320000.*frame 99.*3\.300000"):
        index.at(99 / 30 + 0.02, tolerance=0.5 / 30)


def test_variable_frame_rate_is_looked_up_in_the_real_table(tmp_path, clips):
    """D27: 33 ms apart with an extra 23 ms every 10 frames: t * fps would be wrong."""
    pts, now = [], 0
    for n in range(60):
        pts.append(now)
        now += 990 + (690 if n % 10 == 9 else 0)
    path = clips.write(
        tmp_path / "clip.mkv", frames=60, pts=pts, time_base=Fraction(1, 30000), codec="ffv1", options={}
    )
    with VideoFile(path) as video:
        assert video.index.variable_rate
        times = video.index.times
        for n in range(60):
            assert clips.number(rgb(video.frame(video.at(float(times[n]) + 0.004)))) == n
            assert video.at(float(times[n]) + 0.03, rule="played") == n
        assert video.at(1.07) == 30


def test_times_are_relative_to_the_first_frame(tmp_path, clips):
    """D28: a stream that starts at several seconds has frame 0 at time 0."""
    path = clips.write(tmp_path / "clip.mkv", frames=12, pts=[150 + n for n in range(12)], options=X264)
    with VideoFile(path) as video:
        assert int(video.index.pts[0]) * video.index.time_base >= 4
        for n in range(12):
            assert video.at(n / 30) == n
            assert clips.number(rgb(video.frame(n))) == n


# -- order -----------------------------------------------------------------------------------------------


def test_four_frames_whose_display_order_differs_from_decode_order(tmp_path, clips):
    """D26: B-frames; every order of requests."""
    path = clips.write(
        tmp_path / "clip.mp4", frames=4, options={"bf": "2", "x264-params": "b-adapt=0:scenecut=0"}
    )
    index = video_index(path)
    assert list(index.order) != sorted(index.order)
    import itertools

    with VideoFile(path) as video:
        for order in itertools.permutations(range(4)):
            assert [clips.number(rgb(video.frame(i))) for i in order] == list(order)


@pytest.mark.parametrize("suffix", [".h264", ".avi"])
def test_packets_without_pts_give_all_frames_with_estimated_times(tmp_path, clips, suffix):
    """D30: raw H.264 with B-frames, and an AVI with B-frames, whose packets carry no presentation times."""
    path = tmp_path / f"clip{suffix}"
    if suffix == ".avi":
        clips.write(path, frames=50, codec="mpeg4", options={"bf": "2"})
    else:
        source = clips.write(tmp_path / "source.mp4", frames=50, options=X264)
        with av.open(str(source)) as reader, av.open(str(path), "w") as writer:
            stream = writer.add_stream_from_template(reader.streams.video[0])
            for packet in reader.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    writer.mux(packet)
    with VideoFile(path) as video:
        assert len(video) == 50
        assert video.index.estimated == (suffix == ".h264")
        order = random.Random(0).sample(range(50), 50)
        assert [clips.number(rgb(video.frame(i))) for i in order] == order
        assert clips.number(rgb(video.frame(49))) == 49
        assert abs(float(video.index.times[49]) - 49 / 30) < 0.05


def test_hevc_gives_no_stale_frame_after_the_end_of_the_file(shared_data, tmp_path, clips):
    """D31: read frame N - 2, then frame 0, with one decoder."""
    own = clips.write(
        tmp_path / "clip.mp4",
        codec="libx265",
        frames=61,
        options={"x265-params": "keyint=3:bframes=0:log-level=error:pools=1"},
    )
    for path in (own, shared_data / "media" / "h265_video.mp4"):
        expected = clips.sequential(path)
        last = len(expected) - 1
        with VideoFile(path) as video:
            for target in (last - 1, 0, last, 0, last, 3, last - 1, last, 1):
                assert clips.digest(video.frame(target)) == expected[target][1]


# -- damage ----------------------------------------------------------------------------------------------


def damage_packet(path: Path, number: int) -> None:
    """Overwrite the bytes of one packet of an mp4."""
    with av.open(str(path)) as container:
        packets = [(p.pos, p.size) for p in container.demux(video=0) if p.size]
    position, size = packets[number]
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([0xFF]) * size)


def test_one_damaged_packet_raises_or_is_skipped_and_reported(tmp_path, clips):
    """D32: 50 packets, one overwritten: the policy decides, and no neighbour stands in for the lost frame."""
    options = {"bf": "0", "x264-params": "keyint=10:scenecut=0"}
    path = clips.write(tmp_path / "clip.mp4", frames=50, options=options)
    expected = clips.sequential(path)
    damage_packet(path, 24)
    with VideoFile(path) as video:
        assert clips.digest(video.frame(23)) == expected[23][1]
        with pytest.raises(DamagedVideoError, match=r"frame 24.*at 0\.800 s") as caught:
            video.frame(24)
        assert caught.value.path == str(path)
        for after in (30, 49, 5, 23):
            assert clips.digest(video.frame(after)) == expected[after][1]
    with VideoFile(path, on_damage="skip") as video:
        got = {i: clips.digest(frame) for i, frame in video.decode(range(50))}
        assert video.counters.damaged == 1
        assert 24 in video.missing
        assert video.suspects == set(range(24, 30))
        clean = [i for i in range(50) if not 24 <= i < 30]
        assert [got[i] for i in clean] == [expected[i][1] for i in clean]


def test_an_unfinished_mp4_says_so(tmp_path, clips):
    """D33, first half: the index at the end is lost with the tail."""
    path = clips.write(tmp_path / "clip.mp4", frames=60, options=X264)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])
    with pytest.raises(VideoError, match="unfinished file") as caught:
        VideoFile(path)
    assert caught.value.path == str(path)


def test_a_truncated_faststart_mp4_keeps_its_intact_frames(tmp_path, clips):
    """D33, second half: the prefix is readable, the header count is a lie and is seen."""
    path = clips.write(
        tmp_path / "clip.mp4",
        frames=60,
        options={"bf": "0", "x264-params": "keyint=10:scenecut=0"},
        container_options={"movflags": "+faststart"},
    )
    expected = clips.sequential(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])
    with VideoFile(path, on_damage="skip") as video:
        assert video.index.declared_frames == 60
        assert len(video) < 60
        got = dict(video.decode(range(len(video))))
        assert len(got) >= len(video) - 1
        assert all(
            clips.digest(frame) == expected[i][1] for i, frame in got.items() if i not in video.suspects
        )
    with VideoFile(path) as video, pytest.raises(VideoError, match="does not exist"):
        video.frame(59)


def test_a_clip_without_its_first_key_frame_reports_frames_without_a_picture(tmp_path, clips):
    """D34: remuxed without the first 5 packets: times stay, the first frames have no picture."""
    source = clips.write(tmp_path / "source.mp4", frames=60, options={**X264, "flags": "+cgop"})
    path = tmp_path / "cut.mkv"
    with av.open(str(source)) as reader, av.open(str(path), "w") as writer:
        stream = writer.add_stream_from_template(reader.streams.video[0])
        for number, packet in enumerate(p for p in reader.demux(video=0) if p.size):
            if number >= 5:
                packet.stream = stream
                writer.mux(packet)
    with VideoFile(path) as video:
        first = video.index.first_decodable
        assert 0 < first < 12
        assert len(video) == 55
        with pytest.raises(VideoError, match="no key frame comes before it"):
            video.frame(0)
        # Counted from the end, every frame is still where it was.
        for i in (first, first + 3, 54):
            assert clips.number(rgb(video.frame(i))) == i + 5
        assert abs(float(video.index.times[first]) - first / 30) < 0.002


def test_a_damaged_file_never_kills_the_process(tmp_path, clips):
    """D32 and section 3 of the formats page: random damage raises, it does not crash or hang."""
    path = clips.write(tmp_path / "clip.mp4", frames=40, options=X264)
    script = f"""
import random, pathlib
from loongforge_data.errors import DataError
from loongforge_data.video import VideoFile
good = pathlib.Path({str(path)!r}).read_bytes()
for seed in range(40):
    rng = random.Random(seed)
    data = bytearray(good)
    for _ in range(rng.choice((1, 20, 400))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if seed % 3 == 0:
        del data[rng.randrange(len(data)):]
    target = pathlib.Path({str(tmp_path)!r}) / f"bad{{seed}}.mp4"
    target.write_bytes(data)
    for policy in ("raise", "skip"):
        try:
            with VideoFile(target, on_damage=policy) as video:
                for _ in video.decode(range(len(video))):
                    pass
        except DataError:
            pass
print("done")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "done"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer"),
        (b"\0" * 4096, "cannot be opened"),
    ],
)
def test_files_that_are_no_video_are_named_for_what_they_are(tmp_path, content, message):
    """D14 for videos."""
    path = tmp_path / "clip.mp4"
    path.write_bytes(content)
    with pytest.raises(VideoError, match=message) as caught:
        VideoFile(path)
    assert caught.value.path == str(path)
    with pytest.raises(VideoError, match="missing"):
        VideoFile(tmp_path / "none.mp4")


def test_a_file_without_video_says_what_it_holds(shared_data):
    """D39: sound only."""
    with pytest.raises(VideoError, match=r"no video stream.*audio"):
        VideoFile(shared_data / "media" / "sine_mono_s16.wav")


def test_av1_goes_through_a_software_decoder(shared_data):
    """D39: the decoder at work is libdav1d, which needs no hardware."""
    container = av.open(str(shared_data / "media" / "av1_video.mkv"))
    try:
        assert container.streams.video[0].codec_context.codec.name == "libdav1d"
    finally:
        container.close()
    assert video_index(shared_data / "media" / "av1_video.mkv").codec == "av1"


# -- pixels ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "turns"), [("video_90.mov", 3), ("video_180.mov", 2), ("nasa_13013_rotated.mp4", 1)]
)
def test_rotated_clips_come_out_upright(shared_data, name, turns):
    """D35: equal to the raw decode turned by hand."""
    path = shared_data / "media" / name
    with VideoFile(path) as video:
        assert video.rotation == turns * 90
        frame = video.frame(1)
        upright = upright_rgb(frame)
        assert upright.shape[:2] == video.displayed_size
        raw = rgb(frame).astype(int)
        assert np.abs(upright.astype(int) - np.rot90(raw, turns)).max() <= 3


@pytest.mark.parametrize("size", [(49, 65), (50, 66), (241, 321), (500, 500)])
def test_no_alignment_bytes_reach_the_picture(tmp_path, clips, size):
    """D36: widths that are no multiple of the line alignment, grey planes read directly."""
    rng = np.random.default_rng(1)
    pictures = [rng.integers(0, 256, size, np.uint8) for _ in range(3)]
    path = clips.write(
        tmp_path / "grey.mkv", codec="ffv1", frames=3, size=size, pixel_format="gray", pictures=pictures
    )
    from loongforge_data.modalities.depth import plane_array

    with VideoFile(path) as video:
        for i, frame in video.decode(range(3)):
            assert np.array_equal(plane_array(frame, 8), pictures[i])
            assert np.array_equal(upright_rgb(frame), np.repeat(pictures[i][..., None], 3, axis=2))


def test_odd_sizes_equal_the_scaler(shared_data):
    """D36: 321x240 in 4:4:4."""
    with VideoFile(shared_data / "media" / "testsrc2_odd_width_444.mp4") as video:
        for _, frame in video.decode([0, 12]):
            ours = upright_rgb(frame)
            assert ours.shape == (240, 321, 3)
            assert np.abs(ours.astype(int) - rgb(frame).astype(int)).max() <= 3


MATRICES = {"bt709": (1, 0.2126, 0.0722), "bt601": (6, 0.299, 0.114), "bt2020": (9, 0.2627, 0.0593)}


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("full", [False, True])
def test_colours_follow_matrix_and_range_tags(tmp_path, clips, matrix, full):
    """D37: the mean colour of a flat picture equals the float64 formula of its tags within 2 levels."""
    number, red_share, blue_share = MATRICES[matrix]
    rng = np.random.default_rng(3)
    planes = []
    for _ in range(8):
        picture = np.empty((48 * 3 // 2, 64), np.uint8)
        picture[:48] = rng.integers(60, 180)
        picture[48:60] = rng.integers(100, 156)
        picture[60:] = rng.integers(100, 156)
        planes.append(picture)

    def tags(stream):
        stream.codec_context.color_range = 2 if full else 1
        stream.codec_context.colorspace = number

    path = clips.write(
        tmp_path / "clip.mkv", codec="ffv1", frames=8, pictures=planes, prepare=tags, options={}
    )
    with VideoFile(path) as video:
        for i, frame in video.decode(range(8)):
            assert (int(frame.color_range), int(frame.colorspace)) == (2 if full else 1, number)
            y, u, v = (float(planes[i][r].mean()) for r in (slice(0, 48), slice(48, 60), slice(60, 72)))
            luma, scale = (y, 1 / 127.5) if full else ((y - 16) * 255 / 219, 1 / 112)
            red = luma + 255 * (1 - red_share) * (v - 128) * scale
            blue = luma + 255 * (1 - blue_share) * (u - 128) * scale
            green = (luma - red_share * red - blue_share * blue) / (1 - red_share - blue_share)
            want = np.clip([red, green, blue], 0, 255)
            assert np.abs(upright_rgb(frame)[24, 32].astype(float) - want).max() <= 2


def test_full_range_sample_equals_the_scaler(shared_data):
    """D37: a real full-range BT.709 clip."""
    with VideoFile(shared_data / "media" / "bt709_full_range.mp4") as video:
        frame = video.frame(10)
        want = frame.reformat(
            format="rgb24", src_colorspace="ITU709", src_color_range="JPEG", dst_color_range="JPEG", threads=1
        ).to_ndarray()
        assert np.abs(upright_rgb(frame).astype(int) - want.astype(int)).mean() < 1.0


def test_one_pool_serves_clips_of_different_size_and_range(tmp_path, clips):
    """D38: alternate reads through one pool equal reads by fresh decoders."""
    paths = [
        clips.write(tmp_path / "a.mp4", size=(48, 64), options=X264),
        clips.write(tmp_path / "b.mp4", size=(46, 64), options=X264),
        clips.write(tmp_path / "c.mp4", size=(48, 64), options=X264, pixel_format="yuvj420p"),
    ]
    fresh = {}
    for path in paths:
        for i in (3, 20):
            with VideoFile(path) as video:
                fresh[path, i] = upright_rgb(video.frame(i))
    pool = DecoderPool()
    for i in (3, 20, 3):
        for path in paths:
            with pool.checkout(path) as video:
                assert np.array_equal(upright_rgb(video.frame(i)), fresh[path, i])
    pool.close()


# -- resources -------------------------------------------------------------------------------------------


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
