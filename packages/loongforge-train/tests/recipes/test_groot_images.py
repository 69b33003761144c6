"""The image pipeline: sizes, crops, resizing and colours, against plain implementations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge.recipes.gr00t_n1_6.processing import images as im


@pytest.mark.parametrize(
    ("source", "resized", "grid", "tokens"),
    [((256, 256), (256, 256), (252, 252), 81), ((480, 640), (256, 340), (252, 336), 108)],
)
def test_golden_image_sizes(source, resized, grid, tokens):
    plan = im.plan_image(*source, im.ImageOptions())
    assert plan.resized == resized
    assert plan.grid == grid
    assert plan.tokens == tokens


@given(st.integers(10, 3000), st.integers(10, 3000))
@settings(max_examples=100, deadline=None)
def test_every_grid_is_whole_and_bounded(height, width):
    if max(height, width) > 200 * min(height, width):
        return
    rows, columns = im.grid_size(height, width)
    assert rows % 28 == 0 and columns % 28 == 0
    assert 4 <= rows * columns // 784 <= 4096


def test_the_last_resize_is_that_of_pillow():
    """Pillow rounds between its two passes, we round once: one level of difference, seldom."""
    image_module = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    smooth = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
    picture = image_module.fromarray(smooth).resize((340, 256), image_module.Resampling.BICUBIC)
    theirs = np.asarray(picture.resize((336, 252), image_module.Resampling.BICUBIC))
    ours = im.resize_uint8(
        torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)[None].float(),
        (252, 336),
        mode="bicubic",
    )
    difference = np.abs(ours[0].permute(1, 2, 0).numpy() - theirs)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.25


def test_jitter_agrees_with_a_plain_implementation():
    colorsys = pytest.importorskip("colorsys")
    rng = np.random.default_rng(1)
    pixels = torch.from_numpy(rng.integers(0, 256, (1, 1, 3, 4, 4)).astype(np.float32))
    factors = torch.tensor([[1.2, 0.7, 1.3, 0.06]])
    ours = im.jitter_colours(pixels.clone(), factors)[0, 0].permute(1, 2, 0).numpy()

    def grey(x):
        return x @ np.array([0.299, 0.587, 0.114])

    x = pixels[0, 0].permute(1, 2, 0).numpy().astype(np.float64)
    x = np.clip(x * 1.2, 0, 255).round()
    x = np.clip(x * 0.7 + np.round(grey(x).mean()) * 0.3, 0, 255).round()
    x = np.clip(x * 1.3 + grey(x)[..., None] * -0.3, 0, 255).round()
    for row in x:
        for pixel in row:
            hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
            pixel[:] = np.round(np.array(colorsys.hsv_to_rgb((hue + 0.06) % 1, saturation, value)) * 255)
    assert np.abs(ours - x).max() <= 1


def test_all_views_of_a_sample_get_the_same_change():
    options = im.ImageOptions(short_edge=64)
    view = torch.randint(
        0, 256, (3, 1, 64, 80, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    images = view.expand(-1, 2, -1, -1, -1)
    drawn = im.draw_augmentation(3, options, torch.device("cpu"), torch.Generator().manual_seed(2))
    plan = im.plan_decoded(64, 80, options)
    out = im.prepare_images(images, plan, options, drawn)
    assert torch.equal(out[:, 0], out[:, 1])
    assert out.shape == (3, 2, 3, *plan.grid)
    assert out.min() >= -1 and out.max() <= 1


def test_no_change_drawn_is_the_plain_picture():
    options = im.ImageOptions(short_edge=56, crop_fraction=1.0)
    images = torch.randint(0, 256, (2, 1, 56, 84, 3), dtype=torch.uint8)
    still = torch.tensor([[0.3, 0.7, 1.0, 1.0, 1.0, 0.0]] * 2)
    plan = im.plan_decoded(56, 84, options)
    plain = im.prepare_images(images, plan, options, None)
    assert torch.equal(plain, images.permute(0, 1, 4, 2, 3).float() / 127.5 - 1)
    # The hue goes through another colour space and back: half a level of rounding.
    torch.testing.assert_close(
        im.prepare_images(images, plan, options, still), plain, rtol=0, atol=1.01 / 127.5
    )


@given(st.floats(0, 0.999), st.floats(0, 0.999))
@settings(max_examples=30, deadline=None)
def test_a_crop_is_a_window_of_the_picture(down, right):
    images = torch.arange(2 * 10 * 12 * 3, dtype=torch.int64).reshape(1, 2, 10, 12, 3)
    cut = im.crop_images(images, (7, 9), torch.tensor([[down, right]]))
    top, left = int(down * 4), int(right * 4)
    assert torch.equal(cut, images[:, :, top : top + 7, left : left + 9])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"crop_fraction": 0.0}, "crop_fraction must lie in"),
        ({"short_edge": 2}, "short_edge must be at least 8"),
    ],
)
def test_impossible_image_options_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        im.ImageOptions(**values)
    with pytest.raises(ValueError, match="too narrow"):
        im.grid_size(1, 500)


def plain_area(pixels, length):
    """Mean over what each target pixel covers, along the first axis, pixel by pixel in float64."""
    step = len(pixels) / length
    rows = []
    for i in range(length):
        low, high = i * step, (i + 1) * step
        covered = [
            (max(0.0, min(high, p + 1) - max(low, p)), p)
            for p in range(int(low), min(len(pixels), int(np.ceil(high)) + 1))
        ]
        rows.append(sum(share * pixels[p] for share, p in covered) / step)
    return np.stack(rows)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_area_averages_are_exact_in_both_directions(height, width, rows, columns, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width)).astype(np.float64)
    expected = plain_area(plain_area(pixels, rows).T, columns).T
    source = torch.from_numpy(pixels.astype(np.float32))[None, None]
    ours = im.area_resize(im.area_resize(source, rows, dim=-2), columns, dim=-1)[0, 0]
    np.testing.assert_allclose(ours.numpy(), expected, atol=2e-3)
    assert im.resize_uint8(source, (rows, columns), mode="area").shape[-2:] == (rows, columns)


def test_the_crop_is_centred_outside_training():
    options = im.ImageOptions(short_edge=40, crop_fraction=0.5, cell=4)
    image = torch.arange(40 * 40, dtype=torch.int64).reshape(1, 1, 40, 40, 1).expand(-1, -1, -1, -1, 3)
    plan = im.plan_decoded(40, 40, options)
    assert plan.crop == (20, 20)
    assert torch.equal(im.crop_images(image, plan.crop, None), image[:, :, 10:30, 10:30])
