"""From vision patches to decoder tokens: pixel unshuffle by two, then an MLP."""

from __future__ import annotations

from torch import Tensor, nn


def pixel_unshuffle(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """Join each 2x2 cell of patches into one token.

    Args:
        tokens: (N, rows * columns, D) in raster order.
        rows: Patch rows, even.
        columns: Patch columns, even.

    Returns:
        (N, rows/2 * columns/2, 4 * D); feature index = channel * 4 + dy * 2 + dx.
    """
    n, _, d = tokens.shape
    x = tokens.reshape(n, rows // 2, 2, columns // 2, 2, d)
    return x.permute(0, 1, 3, 5, 2, 4).reshape(n, (rows // 2) * (columns // 2), 4 * d)


def connector_mlp(vision_width: int, language_width: int) -> nn.Sequential:
    """Return the two-layer connector; the exact (erf) GELU, LayerNorm epsilon 1e-5."""
    return nn.Sequential(
        nn.LayerNorm(4 * vision_width),
        nn.Linear(4 * vision_width, language_width),
        nn.GELU(),
        nn.Linear(language_width, language_width),
    )
