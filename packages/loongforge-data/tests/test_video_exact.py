"""frame(i) is the i-th frame of a full sequential decode, whatever the order of requests."""

import random
from pathlib import Path

import av
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loongforge_data.video import VideoFile, key_frames, probe, video_index
from loongforge_data.video.mp4 import read_samples

MEDIA = (
    "av1_video.mkv",
    "bt709_full_range.mp4",
    "h264_10bits.mp4",
    "h265_video.mp4",
    "nasa_13013.mp4",
    "nasa_13013_rotated.mp4",
    "sync_test.mkv",
    "testsrc2_odd_width_444.mp4",
    "testsrc2_vp9.webm",
    "video_180.mov",
    "video_90.mov",
)


def assert_equal(clips, path: Path, order: list[int]) -> None:
    expected = clips.sequential(path)
    with VideoFile(path) as video:
        assert len(video) == len(expected)
        assert [int(p) for p in video.index.pts] == [pts for pts, _ in expected]
        wrong = [i for i in order if clips.digest(video.frame(i)) != expected[i][1]]
        assert not wrong


def test_the_list_of_sample_media_is_the_folder(shared_data):
    """The tests below claim every video file; sound files are for other tests."""
    found = {path.name for path in (shared_data / "media").iterdir() if path.suffix not in (".mp3", ".wav")}
    assert found == set(MEDIA)


@pytest.mark.parametrize("name", MEDIA)
def test_random_frames_of_sample_media_equal_sequential_decode(shared_data, clips, name):
    path = shared_data / "media" / name
    with VideoFile(path) as video:
        count = len(video)
    rng = random.Random(7)
    order = [rng.randrange(count) for _ in range(40)] + [count - 1, 0, count - 1, 0]
    assert_equal(clips, path, order)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEDIA)
def test_every_frame_of_sample_media_equals_sequential_decode(shared_data, clips, name):
    path = shared_data / "media" / name
    with VideoFile(path) as video:
        order = list(range(len(video)))
    random.Random(3).shuffle(order)
    assert_equal(clips, path, order)


@pytest.mark.parametrize("name", MEDIA)
def test_all_frames_forward_and_in_strides_equal_sequential_decode(shared_data, clips, name):
    path = shared_data / "media" / name
    expected = clips.sequential(path)
    with VideoFile(path) as video:
        for stride in (1, 2, 7):
            wanted = range(0, len(video), stride)
            got = [(i, clips.digest(frame)) for i, frame in video.decode(wanted)]
            assert got == [(i, expected[i][1]) for i in wanted]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["g1_pick", "g1_pick_v30"])
def test_every_frame_of_the_real_sets_equals_sequential_decode(shared_data, clips, layout):
    paths = sorted((shared_data / layout / "videos").glob("**/*.mp4"))
    assert paths
    for path in paths:
        expected = clips.sequential(path)
        with VideoFile(path) as video:
            order = list(range(len(video)))
            random.Random(5).shuffle(order)
            assert not [i for i in order if clips.digest(video.frame(i)) != expected[i][1]]


ENCODINGS = {
    "h264_bframes": ("libx264", {"bf": "3", "x264-params": "keyint=12:scenecut=0"}, ".mp4"),
    "h264_open_gop": ("libx264", {"bf": "3", "x264-params": "keyint=10:open-gop=1:scenecut=0"}, ".mp4"),
    "h264_open_gop_mkv": ("libx264", {"bf": "2", "x264-params": "keyint=8:open-gop=1:scenecut=0"}, ".mkv"),
    "h264_pyramid": ("libx264", {"bf": "7", "x264-params": "b-pyramid=normal:keyint=30"}, ".mp4"),
    "h264_intra_refresh": ("libx264", {"x264-params": "intra-refresh=1:keyint=10"}, ".mp4"),
    "h264_g2": ("libx264", {"x264-params": "keyint=2"}, ".mp4"),
    "hevc": ("libx265", {"x265-params": "keyint=8:bframes=3:log-level=error:pools=1"}, ".mp4"),
    "hevc_g2": ("libx265", {"x265-params": "keyint=2:log-level=error:pools=1"}, ".mp4"),
    "hevc_open_gop": (
        "libx265",
        {"x265-params": "keyint=8:min-keyint=8:open-gop=1:bframes=4:scenecut=0:log-level=error:pools=1"},
        ".mp4",
    ),
    "av1": ("libsvtav1", {"preset": "12", "svtav1-params": "keyint=8:lp=1"}, ".mp4"),
    "vp9_altref": ("libvpx-vp9", {"auto-alt-ref": "1", "lag-in-frames": "16", "g": "20"}, ".webm"),
    "mpeg4_bframes": ("mpeg4", {"bf": "2"}, ".mp4"),
    "mpeg4_avi": ("mpeg4", {}, ".avi"),
    "ffv1": ("ffv1", {}, ".mkv"),
    "mjpeg": ("mjpeg", {}, ".mkv"),
    "mpeg_ts": ("libx264", {"bf": "2", "x264-params": "keyint=12"}, ".ts"),
}


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_codec_and_gop_structure_is_exact(tmp_path, clips, name):
    codec, options, suffix = ENCODINGS[name]
    pixel_format = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    path = clips.write(
        tmp_path / f"clip{suffix}", codec=codec, options=options, frames=45, pixel_format=pixel_format
    )
    expected = clips.sequential(path)
    assert len(expected) == 45
    with VideoFile(path) as video:
        assert len(video) == 45
        order = [*range(44, -1, -1), *random.Random(1).choices(range(45), k=60), *range(45)]
        assert not [i for i in order if clips.digest(video.frame(i)) != expected[i][1]]
        for number in (0, 17, 44):
            assert clips.number(video.frame(number).to_ndarray(format="rgb24")) == number


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(st.lists(st.integers(0, 39), min_size=1, max_size=6), min_size=1, max_size=8))
def test_any_sequence_of_requests_gives_the_painted_frames(tmp_path_factory, clips, requests):
    folder = tmp_path_factory.getbasetemp() / "property"
    path = folder / "clip.mp4"
    if not path.exists():
        clips.write(path, frames=40, options={"bf": "2", "x264-params": "keyint=9:open-gop=1"})
    with VideoFile(path) as video:
        for wanted in requests:
            got = [(i, clips.number(f.to_ndarray(format="rgb24"))) for i, f in video.decode(wanted)]
            assert got == [(i, i) for i in sorted(set(wanted))]


def test_frames_of_one_gop_are_decoded_once(tmp_path, clips):
    path = clips.write(
        tmp_path / "clip.mp4", frames=40, options={"bf": "0", "x264-params": "keyint=10:scenecut=0"}
    )
    with VideoFile(path) as video:
        list(video.decode([12, 14, 17]))
        assert video.counters.decoded == 8
        list(video.decode([18, 19, 20, 21]))
        assert video.counters.decoded == 12
        assert video.counters.seeks <= 1
        list(video.decode([21]))
        assert video.counters.decoded == 12


def test_a_seek_is_taken_only_where_it_saves_decoding(tmp_path, clips):
    path = clips.write(
        tmp_path / "clip.mp4", frames=90, options={"bf": "0", "x264-params": "keyint=30:scenecut=0"}
    )
    with VideoFile(path) as video:
        list(video.decode([3, 61]))
        assert video.counters.decoded == 4 + 2
        list(video.decode([65]))
        assert video.counters.decoded == 4 + 2 + 4


MP4_CASES = {name: case for name, case in ENCODINGS.items() if case[2] == ".mp4"}


@pytest.mark.parametrize("name", MP4_CASES)
def test_the_index_of_an_mp4_says_what_its_packets_say(tmp_path, clips, name):
    """The table read from `moov` equals the pass over the packets: pts, dts and key packets."""
    codec, options, _ = MP4_CASES[name]
    path = clips.write(tmp_path / "clip.mp4", codec=codec, options=options, frames=45)
    assert_same_tables(path)


@pytest.mark.parametrize("name", [name for name in MEDIA if name.endswith(("mp4", "mov"))])
def test_the_index_of_every_sample_says_what_its_packets_say(shared_data, name):
    assert_same_tables(shared_data / "media" / name)


def test_the_index_of_every_real_file_says_what_its_packets_say(shared_data):
    for path in sorted(shared_data.glob("g1_pick*/videos/**/*.mp4")):
        assert_same_tables(path)


def assert_same_tables(path: Path) -> None:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        fast = read_samples(str(path), stream.id)
        packets = [p for p in container.demux(stream) if p.size]
        assert fast is not None
        assert fast.pts.tolist() == [p.pts for p in packets]
        assert fast.dts.tolist() == [p.dts for p in packets]
        assert fast.key.tolist() == [p.is_keyframe for p in packets]
        assert not any(p.is_discard for p in packets)


def test_files_whose_index_is_not_plain_fall_back_to_their_packets(tmp_path, clips):
    """Fragments, a truncated tail, damage in the index: None, and the packets decide."""
    fragmented = clips.write(
        tmp_path / "fragmented.mp4",
        frames=30,
        options={"bf": "2", "x264-params": "keyint=10"},
        container_options={"movflags": "frag_keyframe+empty_moov"},
    )
    assert read_samples(str(fragmented), 1) is None
    assert_equal(clips, fragmented, [29, 3, 15, 0])
    plain = clips.write(
        tmp_path / "plain.mp4", frames=30, options={"bf": "0"}, container_options={"movflags": "+faststart"}
    )
    data = plain.read_bytes()
    assert read_samples(str(plain), 1) is not None
    assert read_samples(str(plain), 2) is None
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(data[: len(data) * 2 // 3])
    assert read_samples(str(cut), 1) is None
    start = data.index(b"stts")
    for shift in range(-4, 60, 3):
        bad = bytearray(data)
        bad[start + shift] ^= 0xFF
        cut.write_bytes(bad)
        table = read_samples(str(cut), 1)
        assert table is None or len(table.pts) == 30
    # A count of two thousand million samples: refused, not allocated.
    bad = bytearray(data)
    bad[start + 12 : start + 16] = b"\x7f\xff\xff\xff"
    cut.write_bytes(bad)
    assert read_samples(str(cut), 1) is None


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("name", ["h264_pyramid", "hevc_open_gop", "av1", "mpeg4_bframes"])
def test_several_decoder_threads_change_no_frame(tmp_path, clips, name, threads):
    codec, options, suffix = ENCODINGS[name]
    path = clips.write(tmp_path / f"clip{suffix}", codec=codec, options=options, frames=45)
    expected = clips.sequential(path)
    with VideoFile(path, threads=threads) as video:
        order = [*range(44, -1, -7), *random.Random(2).choices(range(45), k=30), *range(0, 45, 3)]
        assert not [i for i in order if clips.digest(video.frame(i)) != expected[i][1]]


@pytest.mark.parametrize("pyramid", ["none", "normal", "strict"])
def test_frames_nobody_refers_to_are_not_decoded_on_the_way(tmp_path, clips, pyramid):
    """Random access in a long GOP with B-frames decodes less, and every frame stays exact."""
    options = {"bf": "3", "x264-params": f"keyint=60:scenecut=0:b-adapt=0:b-pyramid={pyramid}"}
    path = clips.write(tmp_path / "clip.mp4", frames=60, options=options)
    expected = clips.sequential(path)
    with VideoFile(path) as video:
        for target in random.Random(0).sample(range(60), 60):
            assert clips.digest(video.frame(target)) == expected[target][1]
        counters = video.counters
        assert counters.restarts == 0
        assert counters.passed_by > 0.3 * (counters.decoded + counters.passed_by)
    with VideoFile(path) as video:
        assert [clips.digest(f) for _, f in video.decode(range(60))] == [d for _, d in expected]
        assert video.counters.passed_by == 0


def assert_same_keys(path: Path) -> None:
    index = video_index(path)
    known, probe._indices = probe._indices, probe.IndexCache()
    try:
        quick = key_frames(path)
    finally:
        probe._indices = known
    shown = index.display[index.keys]
    assert quick.tolist() == sorted(shown[shown >= 0].tolist())


@pytest.mark.parametrize("name", ENCODINGS)
def test_key_frames_read_alone_equal_those_of_the_whole_table(tmp_path, clips, name):
    codec, options, suffix = ENCODINGS[name]
    pixel_format = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    path = clips.write(
        tmp_path / f"clip{suffix}", codec=codec, options=options, frames=45, pixel_format=pixel_format
    )
    assert_same_keys(path)


def test_key_frames_of_every_shared_file_equal_those_of_the_whole_table(shared_data):
    real = sorted(shared_data.glob("g1*/videos/**/*.mp4"))
    for path in [*(shared_data / "media" / name for name in MEDIA), *real]:
        assert_same_keys(path)
