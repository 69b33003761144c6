"""Colour conversion and resize against a float64 reference, against FFmpeg's scaler, and vector against
portable code."""

from __future__ import annotations

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_data._core import FrameConverter, vector_kernels
from loongforge_data.convert import FORMATS, fallbacks, frame_to_rgb

MATRICES = {"bt601": (0.299, 0.114), "bt709": (0.2126, 0.0722), "bt2020": (0.2627, 0.0593)}


def triangle(offset: float, length: float, limit: int, outputs: int) -> np.ndarray:
    """(outputs, limit) float64 weights of the documented filter."""
    scale = length / outputs
    support = max(1.0, scale)
    low, high = int(np.floor(offset)), int(np.ceil(offset + length))
    centres = offset + (np.arange(outputs) + 0.5) * scale
    positions = np.arange(limit) + 0.5
    weights = np.clip(1.0 - np.abs(positions[None] - centres[:, None]) / support, 0.0, None)
    weights[:, :low] = 0.0
    weights[:, high:] = 0.0
    return weights / weights.sum(1, keepdims=True)


def reference(planes, depth, chroma, matrix, full, crop, size):
    """Float64 RGB (height, width, 3) by the definition in `convert`."""
    height, width = planes[0].shape
    top, left, rows, columns = crop or (0, 0, height, width)
    out_h, out_w = size or (rows, columns)
    full = full or chroma is None
    lines = []
    for number, plane in enumerate(planes):
        sx, sy = (chroma or (0, 0)) if number else (0, 0)
        plane = plane.astype(np.float64)
        if (out_h, out_w) == (rows, columns):
            y = np.arange(top, top + rows) >> sy
            x = np.arange(left, left + columns) >> sx
            lines.append(plane[np.ix_(y, x)])
        else:
            v = triangle(top / (1 << sy), rows / (1 << sy), plane.shape[0], out_h)
            h = triangle(left / (1 << sx), columns / (1 << sx), plane.shape[1], out_w)
            lines.append(v @ plane @ h.T)
    top_value = float((1 << depth) - 1)
    scale = float(1 << (depth - 8))
    y = lines[0] / top_value * 255 if full else (lines[0] / scale - 16) / 219 * 255
    if chroma is None:
        return np.clip(np.repeat(y[..., None], 3, -1), 0, 255)
    middle = float(1 << (depth - 1))
    span = top_value if full else 224 * scale
    u, v = ((line - middle) / span * 255 for line in lines[1:])
    kr, kb = MATRICES[matrix]
    kg = 1 - kr - kb
    rgb = (
        y + 2 * (1 - kr) * v,
        y - 2 * (1 - kb) * kb / kg * u - 2 * (1 - kr) * kr / kg * v,
        y + 2 * (1 - kb) * u,
    )
    return np.clip(np.stack(rgb, -1), 0, 255)


def random_planes(rng, height, width, depth, chroma):
    shapes = [(height, width)]
    if chroma is not None:
        shapes += [(-(-height // (1 << chroma[1])), -(-width // (1 << chroma[0])))] * 2
    top = (1 << depth) - 1
    dtype = np.uint8 if depth == 8 else np.uint16
    return [rng.integers(0, top + 1, shape).astype(dtype) for shape in shapes]


def run(planes, *, depth, chroma, matrix="bt709", full=False, crop=None, size=None, rotation=0, vector=True):
    height, width = planes[0].shape
    converter = FrameConverter(
        width=width,
        height=height,
        depth=depth,
        chroma_shift=chroma,
        matrix=matrix,
        full_range=full,
        rotation=rotation,
        crop=crop,
        size=size,
        vector=vector,
    )
    out = np.empty((*converter.output_size, 3), np.uint8)
    padded = []
    for plane in planes:
        wide = np.full(
            (plane.shape[0], plane.shape[1] + 13), 77, plane.dtype
        )  # row padding must never be read
        wide[:, : plane.shape[1]] = plane
        padded.append(wide)
    converter.run([p.view(np.uint8) for p in padded], [p.strides[0] for p in padded], out)
    return out


layouts = st.sampled_from([None, (1, 1), (1, 0), (0, 0), (0, 1)])


@st.composite
def cases(draw):
    height, width = draw(st.integers(1, 70)), draw(st.integers(1, 90))
    depth = draw(st.sampled_from([8, 10, 12, 16]))
    crop = None
    if draw(st.booleans()):
        rows, columns = draw(st.integers(1, height)), draw(st.integers(1, width))
        crop = (draw(st.integers(0, height - rows)), draw(st.integers(0, width - columns)), rows, columns)
    size = draw(st.none() | st.tuples(st.integers(1, 60), st.integers(1, 60)))
    return {
        "height": height,
        "width": width,
        "depth": depth,
        "chroma": draw(layouts),
        "crop": crop,
        "size": size,
        "matrix": draw(st.sampled_from(sorted(MATRICES))),
        "full": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=300, deadline=None)
@given(cases())
def test_error_against_float64_is_below_one_level_and_vector_equals_scalar(case):
    rng = np.random.default_rng(case["seed"])
    planes = random_planes(rng, case["height"], case["width"], case["depth"], case["chroma"])
    keys = ("depth", "chroma", "matrix", "full", "crop", "size")
    arguments = {key: case[key] for key in keys}
    fast = run(planes, **arguments)
    slow = run(planes, **arguments, vector=False)
    np.testing.assert_array_equal(fast, slow)
    want = reference(planes, *(case[key] for key in keys))
    assert np.abs(fast - want).max() <= 0.75


@pytest.mark.parametrize("depth", [8, 9, 10, 12, 14, 16])
@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("size", [None, (5, 7), (40, 50)])
def test_extreme_samples_do_not_wrap(depth, value, size):
    """The largest sample of every depth stays white, the smallest black, on both kinds of kernels."""
    top = int(value * ((1 << depth) - 1))
    kind = np.uint8 if depth == 8 else np.uint16
    for chroma in (None, (1, 1), (0, 0)):
        planes = random_planes(np.random.default_rng(0), 20, 34, depth, chroma)
        planes[0] = np.full_like(planes[0], top).astype(kind)
        arguments = {
            "depth": depth,
            "chroma": chroma,
            "full": True,
            "size": size,
            "matrix": "bt2020",
            "crop": None,
        }
        want = reference(planes, depth, chroma, "bt2020", True, None, size)
        for vector in (True, False):
            assert np.abs(run(planes, **arguments, vector=vector) - want).max() <= 0.75


@pytest.mark.parametrize("rotation", [0, 90, 180, 270, -90])
@pytest.mark.parametrize("size", [None, (33, 21)])
def test_rotation_crop_and_resize_work_in_displayed_pixels(rotation, size):
    planes = random_planes(np.random.default_rng(1), 46, 62, 8, (1, 1))
    whole = run(planes, depth=8, chroma=(1, 1), rotation=rotation)
    np.testing.assert_array_equal(whole, np.rot90(run(planes, depth=8, chroma=(1, 1)), k=rotation // 90 % 4))
    crop = (3, 5, 30, 20)
    got = run(planes, depth=8, chroma=(1, 1), rotation=rotation, crop=crop)
    np.testing.assert_array_equal(got, whole[3:33, 5:25])
    if size is not None:
        assert run(planes, depth=8, chroma=(1, 1), rotation=rotation, crop=crop, size=size).shape == (
            *size,
            3,
        )


@pytest.mark.parametrize(
    "name", ["yuv420p", "yuv422p", "yuv444p", "yuvj420p", "gray", "yuv420p10le", "yuv444p12le"]
)
@pytest.mark.parametrize("shape", [(49, 65), (50, 66), (241, 321), (500, 500)])
def test_same_size_agrees_with_the_scaler(name, shape):
    """Fault D36, D37: odd widths and tagged colours; the scaler rounds coarsely and
    interpolates chroma of odd widths, so a few levels differ."""
    height, width = shape
    y, x = np.mgrid[0:height, 0:width]
    rgb = np.stack([(x * 255) // width, (y * 255) // height, (x + y) % 256 * 0 + 128], -1).astype(np.uint8)
    frame = av.VideoFrame.from_ndarray(rgb, format="rgb24").reformat(format=name)
    ours = frame_to_rgb(frame)
    theirs = frame.reformat(format="rgb24", threads=1, dst_color_range="JPEG").to_ndarray()
    interior = (slice(2, -2), slice(2, -2))
    assert ours.shape == theirs.shape
    difference = np.abs(ours.astype(int) - theirs)[interior]
    assert difference.max() <= 8
    assert difference.mean() <= 2


@pytest.mark.parametrize("space, name", [(1, "bt709"), (5, "bt601"), (9, "bt2020"), (2, "bt601")])
@pytest.mark.parametrize("full", [False, True])
def test_tags_of_the_frame_choose_matrix_and_range(space, name, full):
    rng = np.random.default_rng(0)
    frame = av.VideoFrame(64, 48, "yuv420p")
    planes = random_planes(rng, 48, 64, 8, (1, 1))
    for plane, data in zip(frame.planes, planes, strict=True):
        wide = np.zeros((plane.height, plane.line_size), np.uint8)
        wide[:, : data.shape[1]] = data
        plane.update(wide)
    frame.colorspace = space
    frame.color_range = 2 if full else 1
    want = reference(planes, 8, (1, 1), name, full, None, None)
    assert np.abs(frame_to_rgb(frame) - want).max() <= 1.0


def test_formats_without_a_kernel_go_through_the_scaler_and_are_counted():
    rgb = np.random.default_rng(0).integers(0, 256, (20, 30, 3)).astype(np.uint8)
    before = fallbacks["rgb24"]
    frame = av.VideoFrame.from_ndarray(rgb, format="rgb24")
    np.testing.assert_array_equal(frame_to_rgb(frame), rgb)
    np.testing.assert_array_equal(frame_to_rgb(frame, rotation=90), np.rot90(rgb))
    np.testing.assert_array_equal(frame_to_rgb(frame, crop=(2, 3, 4, 5)), rgb[2:6, 3:8])
    assert frame_to_rgb(frame, size=(7, 9)).shape == (7, 9, 3)
    assert fallbacks["rgb24"] == before + 4


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"crop": (0, 0, 49, 10)}, "crop"),
        ({"size": (0, 5)}, "size"),
        ({"rotation": 45}, "90"),
        ({"out": np.empty((3, 3, 3), np.uint8)}, "shape"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        frame_to_rgb(av.VideoFrame(64, 48, "yuv420p"), **arguments)


def test_kernels_and_formats_are_listed():
    assert vector_kernels() in ("avx2", "scalar")
    assert FORMATS["yuvj420p"].full and not FORMATS["yuv420p"].full
