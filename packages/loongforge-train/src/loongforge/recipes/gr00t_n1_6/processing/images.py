"""Image pipeline on uint8 batches: short side, crop, resize to whole cells, colour jitter equal over views.

The resize to the short side happens while decoding (or exactly, on the host); everything after it runs on the
device of the batch, with one set of drawn numbers per sample that all its views share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

MIN_CELLS, MAX_CELLS = 4, 4096


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Settings of the image pipeline.

    Attributes:
        short_edge: Shorter side after the first resize and after the crop, pixels.
        crop_fraction: Part of each side that is kept; random place in training, centre otherwise.
        brightness: Factor drawn from [1 - x, 1 + x].
        contrast: As brightness, around the mean grey.
        saturation: As brightness, around the pixel's grey.
        hue: Shift drawn from [-x, x], turns of the colour circle.
        cell: Sides become multiples of this, pixels.
        augment: Random crop and jitter in training; false takes the centre crop always.
        first_resize: Where the source is brought to the short edge: ``decoder`` while decoding (bilinear with
            antialiasing, small pictures travel), ``area`` by area averages as the original does (full-size
            pictures travel through the host).
    """

    short_edge: int = 256
    crop_fraction: float = 0.95
    brightness: float = 0.3
    contrast: float = 0.4
    saturation: float = 0.5
    hue: float = 0.08
    cell: int = 28
    augment: bool = True
    first_resize: Literal["decoder", "area"] = "decoder"

    def __post_init__(self) -> None:
        if not 0.1 <= self.crop_fraction <= 1.0:
            msg = f"crop_fraction must lie in [0.1, 1], got {self.crop_fraction}"
            raise ValueError(msg)
        if self.short_edge < 8:
            msg = f"short_edge must be at least 8 pixels, got {self.short_edge}"
            raise ValueError(msg)

    @property
    def has_jitter(self) -> bool:
        """Tell whether any colour changes."""
        return max(self.brightness, self.contrast, self.saturation, self.hue) > 0


def short_edge_size(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return the size whose shorter side is ``edge``, ratio kept."""
    scale = edge / min(height, width)
    return round(height * scale), round(width * scale)


def crop_size(height: int, width: int, fraction: float) -> tuple[int, int]:
    """Return the crop of ``fraction`` of each side, rounded down."""
    return int(height * fraction), int(width * fraction)


def grid_size(height: int, width: int, cell: int = 28) -> tuple[int, int]:
    """Return the nearest multiples of ``cell``, between 4 and 4096 cells in all.

    Raises:
        ValueError: One side is more than 200 times the other.
    """
    if max(height, width) > 200 * min(height, width):
        msg = f"image of {height}x{width} pixels is too narrow: the sides differ by more than 200 times"
        raise ValueError(msg)
    rows, columns = max(1, round(height / cell)), max(1, round(width / cell))
    if rows * columns > MAX_CELLS:
        shrink = math.sqrt(height * width / (MAX_CELLS * cell * cell))
        rows, columns = int(height / shrink / cell), int(width / shrink / cell)
    elif rows * columns < MIN_CELLS:
        grow = math.sqrt(MIN_CELLS * cell * cell / (height * width))
        rows, columns = math.ceil(height * grow / cell), math.ceil(width * grow / cell)
    return rows * cell, columns * cell


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """Sizes (height, width) an image passes through, pixels."""

    source: tuple[int, int]
    decoded: tuple[int, int]
    crop: tuple[int, int]
    resized: tuple[int, int]
    grid: tuple[int, int]

    @property
    def tokens(self) -> int:
        """Number of decoder tokens of the image (one per 28x28 cell)."""
        return self.grid[0] * self.grid[1] // 784


def plan_image(height: int, width: int, options: ImageOptions) -> ImagePlan:
    """Work out the sizes for a source image of ``height`` x ``width`` pixels."""
    decoded = short_edge_size(height, width, options.short_edge)
    return replace(plan_decoded(*decoded, options), source=(height, width))


def plan_decoded(height: int, width: int, options: ImageOptions) -> ImagePlan:
    """Work out the sizes for an image that has been decoded to ``height`` x ``width`` pixels."""
    crop = crop_size(height, width, options.crop_fraction)
    resized = short_edge_size(*crop, options.short_edge)
    return ImagePlan(
        source=(height, width),
        decoded=(height, width),
        crop=crop,
        resized=resized,
        grid=grid_size(*resized, options.cell),
    )


def resize_uint8(images: Tensor, size: tuple[int, int], *, mode: str) -> Tensor:
    """Resize (N, C, H, W) of values 0..255 in float32 and round back to whole values.

    ``area`` averages what a target pixel covers; other modes are torch's, with antialiasing.
    """
    if images.shape[-2:] == size:
        return images
    if mode == "area":
        return area_resize(area_resize(images, size[0], dim=-2), size[1], dim=-1).round_()
    result = functional.interpolate(images, size=size, mode=mode, align_corners=False, antialias=True)
    return result.clamp_(0, 255).round_()


def area_resize(images: Tensor, length: int, *, dim: int) -> Tensor:
    """Resize one dimension: each target pixel is the mean of the source under it, parts of pixels weighted.

    Torch's own ``area`` mode takes whole source pixels only, and repeats pixels where it enlarges.
    """
    if images.shape[dim] == length:
        return images
    index, weight = _area_taps(images.shape[dim], length, images.device)
    shape = [1] * images.dim()
    shape[dim] = length
    result = images.index_select(dim, index[0]) * weight[0].view(shape)
    for places, shares in zip(index[1:], weight[1:], strict=True):
        result.addcmul_(images.index_select(dim, places), shares.view(shape))
    return result


def _area_taps(source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return source places (taps, target) and their shares; made on the device, in whole numbers.

    In units of 1 / (source * target), pixel ``i`` of the target covers [i * source, (i + 1) * source), pixel
    ``p`` of the source [p * target, (p + 1) * target).
    """
    taps = -(-source // target) + 1
    start = torch.arange(target, device=device) * source
    place = start // target + torch.arange(taps, device=device)[:, None]
    covered = torch.minimum(start + source, (place + 1) * target) - torch.maximum(start, place * target)
    return place.clamp_(max=source - 1), covered.clamp_(min=0).float() / source


def crop_images(images: Tensor, size: tuple[int, int], offsets: Tensor | None) -> Tensor:
    """Cut (B, V, H, W, C) to ``size``; ``offsets`` (B, 2) in [0, 1) place the crop, None centres it."""
    height, width = size
    free_h, free_w = images.shape[2] - height, images.shape[3] - width
    if offsets is None:
        top, left = free_h // 2, free_w // 2
        return images[:, :, top : top + height, left : left + width]
    if free_h == 0 and free_w == 0:
        return images
    steps_h = torch.arange(height, device=images.device)
    steps_w = torch.arange(width, device=images.device)
    rows = (offsets[:, 0] * (free_h + 1)).long()[:, None] + steps_h
    columns = (offsets[:, 1] * (free_w + 1)).long()[:, None] + steps_w
    sample = torch.arange(images.shape[0], device=images.device)
    # Advanced indices around a slice: the view axis moves behind the broadcast ones, so it is moved back.
    cut = images[sample[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return cut.permute(0, 3, 1, 2, 4)


def jitter_colours(images: Tensor, factors: Tensor) -> Tensor:
    """Change brightness, contrast, saturation and hue, in this order, clamping and rounding after each.

    Args:
        images: (B, V, C, H, W) float32, values 0..255.
        factors: (B, 4) brightness, contrast and saturation factors and the hue shift in turns.
    """
    brightness, contrast, saturation, hue = (f[:, None, None, None, None] for f in factors.unbind(1))
    x = _whole(images * brightness)
    mean = _grey(x).mean(dim=(-2, -1), keepdim=True).round()
    x = _whole(x * contrast + mean * (1 - contrast))
    x = _whole(x * saturation + _grey(x) * (1 - saturation))
    return _whole(_shift_hue(x / 255, hue) * 255)


def _whole(x: Tensor) -> Tensor:
    return x.clamp_(0, 255).round_()


def _grey(x: Tensor) -> Tensor:
    red, green, blue = torch.split(x, 1, dim=-3)
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """Turn the hue of RGB (…, 3, H, W) in [0, 1] through the HSV hexagon."""
    high, low = x.amax(dim=-3, keepdim=True), x.amin(dim=-3, keepdim=True)
    red, green, blue = torch.split(x, 1, dim=-3)
    spread = high - low
    safe = torch.where(spread == 0, torch.ones_like(spread), spread)
    hue = torch.where(
        high == red,
        (green - blue) / safe,
        torch.where(high == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = hue / 6 + shift
    # One formula for the three channels: distance on the colour circle, offsets 5, 3, 1.
    turns = (torch.cat((hue * 6 + 5, hue * 6 + 3, hue * 6 + 1), dim=-3)) % 6
    return high - spread * torch.minimum(turns, 4 - turns).clamp_(0, 1)


def draw_augmentation(
    rows: int, options: ImageOptions, device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Draw (rows, 6): crop place (2, in [0, 1)), brightness, contrast, saturation factors, hue shift."""
    floor, width = _augmentation_range(options, device)
    return floor + torch.rand((rows, 6), generator=generator, device=device) * width


@lru_cache(maxsize=16)
def _augmentation_range(options: ImageOptions, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return lowest values and widths (6,); kept, because copying them anew would wait for the device."""
    low, high = [0.0, 0.0], [1.0, 1.0]
    for spread in (options.brightness, options.contrast, options.saturation):
        low.append(max(0.0, 1 - spread))
        high.append(1 + spread)
    low.append(-options.hue)
    high.append(options.hue)
    floor = torch.tensor(low, device=device)
    return floor, torch.tensor(high, device=device) - floor


def prepare_images(images: Tensor, plan: ImagePlan, options: ImageOptions, drawn: Tensor | None) -> Tensor:
    """Turn decoded images into model input.

    Args:
        images: (B, V, H, W, 3) uint8 of ``plan.decoded`` size.
        plan: Sizes.
        options: Settings.
        drawn: (B, 6) from :func:`draw_augmentation`, or None for the centre crop without jitter.

    Returns:
        (B, V, 3, h, w) float32 in [-1, 1], h x w = ``plan.grid``.
    """
    b, v = images.shape[:2]
    cut = crop_images(images, plan.crop, None if drawn is None else drawn[:, :2])
    x = cut.permute(0, 1, 4, 2, 3).flatten(0, 1).float()
    x = resize_uint8(x, plan.resized, mode="area")
    if drawn is not None and options.has_jitter:
        x = jitter_colours(x.view(b, v, *x.shape[1:]), drawn[:, 2:]).flatten(0, 1)
    x = resize_uint8(x, plan.grid, mode="bicubic")
    return (x / 127.5 - 1).view(b, v, *x.shape[1:])
