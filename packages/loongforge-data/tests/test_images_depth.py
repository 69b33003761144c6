"""Pictures in tables and depth maps: modes, orientation, bit depth, units."""

import io
import json
from fractions import Fraction

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loongforge_data.dataset import open_dataset
from loongforge_data.errors import MediaError
from loongforge_data.formats.info import Feature
from loongforge_data.modalities.depth import DepthCoding, depth_frame, nearest_resize
from loongforge_data.modalities.images import decode_image
from loongforge_data.synthetic import write_dataset
from loongforge_data.validate import validate_dataset
from loongforge_data.video import VideoFile
from PIL import Image


def feature(*shape, **info):
    return Feature(key="eye", dtype="image", shape=shape, info=info)


def encoded(image, kind="PNG", **options):
    data = io.BytesIO()
    image.save(data, kind, **options)
    return {"bytes": data.getvalue(), "path": None}


RGB = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
GREY = RGB[..., 0]


def test_every_mode_reaches_the_declared_channels_by_a_stated_rule():
    """D41: L, LA, P, RGBA, CMYK and 1-bit against a declared shape of (8, 8, 3)."""
    rgb = feature(8, 8, 3)
    alpha = np.dstack([RGB, np.arange(64, dtype=np.uint8).reshape(8, 8)])
    bits = (GREY > 127).astype(np.uint8) * 255
    palette = Image.fromarray(RGB).convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
    cases = {
        "RGB": (Image.fromarray(RGB), RGB),
        "L": (Image.fromarray(GREY), np.repeat(GREY[..., None], 3, 2)),
        "LA": (Image.fromarray(np.dstack([GREY, GREY]), "LA"), np.repeat(GREY[..., None], 3, 2)),
        "RGBA": (Image.fromarray(alpha, "RGBA"), RGB),
        "1": (Image.fromarray(bits).convert("1"), np.repeat(bits[..., None], 3, 2)),
        "P": (palette, np.asarray(palette.convert("RGB"))),
    }
    for name, (image, want) in cases.items():
        got = decode_image(encoded(image), rgb)
        assert got.shape == (8, 8, 3), name
        assert np.array_equal(got, want), name
    cmyk = Image.fromarray(RGB).convert("CMYK")
    got = decode_image(encoded(cmyk, "JPEG", quality=100, subsampling=0), rgb)
    assert np.abs(got.astype(int) - RGB.astype(int)).mean() < 12
    assert np.array_equal(decode_image(encoded(Image.fromarray(alpha, "RGBA")), feature(8, 8, 4)), alpha)
    assert np.array_equal(decode_image(encoded(Image.fromarray(GREY)), feature(8, 8, 1))[..., 0], GREY)


def test_pictures_that_do_not_fit_the_declaration_are_refused():
    """D41: the wrong number of channels or the wrong size is an error that names both."""
    with pytest.raises(MediaError, match="mode RGB, the declared shape has 1 channel"):
        decode_image(encoded(Image.fromarray(RGB)), feature(8, 8, 1))
    with pytest.raises(MediaError, match="8 x 8, the declared shape is"):
        decode_image(encoded(Image.fromarray(RGB)), feature(8, 9, 3))
    with pytest.raises(MediaError, match="declares 2 channels"):
        decode_image(encoded(Image.fromarray(RGB)), feature(8, 8, 2))
    with pytest.raises(MediaError, match="cannot be decoded"):
        decode_image({"bytes": b"not a picture", "path": None}, feature(8, 8, 3), row=7)
    with pytest.raises(MediaError, match="holds no bytes"):
        decode_image({"bytes": None, "path": "frame.png"}, feature(8, 8, 3))
    data = encoded(Image.fromarray(np.zeros((64, 64, 3), np.uint8)))["bytes"]
    with pytest.raises(MediaError, match="row 3"):
        decode_image(data[: len(data) // 2], feature(64, 64, 3), row=3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_always(orientation):
    """D42: a 2x3 JPEG with orientation 1 to 8 comes out upright, by an independent rule."""
    picture = np.kron(
        np.array([[[250, 0, 0], [0, 250, 0], [0, 0, 250]], [[250, 250, 0], [0, 250, 250], [250, 0, 250]]]),
        np.ones((16, 16, 1)),
    ).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    value = encoded(Image.fromarray(picture), "JPEG", quality=95, subsampling=0, exif=exif.tobytes())
    turned = {
        1: picture,
        2: picture[:, ::-1],
        3: picture[::-1, ::-1],
        4: picture[::-1],
        5: picture.transpose(1, 0, 2),
        6: np.rot90(picture, -1),
        7: picture[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(picture, 1),
    }[orientation]
    got = decode_image(value, feature(*turned.shape))
    assert got.shape == turned.shape
    assert np.abs(got.astype(int) - turned.astype(int)).max() < 60
    assert np.abs(got.astype(int) - turned.astype(int)).mean() < 6


def test_sixteen_bit_depth_pictures_stay_sixteen_bit():
    """D40: a uint16 ramp to 61420 in PNG."""
    ramp = (np.arange(48 * 64, dtype=np.uint32) * 20).astype(np.uint16).reshape(48, 64)
    assert int(ramp.max()) == 61420
    value = encoded(Image.fromarray(ramp))
    raw = decode_image(value, feature(48, 64, 1), depth="raw")
    assert raw.dtype == np.uint16
    assert np.array_equal(raw[..., 0], ramp)
    metres = decode_image(value, feature(48, 64, 1))
    assert metres.dtype == np.float32
    assert np.allclose(metres[..., 0], ramp / 1000.0, rtol=1e-6)
    with pytest.raises(MediaError, match="declare 1 channel for depth"):
        decode_image(value, feature(48, 64, 3))
    tiff = encoded(Image.fromarray((ramp / 1000).astype(np.float32)), "TIFF")
    assert np.allclose(decode_image(tiff, feature(48, 64, 1))[..., 0], ramp / 1000.0, rtol=1e-6)
    in_metres = decode_image(value, feature(48, 64, 1, depth_unit="m"))
    assert np.allclose(in_metres[..., 0], ramp, rtol=1e-6)
    small = decode_image(value, feature(48, 64, 1), size=(24, 32), depth="raw")
    assert set(np.unique(small)) <= set(np.unique(ramp))


def test_sixteen_bit_colour_is_refused_instead_of_halved():
    codec = av.CodecContext.create("png", "w")
    codec.width, codec.height, codec.pix_fmt = 8, 8, "rgb48be"
    codec.time_base = Fraction(1, 1)
    frame = av.VideoFrame(8, 8, "rgb48be")
    for plane in frame.planes:
        plane.update(bytes(plane.buffer_size))
    data = b"".join(bytes(p) for p in [*codec.encode(frame), *codec.encode(None)])
    with pytest.raises(MediaError, match="16-bit colour"):
        decode_image(data, feature(8, 8, 3))


# -- depth in video --------------------------------------------------------------------------------------


@given(depth=st.floats(0.01, 10.0), logarithmic=st.booleans())
def test_depth_codes_round_trip_within_half_a_step(depth, logarithmic):
    coding = DepthCoding(logarithmic=logarithmic)
    code = coding.encode(np.array([depth]))
    back = float(coding.decode(code)[0])
    neighbours = coding.decode(np.clip(code.astype(int) + np.array([[-1], [1]]), 0, 4095))
    assert abs(back - depth) <= float(np.abs(neighbours - back).max()) * 0.51 + 1e-6


def test_depth_codes_follow_the_documented_formula():
    import math

    codes = np.array([0, 1, 2048, 4095], np.uint16)
    u = codes / 4095
    low, high = math.log(0.01 + 3.5), math.log(10 + 3.5)
    assert np.allclose(DepthCoding().decode(codes), np.exp(u * (high - low) + low) - 3.5, atol=1e-6)
    assert np.allclose(DepthCoding(logarithmic=False).decode(codes), 0.01 + u * 9.99, atol=1e-6)
    assert DepthCoding().encode(np.array([np.nan, -5.0, 99.0])).tolist() == [0, 0, 4095]
    with pytest.raises(ValueError, match="depth coding needs"):
        DepthCoding(minimum=3, maximum=2)


@pytest.mark.parametrize(("pixel_format", "bits"), [("gray10le", 10), ("gray12le", 12), ("gray16le", 16)])
def test_grey_video_of_every_depth_is_exact(tmp_path, clips, pixel_format, bits):
    """D40: ffv1 keeps the codes; odd width so that lines carry padding."""
    rng = np.random.default_rng(bits)
    pictures = [rng.integers(0, 1 << bits, (37, 51), np.uint16) for _ in range(4)]
    path = tmp_path / "depth.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=30)
        stream.width, stream.height, stream.pix_fmt = 51, 37, pixel_format
        for n, picture in enumerate(pictures):
            frame = av.VideoFrame(51, 37, pixel_format)
            plane = frame.planes[0]
            lines = np.zeros((37, plane.line_size // 2), np.uint16)
            lines[:, :51] = picture
            plane.update(lines.tobytes())
            frame.pts = n
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    declared = Feature(key="d", dtype="video", shape=(37, 51, 1), info={"video.is_depth_map": True})
    with VideoFile(path) as video:
        for i, frame in video.decode(range(4)):
            raw = depth_frame(frame, declared, unit="raw")
            assert raw.dtype == np.uint16
            assert np.array_equal(raw[..., 0], pictures[i])
            metres = depth_frame(frame, declared)
            assert np.allclose(metres[..., 0], DepthCoding(bits=bits).decode(pictures[i]))


def depth_set(root, version="2.1"):
    """A set with one colour camera and one depth camera: 12-bit HEVC where the encoder has it, else ffv1."""
    write_dataset(root, episodes=2, frames=[6, 4], cameras=1, size=(64, 64))
    info = json.loads((root / "meta/info.json").read_text())
    key = "observation.images.depth"
    info["features"][key] = {
        "dtype": "video",
        "shape": [48, 64, 1],
        "names": ["height", "width", "channel"],
        "info": {
            "video.is_depth_map": True,
            "video.depth_min": 0.1,
            "video.depth_max": 4.0,
            "video.shift": 1.0,
        },
    }
    (root / "meta/info.json").write_text(json.dumps(info))
    codes = {}
    for episode, length in enumerate((6, 4)):
        path = root / f"videos/chunk-000/{key}/episode_{episode:06d}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(episode)
        with av.open(str(path), "w") as container:
            stream = container.add_stream("libx265", rate=30)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "gray12le"
            stream.codec_context.options = {"x265-params": "lossless=1:log-level=error:keyint=2:pools=1"}
            for n in range(length):
                picture = rng.integers(0, 4096, (48, 64), np.uint16)
                codes[episode, n] = picture
                frame = av.VideoFrame(64, 48, "gray12le")
                plane = frame.planes[0]
                lines = np.zeros((plane.height, plane.line_size // 2), np.uint16)
                lines[:48, :64] = picture
                plane.update(lines.tobytes())
                frame.pts = n
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
    return key, codes


def test_depth_cameras_come_in_metres_or_raw_beside_colour(tmp_path):
    """D40: 12-bit lossless HEVC through the data set, window and resize included."""
    key, codes = depth_set(tmp_path / "set")
    dataset = open_dataset(tmp_path / "set", depth="raw", window={key: [-1, 0]})
    assert dataset.depth_cameras == (key,)
    assert dataset.cameras == ("observation.images.front",)
    assert {r.key for r in dataset.frame_requests(0)} == {"observation.images.front"}
    for i in range(10):
        sample = dataset[i]
        episode, frame = int(sample["episode_index"]), int(sample["frame_index"])
        assert sample[key].shape == (2, 48, 64, 1)
        assert np.array_equal(sample[key][1, ..., 0], codes[episode, frame])
        assert np.array_equal(sample[key][0, ..., 0], codes[episode, max(frame - 1, 0)])
    metres = open_dataset(tmp_path / "set", image_size=(24, 32))
    coding = DepthCoding(minimum=0.1, maximum=4.0, shift=1.0)
    want = nearest_resize(coding.decode(codes[1, 2]), (24, 32))
    got = metres[8][key]
    assert got.dtype == np.float32
    assert np.array_equal(got[..., 0], want)
    assert validate_dataset(tmp_path / "set", decode=True).errors == []


# -- pictures in tables ----------------------------------------------------------------------------------


def table_set(root, values, shape, **info):
    write_dataset(root, episodes=1, frames=len(values), cameras=0)
    meta = json.loads((root / "meta/info.json").read_text())
    meta["features"]["eye"] = {"dtype": "image", "shape": list(shape), "names": None, "info": info}
    (root / "meta/info.json").write_text(json.dumps(meta))
    path = root / "data/chunk-000/episode_000000.parquet"
    table = pq.read_table(path)
    column = pa.array(values, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    pq.write_table(table.append_column("eye", column), path, row_group_size=3)
    return root


def test_pictures_stay_in_their_files_until_they_are_asked_for(tmp_path):
    pictures = [np.full((8, 8, 3), 20 * n, np.uint8) for n in range(10)]
    root = table_set(tmp_path / "set", [encoded(Image.fromarray(p)) for p in pictures], (8, 8, 3))
    dataset = open_dataset(root, window={"eye": [0, 1]})
    for i in (9, 0, 5, 3, 4):
        sample = dataset[i]
        assert np.array_equal(sample["eye"], np.stack([pictures[i], pictures[min(i + 1, 9)]]))
        assert sample["eye_is_pad"].tolist() == [False, i == 9]
    small = open_dataset(root, image_size=(4, 6))
    assert small[2]["eye"].shape == (4, 6, 3)


def test_a_picture_that_does_not_fit_is_found_by_validate(tmp_path):
    """D41: an error with file, episode and row."""
    values = [encoded(Image.fromarray(RGB))] * 3
    root = table_set(tmp_path / "set", values, (8, 8, 1))
    findings = validate_dataset(root).errors
    assert [f.kind for f in findings] == ["pictures"]
    assert (findings[0].episode, findings[0].row) == (0, 0)
    with pytest.raises(MediaError, match=r"episode_000000\.parquet"):
        open_dataset(root)[1]
