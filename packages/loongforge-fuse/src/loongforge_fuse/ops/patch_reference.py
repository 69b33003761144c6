"""Patches to rows and back in plain torch: the CPU implementation, the oracle, and the fallback on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from loongforge_fuse.ops.image import affine
from loongforge_fuse.ops.patch_plan import CHANNELS, TABLE_COLUMNS, padded_length


def _offsets(patch: int, channels: int, last: bool, table: Tensor) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Return the buffer index (P, K) of every patch element and the channel (K,) of each column."""
    order = (patch, patch, channels) if last else (channels, patch, patch)
    grid = torch.meshgrid(*(torch.arange(n, device=table.device) for n in order), indexing="ij")
    y, x, c = (g.reshape(1, -1) for g in (grid if last else (grid[1], grid[2], grid[0])))
    origin, row, pixel, channel = (table[:, i : i + 1] for i in range(TABLE_COLUMNS))
    return origin + y * row + x * pixel + c * channel, c.reshape(-1)


def _valid(table: Tensor, mask: Tensor | None) -> Tensor:
    valid = table[:, 0] >= 0
    return valid if mask is None else valid & mask.bool()


def rows(
    pixels: Tensor,
    table: Tensor,
    mask: Tensor | None,
    patch: int,
    last: bool,  # noqa: FBT001 - the schema's order
    planar: bool,  # noqa: FBT001
    mean: list[float],
    std: list[float],
    dtype: torch.dtype,
    complete: bool,  # noqa: FBT001
) -> Tensor:
    """Gather patches into rows; see :func:`loongforge_fuse.ops.masked_unfold`."""
    index, channel = _offsets(patch, CHANNELS, last, table)
    valid = _valid(table, mask).unsqueeze(1)
    values = pixels[torch.where(valid, index, torch.zeros_like(index))]
    if pixels.dtype == torch.uint8:
        a, b = affine(mean, std, CHANNELS)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        factor = torch.tensor(a, dtype=wide, device=pixels.device)[channel]
        values = values.to(wide) * factor + torch.tensor(b, dtype=wide, device=pixels.device)[channel]
    rows = torch.where(valid, values, torch.zeros_like(values)).to(dtype)
    return functional.pad(rows, (0, padded_length(patch) - rows.shape[1]))


def rows_backward(
    grad: Tensor,
    table: Tensor,
    mask: Tensor | None,
    patch: int,
    last: bool,  # noqa: FBT001 - the schema's order
    planar: bool,  # noqa: FBT001
    count: int,
    dtype: torch.dtype,
    complete: bool,  # noqa: FBT001
) -> Tensor:
    """Scatter the gradient of the rows back to `count` pixels."""
    index, _ = _offsets(patch, CHANNELS, last, table)
    valid = _valid(table, mask)
    out = grad.new_zeros(count, dtype=dtype)
    out[index[valid].reshape(-1)] = grad[valid, : index.shape[1]].reshape(-1).to(dtype)
    return out
