"""Images of different resolution in one batch."""

from loongforge_fuse.resize.adaptive import ResizeConfig, ResizedBatch, adaptive_resize, pad_images
from loongforge_fuse.resize.positions import batch_positions, grid_positions, masked_attention, masked_mean

__all__ = [
    "ResizeConfig",
    "ResizedBatch",
    "adaptive_resize",
    "batch_positions",
    "grid_positions",
    "masked_attention",
    "masked_mean",
    "pad_images",
]
