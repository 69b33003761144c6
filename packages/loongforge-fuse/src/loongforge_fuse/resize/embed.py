"""Patch embedding of images of different size: patches that are padding are never read nor multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loongforge_fuse.fusion.packing import PackedLayout
from loongforge_fuse.ops import masked_patch_embed, patch_table
from loongforge_fuse.resize.adaptive import ResizedBatch
from loongforge_fuse.resize.positions import batch_positions, grid_positions


@dataclass(frozen=True, kw_only=True)
class PatchTokens:
    """Embedded patches of a batch of images, padded to the largest grid.

    Attributes:
        tokens: ``(N, rows * columns, D)`` in raster order of the padded grid, zeros on padding.
        keep: ``(N, rows * columns)`` bool, true on real patches.
        grids: Patch rows and columns of each image.
    """

    tokens: Tensor
    keep: Tensor
    grids: tuple[tuple[int, int], ...]


def embed_patches(
    batch: ResizedBatch,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    patch: int,
    positions: Tensor | None = None,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
) -> PatchTokens:
    """Embed resized images as padded tokens with their mask.

    Args:
        batch: Images on the device of ``weight``, 3 channels; uint8 pixels are normalised on the way.
        weight: ``(D, 3, patch, patch)`` of a convolution or ``(D, patch * patch * 3)`` of a linear layer over
            (y, x, channel).
        bias: ``(D,)`` or None.
        patch: Side of a patch, pixels; image sides must be multiples of it.
        positions: ``(S * S, D)`` learned positions, resized to each image's own grid. Default none.
        mean: For uint8 pixels, in units of 0 to 1.
        std: Likewise.

    Raises:
        ValueError: An image's side is no multiple of ``patch``.
    """
    grids = _grids(batch, patch)
    keep = batch.patch_mask(patch)
    table = _table(batch, patch)
    flat = masked_patch_embed(
        batch.pixels.reshape(-1),
        table,
        weight,
        bias,
        patch=patch,
        mask=keep.flatten(),
        planar=True,
        mean=mean,
        std=std,
    )
    tokens = flat.view(*keep.shape, -1)
    if positions is not None:
        height, width = batch.pixels.shape[-2:]
        padded = (height // patch, width // patch)
        tokens = tokens + batch_positions(positions, grids, padded=padded).to(tokens.dtype)
    return PatchTokens(tokens=tokens, keep=keep, grids=grids)


def pack_patches(
    batch: ResizedBatch,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    patch: int,
    positions: Tensor | None = None,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
) -> tuple[Tensor, PackedLayout]:
    """Embed resized images as one packed sequence of their real patches.

    Args:
        batch: As in :func:`embed_patches`.
        weight: Likewise.
        bias: Likewise.
        patch: Likewise.
        positions: Likewise.
        mean: Likewise.
        std: Likewise.

    Returns:
        ``(real patches, D)``, image after image, and the layout for
        :func:`~loongforge_fuse.fusion.packing.packed_attention`.

    Raises:
        ValueError: An image's side is no multiple of ``patch``.
    """
    grids = _grids(batch, patch)
    # Which patches are real is known on the host, so leaving the others out waits for no device.
    height, width = batch.pixels.shape[-2:]
    columns = width // patch
    real = torch.cat(
        [
            image * (height // patch) * columns + row * columns + torch.arange(wide)
            for image, (high, wide) in enumerate(grids)
            for row in range(high)
        ]
    )
    table = _table(batch, patch, real)
    tokens = masked_patch_embed(
        batch.pixels.reshape(-1), table, weight, bias, patch=patch, planar=True, mean=mean, std=std
    )
    if positions is not None:
        own = torch.cat([grid_positions(positions, high, wide) for high, wide in grids])
        tokens = tokens + own.to(tokens.dtype)
    lengths = [high * wide for high, wide in grids]
    return tokens, PackedLayout.of(lengths, tokens.device)


def _grids(batch: ResizedBatch, patch: int) -> tuple[tuple[int, int], ...]:
    for height, width in batch.sizes:
        if height % patch or width % patch:
            message = (
                f"an image of {height}x{width} pixels has no whole patches of {patch}; resize with "
                f"ResizeConfig(multiple={patch}) or a multiple of it"
            )
            raise ValueError(message)
    return tuple((height // patch, width // patch) for height, width in batch.sizes)


def _table(batch: ResizedBatch, patch: int, rows: Tensor | None = None) -> Tensor:
    """Describe the patches of the padded images, or those of some rows, on the images' device."""
    sizes = [(batch.pixels.shape[-2], batch.pixels.shape[-1])] * batch.pixels.shape[0]
    table = patch_table(sizes, patch, planar=True)
    table = table if rows is None else table[rows]
    return table.to(batch.pixels.device, non_blocking=True)
