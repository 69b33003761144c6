"""Pictures come out upright, in their own colours, without a byte of padding."""

import numpy as np
import pytest
from loongforge_data.video import DecoderPool, VideoFile
from loongforge_data.video.pixels import upright_rgb

X264 = {"bf": "2", "x264-params": "keyint=12:scenecut=0"}


def rgb(frame):
    return frame.to_ndarray(format="rgb24")


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
