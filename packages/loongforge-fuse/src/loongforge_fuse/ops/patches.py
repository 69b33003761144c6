"""Patches of images of mixed resolution as rows of one matrix, and the patch embedding built on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from loongforge_fuse.ops import patch_reference
from loongforge_fuse.ops._common import Context, define, plain, register_derivative
from loongforge_fuse.ops.image import affine
from loongforge_fuse.ops.patch_launch import rows_backward_cuda, rows_cuda
from loongforge_fuse.ops.patch_plan import CHANNELS, TABLE_COLUMNS, padded_length

_UNFOLD = define(
    "masked_unfold(Tensor pixels, Tensor table, Tensor? mask, int patch, bool last, bool planar,"
    " float[] mean, float[] std, ScalarType dtype, bool complete) -> Tensor",
    cpu=patch_reference.rows,
    cuda=rows_cuda,
    fake=lambda pixels, table, mask, patch, last, planar, mean, std, dtype, complete: pixels.new_empty(
        (table.shape[0], padded_length(patch)), dtype=dtype
    ),
)
define(
    "masked_unfold_backward(Tensor grad, Tensor table, Tensor? mask, int patch, bool last, bool planar,"
    " int count, ScalarType dtype, bool complete) -> Tensor",
    cpu=patch_reference.rows_backward,
    cuda=rows_backward_cuda,
    fake=lambda grad, table, mask, patch, last, planar, count, dtype, complete: grad.new_empty(
        count, dtype=dtype
    ),
)


def _setup(ctx: Context, inputs: tuple, output: Tensor) -> None:
    pixels, table, mask, patch, last, planar, _, _, _, complete = inputs
    ctx.save_for_backward(table, mask)
    ctx.form = (patch, last, planar, pixels.shape[0], pixels.dtype, complete)


def _grad(ctx: Context, grad: Tensor) -> tuple:
    table, mask = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.loongforge.masked_unfold_backward(grad, table, mask, *ctx.form)
    return dx, *([None] * 9)


register_derivative(_UNFOLD, setup_context=_setup, backward=_grad)


def masked_unfold(
    pixels: Tensor,
    table: Tensor,
    *,
    patch: int,
    mask: Tensor | None = None,
    last: bool = True,
    planar: bool | None = None,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    dtype: torch.dtype = torch.bfloat16,
    complete: bool = False,
) -> Tensor:
    """Gather patches of images of mixed sizes into rows, normalising uint8 pixels on the way.

    Args:
        pixels: flat buffer of 3-channel images: uint8 (normalised), or a float type (copied, differentiable).
        table: int64 (P, 4) from :func:`patch_table`, on the device of `pixels`. Its contents are trusted.
        patch: side of a patch; 14 and 16 have kernels.
        mask: bool (P,); rows of patches that are False are zeros and their pixels are never read.
        last: order within a row: True: (y, x, channel); False: (channel, y, x) as in a convolution weight.
        planar: whether images are (C, H, W), as the table was made for; None: uint8 images are (H, W, C),
            float ones (C, H, W).
        mean: for uint8 pixels, in units of 0 to 1.
        std: likewise; not 0.
        dtype: type of the rows.
        complete: every pixel of the buffer belongs to one patch of the table, masked or not, and no origin is
            -1. A promise, not checked: it spares the backward pass clearing the gradient first.

    Returns:
        (P, K) with K = patch * patch * 3 rounded up to a multiple of 8; the padding is 0.

    Raises:
        ValueError: wrong types or shapes.
    """
    if pixels.dim() != 1:
        message = f"masked_unfold: pixels must be a flat buffer, got shape {tuple(pixels.shape)}"
        raise ValueError(message)
    if table.dtype != torch.int64 or table.dim() != 2 or table.shape[1] != TABLE_COLUMNS:
        found = f"{table.dtype} of shape {tuple(table.shape)}"
        message = f"masked_unfold: table must be int64 of shape (P, {TABLE_COLUMNS}), got {found}"
        raise ValueError(message)
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (table.shape[0],)):
        found = f"{mask.dtype} of shape {tuple(mask.shape)}"
        message = f"masked_unfold: mask must be bool of shape ({table.shape[0]},), got {found}"
        raise ValueError(message)
    affine(mean, std, CHANNELS)
    form = pixels.dtype != torch.uint8 if planar is None else planar
    if plain(pixels, table, mask) and not (torch.is_grad_enabled() and pixels.requires_grad):
        return rows_cuda(pixels, table, mask, patch, last, form, list(mean), list(std), dtype, complete)
    return torch.ops.loongforge.masked_unfold(
        pixels, table, mask, patch, last, form, list(mean), list(std), dtype, complete
    )


def masked_patch_embed(
    pixels: Tensor,
    table: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    patch: int,
    mask: Tensor | None = None,
    planar: bool | None = None,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    complete: bool = False,
) -> Tensor:
    """Patch embedding of images of mixed sizes: one gather and one matrix product.

    Args:
        pixels: as in :func:`masked_unfold`.
        table: as in :func:`masked_unfold`.
        weight: (D, 3, patch, patch) of a convolution, or (D, patch * patch * 3) of a linear layer over
            (y, x, channel).
        bias: (D,) or None.
        patch: side of a patch.
        mask: bool (P,); embeddings of patches that are False are zeros.
        planar: as in :func:`masked_unfold`.
        mean: for uint8 pixels.
        std: for uint8 pixels.
        complete: as in :func:`masked_unfold`.

    Returns:
        (P, D) in the type of the weight; differentiable in weight, bias and, for float pixels, pixels.
    """
    convolution = weight.dim() == 4
    expected = (CHANNELS, patch, patch) if convolution else (patch * patch * CHANNELS,)
    if tuple(weight.shape[1:]) != expected:
        wanted = ", ".join(map(str, expected))
        message = f"masked_patch_embed: weight must have shape (D, {wanted}), got {tuple(weight.shape)}"
        raise ValueError(message)
    rows = masked_unfold(
        pixels,
        table,
        patch=patch,
        mask=mask,
        last=not convolution,
        planar=planar,
        mean=mean,
        std=std,
        dtype=weight.dtype,
        complete=complete,
    )
    flat = weight.reshape(weight.shape[0], -1)
    flat = functional.pad(flat, (0, rows.shape[1] - flat.shape[1]))
    out = functional.linear(rows, flat, bias)
    if mask is not None and bias is not None:
        out = out.masked_fill(~mask.unsqueeze(1), 0.0)
    return out
