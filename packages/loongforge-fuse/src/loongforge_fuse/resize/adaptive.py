"""Adaptive resize: short side to a fixed length, ratio kept, batches padded with masks of what is valid.

Works on CPU and GPU tensors alike, so it can run in the loader or after the copy to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class ResizeConfig:
    """Settings of :func:`adaptive_resize`.

    Attributes:
        short_side: Length of the shorter side after resizing, pixels. Default 224.
        multiple: Both sides are rounded to a multiple of this, pixels: the patch size, or the patch size
            times the pixel-unshuffle factor. Default 14.
        max_ratio: Largest long side / short side; a longer image is cropped in its middle. Default 2.0.
        antialias: Filter before shrinking. Default True.
    """

    short_side: int = 224
    multiple: int = 14
    max_ratio: float = 2.0
    antialias: bool = True

    def __post_init__(self) -> None:
        if self.multiple < 1:
            message = f"multiple is {self.multiple}, it must be at least 1 pixel"
            raise ValueError(message)
        if self.short_side < self.multiple:
            message = f"short_side is {self.short_side}, it must be at least multiple ({self.multiple})"
            raise ValueError(message)
        if self.max_ratio < 1.0:
            message = f"max_ratio is {self.max_ratio}, it must be at least 1"
            raise ValueError(message)

    def target(self, height: int, width: int) -> tuple[int, int]:
        """Return the size an image of ``height`` x ``width`` pixels gets: multiples, ratio kept but for
        rounding.

        Raises:
            ValueError: A side is not positive.
        """
        if height < 1 or width < 1:
            message = f"an image of {height}x{width} pixels cannot be resized"
            raise ValueError(message)
        short = min(height, width)
        scale = self.short_side / short
        longest = self.short_side * self.max_ratio
        sides = [min(side * scale, longest) for side in (height, width)]
        rounded = [max(round(side / self.multiple), 1) * self.multiple for side in sides]
        # Rounding must not carry a side beyond the largest ratio.
        limit = int(longest // self.multiple) * self.multiple
        return min(rounded[0], max(limit, self.multiple)), min(rounded[1], max(limit, self.multiple))


@dataclass(frozen=True, kw_only=True)
class ResizedBatch:
    """Images of different size in one tensor.

    Attributes:
        pixels: ``(N, C, H, W)``, zero outside the valid part.
        sizes: Height and width of each image's valid part, pixels, host integers.
        valid: ``(N, H, W)`` bool, true on real pixels.
    """

    pixels: Tensor
    sizes: tuple[tuple[int, int], ...]
    valid: Tensor

    def patch_mask(self, patch: int) -> Tensor:
        """Return ``(N, H // patch * W // patch)`` bool in raster order, true for wholly valid patches."""
        height, width = self.pixels.shape[-2:]
        rows = torch.arange(height // patch)
        columns = torch.arange(width // patch)
        mask = torch.stack(
            [(rows[:, None] < h // patch) & (columns[None, :] < w // patch) for h, w in self.sizes]
        )
        return mask.flatten(1).to(self.pixels.device, non_blocking=True)


def centre_crop(image: Tensor, max_ratio: float) -> Tensor:
    """Crop the middle of ``(..., H, W)`` until long side / short side is at most ``max_ratio``."""
    height, width = image.shape[-2:]
    limit = max(int(min(height, width) * max_ratio), 1)
    if height > limit:
        top = (height - limit) // 2
        image = image[..., top : top + limit, :]
    if width > limit:
        left = (width - limit) // 2
        image = image[..., left : left + limit]
    return image


def resize_image(image: Tensor, config: ResizeConfig) -> Tensor:
    """Resize one image ``(C, H, W)``; uint8 stays uint8 (rounded), floats stay what they are.

    Raises:
        ValueError: Not three dimensions, or an empty side.
    """
    if image.dim() != 3:
        message = f"an image must be (C, H, W), got shape {tuple(image.shape)}"
        raise ValueError(message)
    image = centre_crop(image, config.max_ratio)
    size = config.target(image.shape[1], image.shape[2])
    if size == tuple(image.shape[1:]):
        return image
    wide = image if image.is_floating_point() else image.float()
    result = functional.interpolate(
        wide[None], size=size, mode="bilinear", align_corners=False, antialias=config.antialias
    )[0]
    return result if image.is_floating_point() else result.round().clamp(0, 255).to(image.dtype)


def pad_images(images: Sequence[Tensor]) -> ResizedBatch:
    """Bring images ``(C, H, W)`` of different size into one tensor, zeros on the right and below.

    Raises:
        ValueError: No images, or different channels or dtypes.
    """
    if not images:
        message = "pad_images needs at least one image"
        raise ValueError(message)
    kinds = {(image.shape[0], image.dtype, image.device) for image in images}
    if len(kinds) > 1:
        message = f"images of one batch must share channels, dtype and device, got {sorted(map(str, kinds))}"
        raise ValueError(message)
    height, width = (max(image.shape[d] for image in images) for d in (1, 2))
    # Zeros, never uninitialised memory: what lies behind a mask still meets weights, and 0 * NaN is NaN.
    pixels = images[0].new_zeros((len(images), images[0].shape[0], height, width))
    valid = torch.zeros((len(images), height, width), dtype=torch.bool, device=pixels.device)
    for i, image in enumerate(images):
        pixels[i, :, : image.shape[1], : image.shape[2]] = image
        valid[i, : image.shape[1], : image.shape[2]] = True
    sizes = tuple((int(image.shape[1]), int(image.shape[2])) for image in images)
    return ResizedBatch(pixels=pixels, sizes=sizes, valid=valid)


def adaptive_resize(images: Sequence[Tensor], config: ResizeConfig | None = None) -> ResizedBatch:
    """Resize every image by the rule and bring them into one tensor with masks.

    Args:
        images: ``(C, H, W)`` each, uint8 or float, any sizes, on one device.
        config: The rule. Default :class:`ResizeConfig`.

    Returns:
        The batch; images that need no resizing are copied unchanged.
    """
    settings = config or ResizeConfig()
    return pad_images([resize_image(image, settings) for image in images])
