"""What a video file can do to a reader: each case of the fault catalogue that concerns one file."""

import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from loongforge_data.errors import DamagedVideoError, VideoError
from loongforge_data.video import VideoFile, video_index

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
