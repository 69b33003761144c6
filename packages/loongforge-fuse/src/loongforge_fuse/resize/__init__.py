"""Images of different resolution in one batch."""

from loongforge_fuse.resize.adaptive import ResizeConfig, ResizedBatch, adaptive_resize, pad_images
from loongforge_fuse.resize.embed import PatchTokens, embed_patches, pack_patches
from loongforge_fuse.resize.positions import batch_positions, grid_positions, masked_attention, masked_mean

__all__ = [
    "PatchTokens",
    "ResizeConfig",
    "ResizedBatch",
    "adaptive_resize",
    "batch_positions",
    "embed_patches",
    "grid_positions",
    "masked_attention",
    "masked_mean",
    "pack_patches",
    "pad_images",
]
