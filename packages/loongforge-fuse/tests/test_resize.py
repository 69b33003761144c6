"""Adaptive resize, positions on true grids, and attention that padding cannot poison."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge_fuse import (
    ResizeConfig,
    adaptive_resize,
    batch_positions,
    embed_patches,
    grid_positions,
    masked_attention,
    masked_mean,
    pack_patches,
)
from loongforge_fuse.resize import pad_images
from loongforge_fuse.resize.adaptive import centre_crop, resize_image


@given(
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.sampled_from([14, 16, 28]),
    st.sampled_from([1.0, 1.5, 2.0]),
)
@settings(deadline=None)
def test_sizes_are_multiples_with_the_short_side_kept_and_the_ratio_bounded(
    height, width, multiple, max_ratio
):
    config = ResizeConfig(short_side=224, multiple=multiple, max_ratio=max_ratio)
    h, w = config.target(height, width)
    assert h % multiple == 0
    assert w % multiple == 0
    assert abs(min(h, w) - 224) <= multiple / 2
    assert max(h, w) <= 224 * max_ratio
    if max(height, width) / min(height, width) <= max_ratio - multiple / 224:
        assert abs(max(h, w) / 224 - max(height, width) / min(height, width)) <= multiple / 224
    assert config.target(width, height) == (w, h)


def test_short_side_is_224_ratio_kept_and_masks_say_what_is_real():
    images = [
        torch.full((3, 480, 640), 10, dtype=torch.uint8),
        torch.full((3, 300, 300), 20, dtype=torch.uint8),
    ]
    batch = adaptive_resize(images)
    assert batch.sizes == ((224, 294), (224, 224))
    assert batch.pixels.shape == (2, 3, 224, 294)
    assert batch.pixels.dtype == torch.uint8
    assert batch.valid.sum(dim=(1, 2)).tolist() == [224 * 294, 224 * 224]
    assert (batch.pixels[1, :, :, :224] == 20).all()
    assert not batch.pixels[1, :, :, 224:].any()
    mask = batch.patch_mask(14)
    assert mask.shape == (2, 16 * 21)
    assert mask.sum(dim=1).tolist() == [16 * 21, 16 * 16]


def test_resizing_equals_an_area_preserving_reference_on_a_ramp():
    ramp = torch.linspace(0, 255, 448).expand(3, 448, 448).contiguous()
    small = resize_image(ramp, ResizeConfig())
    expected = ramp.view(3, 224, 2, 224, 2).mean(dim=(2, 4))
    assert (small[:, 4:-4, 4:-4] - expected[:, 4:-4, 4:-4]).abs().max() < 0.5
    same = torch.rand(3, 224, 224)
    assert resize_image(same, ResizeConfig()) is same


def test_long_images_are_cropped_in_the_middle():
    image = torch.arange(100.0).expand(1, 10, 100)
    assert centre_crop(image, 2.0)[0, 0].tolist() == list(range(40, 60))
    assert centre_crop(image.transpose(1, 2), 2.0).shape == (1, 20, 10)


def test_bad_images_and_settings_are_named():
    with pytest.raises(ValueError, match="short_side"):
        ResizeConfig(short_side=7)
    with pytest.raises(ValueError, match="max_ratio"):
        ResizeConfig(max_ratio=0.5)
    with pytest.raises(ValueError, match="multiple"):
        ResizeConfig(multiple=0)
    with pytest.raises(ValueError, match="shape"):
        resize_image(torch.zeros(4, 4), ResizeConfig())
    with pytest.raises(ValueError, match="0x5"):
        ResizeConfig().target(0, 5)
    with pytest.raises(ValueError, match="at least one"):
        pad_images([])
    with pytest.raises(ValueError, match="channels"):
        pad_images([torch.zeros(3, 4, 4), torch.zeros(1, 4, 4)])


def test_positions_follow_each_images_own_grid_not_the_padded_one():
    torch.manual_seed(0)
    table = torch.randn(256, 8)
    assert grid_positions(table, 16, 16) is table
    small = grid_positions(table, 8, 8)
    inner = table.view(8, 2, 8, 2, 8).mean(dim=(1, 3))[2:6, 2:6]
    assert (small.view(8, 8, 8)[2:6, 2:6] - inner).abs().mean() < 0.3
    batch = batch_positions(table, [(16, 21), (16, 16)], padded=(16, 21))
    torch.testing.assert_close(batch[1].view(16, 21, 8)[:, :16].reshape(256, 8), table)
    assert not batch[1].view(16, 21, 8)[:, 16:].any()
    with pytest.raises(ValueError, match="does not fit"):
        batch_positions(table, [(17, 1)], padded=(16, 21))
    with pytest.raises(ValueError, match="square"):
        grid_positions(table[:255], 4, 4)


def test_fully_masked_rows_give_zero_and_finite_gradients_even_over_garbage():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 3, 8, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        k[0, :, 2] = float("inf")
        v[0, :, 2] = float("nan")
    keep = torch.tensor([[True, True, False], [False, False, False]])
    out = masked_attention(q, k, v, keep)
    assert not out[1].any()
    assert torch.isfinite(out).all()
    out.sum().backward()
    for tensor in (q, k, v):
        assert torch.isfinite(tensor.grad).all()
    expected = torch.nn.functional.scaled_dot_product_attention(q[:1], k[:1, :, :2], v[:1, :, :2])
    torch.testing.assert_close(out[:1], expected)


def test_masked_mean_ignores_padding_and_survives_empty_samples():
    tokens = torch.tensor([[[1.0], [3.0], [float("nan")]], [[9.0], [9.0], [9.0]]])
    keep = torch.tensor([[True, True, False], [False, False, False]])
    assert masked_mean(tokens, keep).flatten().tolist() == [2.0, 0.0]


def mixed_images(dtype, *, garbage=False):
    generator = torch.Generator().manual_seed(0)
    images = [
        torch.randint(0, 256, (3, h, w), generator=generator, dtype=torch.uint8)
        for h, w in ((28, 42), (42, 28), (14, 14))
    ]
    images = images if dtype == torch.uint8 else [image.to(dtype) / 255 for image in images]
    batch = pad_images(images)
    if garbage:
        batch.pixels.masked_fill_(~batch.valid[:, None], float("nan"))
    return images, batch


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
def test_patches_equal_a_convolution_of_each_image_alone_with_its_own_positions(dtype, bias):
    torch.manual_seed(0)
    images, batch = mixed_images(dtype, garbage=dtype.is_floating_point)
    weight = torch.randn(8, 3, 14, 14, requires_grad=True)
    offset = torch.randn(8) if bias else None
    table = torch.randn(16, 8)
    padded = embed_patches(batch, weight, offset, patch=14, positions=table)
    packed, layout = pack_patches(batch, weight, offset, patch=14, positions=table)
    assert padded.tokens.shape == (3, 9, 8)
    assert padded.grids == ((2, 3), (3, 2), (1, 1))
    assert layout.lengths == (6, 6, 1)
    expected = []
    for image, (rows, columns) in zip(images, padded.grids, strict=True):
        pixels = (image.float() / 255 - 0.5) / 0.5 if dtype == torch.uint8 else image
        own = torch.nn.functional.conv2d(pixels[None], weight, offset, stride=14)[0].flatten(1).t()
        expected.append(own + grid_positions(table, rows, columns))
    torch.testing.assert_close(packed, torch.cat(expected), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(padded.tokens[padded.keep], torch.cat(expected), rtol=1e-4, atol=1e-4)
    assert not padded.tokens[~padded.keep].any()
    packed.square().sum().backward()
    one, weight.grad = weight.grad, None
    padded.tokens.square().sum().backward()
    torch.testing.assert_close(weight.grad, one, rtol=1e-4, atol=1e-2)
    assert torch.isfinite(one).all()


def test_images_without_whole_patches_are_refused_with_the_setting_to_change():
    with pytest.raises(ValueError, match=r"ResizeConfig\(multiple=14\)"):
        embed_patches(pad_images([torch.zeros(3, 20, 28)]), torch.zeros(4, 588), patch=14)
