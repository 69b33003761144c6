"""Position embeddings on each image's true grid, and attention and pooling that padding cannot reach."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def grid_positions(table: Tensor, rows: int, columns: int) -> Tensor:
    """Resize a square table of learned positions to a grid.

    Bilinear with antialias in float32, so that a smaller grid averages instead of skipping.

    Args:
        table: ``(S * S, D)`` positions in raster order.
        rows: Patch rows of the image.
        columns: Patch columns.

    Returns:
        ``(rows * columns, D)`` in the table's dtype; the table itself when the grid is its own.

    Raises:
        ValueError: The table is not square, or the grid is empty.
    """
    side = round(table.shape[0] ** 0.5)
    if side * side != table.shape[0] or rows < 1 or columns < 1:
        message = (
            f"positions need a square table and a grid of at least 1x1, got {table.shape[0]} rows and "
            f"{rows}x{columns}"
        )
        raise ValueError(message)
    if (rows, columns) == (side, side):
        return table
    square = table.float().view(1, side, side, -1).permute(0, 3, 1, 2)
    resized = functional.interpolate(
        square, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True
    )
    return resized[0].flatten(1).t().to(table.dtype)


def batch_positions(table: Tensor, grids: Sequence[tuple[int, int]], *, padded: tuple[int, int]) -> Tensor:
    """Positions for images of different grids inside one padded grid.

    Every image gets the table resized to its own grid, not the padded one; padded places get zeros.

    Args:
        table: ``(S * S, D)``.
        grids: Patch rows and columns of each image.
        padded: Patch rows and columns of the padded grid.

    Returns:
        ``(N, padded rows * padded columns, D)`` in raster order of the padded grid.

    Raises:
        ValueError: An image's grid is larger than the padded one.
    """
    result = []
    for rows, columns in grids:
        if rows > padded[0] or columns > padded[1]:
            message = f"a grid of {rows}x{columns} does not fit the padded grid {padded[0]}x{padded[1]}"
            raise ValueError(message)
        own = grid_positions(table, rows, columns).view(rows, columns, -1)
        result.append(functional.pad(own, (0, 0, 0, padded[1] - columns, 0, padded[0] - rows)).flatten(0, 1))
    return torch.stack(result)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, keep: Tensor) -> Tensor:
    """Attend to valid keys only; a row with no valid key gives zeros, in values and gradients, on any back
    end.

    Args:
        query: ``(B, H, T, D)``.
        key: ``(B, H, K, D)``.
        value: ``(B, H, K, D)``.
        keep: ``(B, K)`` bool, true where a key is valid.
    """
    reachable = keep.any(dim=1)
    # A sample without valid keys attends to all, finitely, and its result is then dropped: softmax over
    # nothing would be NaN, and NaN times zero stays NaN in the gradients of shared weights.
    safe = keep | ~reachable[:, None]
    # What is masked may hold anything, infinities included, and 0 * inf is NaN.
    clean_key = torch.where(keep[:, None, :, None], key, 0)
    clean_value = torch.where(keep[:, None, :, None], value, 0)
    mixed = functional.scaled_dot_product_attention(
        query, clean_key, clean_value, attn_mask=safe[:, None, None, :]
    )
    return torch.where(reachable[:, None, None, None], mixed, 0)


def masked_mean(tokens: Tensor, keep: Tensor) -> Tensor:
    """Mean of the valid tokens of ``(B, T, D)``; zeros where a sample has none. Computed in float32."""
    weights = keep.to(torch.float32)[..., None]
    total = (torch.where(keep[..., None], tokens, 0).float() * weights).sum(dim=1)
    return (total / weights.sum(dim=1).clamp(min=1.0)).to(tokens.dtype)
