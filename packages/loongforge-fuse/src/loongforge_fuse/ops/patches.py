"""Patches of images of mixed resolution as rows of one matrix, and the patch embedding built on it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.kernels.launcher import KernelUnavailableError
from loongforge_fuse.kernels.specs import KernelSpec, Option
from loongforge_fuse.ops._common import (
    BLOCK,
    CODES,
    Context,
    define,
    differentiable,
    fell_back,
    kernel,
    plain,
)
from loongforge_fuse.ops.image import affine

TABLE_COLUMNS = 4
_PATCHES = (14, 16)
_MAX_THREADS = 2**31  # the kernels count threads in 32 bits
_CHANNELS = 3


def patch_table(
    sizes: Sequence[tuple[int, int]], patch: int, *, planar: bool, channels: int = 3, start: int = 0
) -> Tensor:
    """Describe every patch of images that lie one after the other in a flat buffer.

    Args:
        sizes: (H, W) of each image in pixels, multiples of `patch`.
        patch: side of a patch in pixels.
        planar: True: images are (C, H, W); False: (H, W, C).
        channels: channels of every image.
        start: element at which the first image begins.

    Returns:
        int64 (P, 4) on the CPU, patches in raster order, image after image: origin, row step, pixel step and
        channel step in elements. An origin of -1 marks a patch that is left out (a row of zeros).

    Raises:
        ValueError: a size is not a multiple of `patch`.
    """
    blocks, offset = [], start
    for height, width in sizes:
        if height % patch or width % patch:
            message = f"patch_table: image sizes must be multiples of {patch}, got {height} x {width}"
            raise ValueError(message)
        row, pixel, channel = (width, 1, height * width) if planar else (width * channels, channels, 1)
        y = torch.arange(0, height, patch, dtype=torch.int64).view(-1, 1)
        x = torch.arange(0, width, patch, dtype=torch.int64).view(1, -1)
        origin = (offset + y * row + x * pixel).reshape(-1, 1)
        steps = torch.tensor([[row, pixel, channel]], dtype=torch.int64).expand(origin.shape[0], -1)
        blocks.append(torch.cat((origin, steps), dim=1))
        offset += height * width * channels
    return torch.cat(blocks) if blocks else torch.zeros(0, TABLE_COLUMNS, dtype=torch.int64)


def padded_length(patch: int, channels: int = 3) -> int:
    """Return the row length: patch * patch * channels, rounded up to a multiple of 8 for the tensor cores."""
    return -(-patch * patch * channels // 8) * 8


def _options(patch: int, *, last: bool, planar: bool, masked: bool) -> dict[str, Option]:
    return {"patch": patch, "channels": _CHANNELS, "last": last, "planar": planar, "masked": masked}


def rows_spec(x: str, y: str, patch: int, *, last: bool, planar: bool, masked: bool) -> KernelSpec:
    """Return the specification of the gather kernel: two special forms for runs of memory, and the general
    one.
    """
    options = _options(patch, last=last, planar=planar, masked=masked)
    maker = "patch_rows"
    if x == "u8" and last and not planar:
        maker, options = "patch_runs", {k: options[k] for k in ("patch", "channels", "masked")}
    elif x == y != "f32" and planar and not last:
        maker, options = "patch_lines", {k: options[k] for k in ("patch", "channels", "masked")}
    else:
        options["x"] = x
    arguments = "PPPPqffffff"
    return KernelSpec(
        module="image", maker=maker, options={"y": y, **options}, arguments=arguments, vector=False
    )


def rows_backward_spec(g: str, y: str, patch: int, *, last: bool, planar: bool, masked: bool) -> KernelSpec:
    """Return the specification of the scatter kernel of the backward pass."""
    options = _options(patch, last=last, planar=planar, masked=masked)
    maker = "patch_rows_backward"
    if g == y != "f32" and planar and not last:
        maker, options = "patch_lines_backward", {k: options[k] for k in ("patch", "channels", "masked")}
    else:
        options["g"] = g
    return KernelSpec(
        module="image", maker=maker, options={"y": y, **options}, arguments="PPPPq", vector=False
    )


@cache
def _rows_function(
    device: int,
    x: str,
    y: str,
    patch: int,
    last: bool,  # noqa: FBT001 - a cache key
    planar: bool,  # noqa: FBT001
    masked: bool,  # noqa: FBT001
) -> Function:
    return kernel(rows_spec(x, y, patch, last=last, planar=planar, masked=masked), device)


@cache
def _rows_backward_function(
    device: int,
    g: str,
    y: str,
    patch: int,
    last: bool,  # noqa: FBT001 - a cache key
    planar: bool,  # noqa: FBT001
    masked: bool,  # noqa: FBT001
) -> Function:
    return kernel(rows_backward_spec(g, y, patch, last=last, planar=planar, masked=masked), device)


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


def _rows_reference(
    pixels: Tensor,
    table: Tensor,
    mask: Tensor | None,
    patch: int,
    last: bool,  # noqa: FBT001 - the schema's order
    planar: bool,  # noqa: FBT001
    mean: list[float],
    std: list[float],
    dtype: torch.dtype,
) -> Tensor:
    index, channel = _offsets(patch, _CHANNELS, last, table)
    valid = _valid(table, mask).unsqueeze(1)
    values = pixels[torch.where(valid, index, torch.zeros_like(index))]
    if pixels.dtype == torch.uint8:
        a, b = affine(mean, std, _CHANNELS)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        factor = torch.tensor(a, dtype=wide, device=pixels.device)[channel]
        values = values.to(wide) * factor + torch.tensor(b, dtype=wide, device=pixels.device)[channel]
    rows = torch.where(valid, values, torch.zeros_like(values)).to(dtype)
    return functional.pad(rows, (0, padded_length(patch) - rows.shape[1]))


def _rows_cuda(
    pixels: Tensor,
    table: Tensor,
    mask: Tensor | None,
    patch: int,
    last: bool,  # noqa: FBT001 - the schema's order
    planar: bool,  # noqa: FBT001
    mean: list[float],
    std: list[float],
    dtype: torch.dtype,
) -> Tensor:
    code = "u8" if pixels.dtype == torch.uint8 else CODES.get(pixels.dtype)
    reason = None
    if code is None or dtype not in CODES:
        reason = f"dtypes {pixels.dtype} to {dtype}"
    elif patch not in _PATCHES:
        reason = f"patch {patch}"
    elif table.shape[0] * padded_length(patch) // 8 >= _MAX_THREADS:
        reason = f"{table.shape[0]} patches"
    call = None
    if reason is None and code is not None:
        try:
            call = _rows_function(
                pixels.get_device(), code, CODES[dtype], patch, last, planar, mask is not None
            )
        except KernelUnavailableError as error:
            reason = str(error)
    if call is None:
        fell_back("masked_unfold", reason or "no kernel")
        return _rows_reference(pixels, table, mask, patch, last, planar, mean, std, dtype)
    pixels, table = pixels.contiguous(), table.contiguous()
    keep = None if mask is None else mask.contiguous()
    patches, length = table.shape[0], padded_length(patch)
    out = pixels.new_empty((patches, length), dtype=dtype)
    if patches:
        a, b = affine(mean, std, _CHANNELS) if code == "u8" else ([1.0] * 3, [0.0] * 3)
        pointers = (
            pixels.data_ptr(),
            table.data_ptr(),
            0 if keep is None else keep.data_ptr(),
            out.data_ptr(),
        )
        # One warp a patch, or one thread a vector.
        by_patch = code == CODES[dtype] != "f32" and planar and not last
        threads = 32 * patches if by_patch else patches * length // 8
        grid = (-(-threads // BLOCK), 1)
        call.run(*grid, (*pointers, patches, *a, *b))
    return out


def _rows_backward_reference(
    grad: Tensor,
    table: Tensor,
    mask: Tensor | None,
    patch: int,
    last: bool,  # noqa: FBT001 - the schema's order
    planar: bool,  # noqa: FBT001
    count: int,
    dtype: torch.dtype,
) -> Tensor:
    index, _ = _offsets(patch, _CHANNELS, last, table)
    valid = _valid(table, mask)
    out = grad.new_zeros(count, dtype=dtype)
    out[index[valid].reshape(-1)] = grad[valid, : index.shape[1]].reshape(-1).to(dtype)
    return out


def _rows_backward_cuda(
    grad: Tensor,
    table: Tensor,
    mask: Tensor | None,
    patch: int,
    last: bool,  # noqa: FBT001 - the schema's order
    planar: bool,  # noqa: FBT001
    count: int,
    dtype: torch.dtype,
) -> Tensor:
    grad, table = grad.contiguous(), table.contiguous()
    reason = None
    if grad.dtype not in CODES or dtype not in CODES:
        reason = f"dtypes {grad.dtype} to {dtype}"
    elif patch not in _PATCHES:
        reason = f"patch {patch}"
    call = None
    if reason is None:
        try:
            codes = CODES[grad.dtype], CODES[dtype]
            call = _rows_backward_function(grad.get_device(), *codes, patch, last, planar, mask is not None)
        except KernelUnavailableError as error:
            reason = str(error)
    if call is None:
        fell_back("masked_unfold_backward", reason or "no kernel")
        return _rows_backward_reference(grad, table, mask, patch, last, planar, count, dtype)
    keep = None if mask is None else mask.contiguous()
    out = grad.new_zeros(count, dtype=dtype)
    if table.shape[0]:
        pointers = (grad.data_ptr(), table.data_ptr(), 0 if keep is None else keep.data_ptr(), out.data_ptr())
        grid = (-(-table.shape[0] // (BLOCK // 32)), 1)  # one warp a patch
        call.run(*grid, (*pointers, table.shape[0]))
    return out


_UNFOLD = define(
    "masked_unfold(Tensor pixels, Tensor table, Tensor? mask, int patch, bool last, bool planar,"
    " float[] mean, float[] std, ScalarType dtype) -> Tensor",
    cpu=_rows_reference,
    cuda=_rows_cuda,
    fake=lambda pixels, table, mask, patch, last, planar, mean, std, dtype: pixels.new_empty(
        (table.shape[0], padded_length(patch)), dtype=dtype
    ),
)
define(
    "masked_unfold_backward(Tensor grad, Tensor table, Tensor? mask, int patch, bool last, bool planar,"
    " int count, ScalarType dtype) -> Tensor",
    cpu=_rows_backward_reference,
    cuda=_rows_backward_cuda,
    fake=lambda grad, table, mask, patch, last, planar, count, dtype: grad.new_empty(count, dtype=dtype),
)


def _setup(ctx: Context, inputs: tuple, output: Tensor) -> None:
    pixels, table, mask, patch, last, planar, _, _, _ = inputs
    ctx.save_for_backward(table, mask)
    ctx.planar = planar
    ctx.patch, ctx.last, ctx.count, ctx.dtype = patch, last, pixels.shape[0], pixels.dtype


def _grad(ctx: Context, grad: Tensor) -> tuple:
    table, mask = ctx.saved_tensors
    dx = None
    if ctx.needs_input_grad[0]:
        dx = torch.ops.loongforge.masked_unfold_backward(
            grad, table, mask, ctx.patch, ctx.last, ctx.planar, ctx.count, ctx.dtype
        )
    return dx, *([None] * 8)


differentiable(_UNFOLD, cuda=_rows_cuda, setup_context=_setup, backward=_grad)


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
    affine(mean, std, _CHANNELS)
    form = pixels.dtype != torch.uint8 if planar is None else planar
    if plain(pixels, table, mask) and not (torch.is_grad_enabled() and pixels.requires_grad):
        return _rows_cuda(pixels, table, mask, patch, last, form, list(mean), list(std), dtype)
    return torch.ops.loongforge.masked_unfold(
        pixels, table, mask, patch, last, form, list(mean), list(std), dtype
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

    Returns:
        (P, D) in the type of the weight; differentiable in weight, bias and, for float pixels, pixels.
    """
    convolution = weight.dim() == 4
    expected = (_CHANNELS, patch, patch) if convolution else (patch * patch * _CHANNELS,)
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
    )
    flat = weight.reshape(weight.shape[0], -1)
    flat = functional.pad(flat, (0, rows.shape[1] - flat.shape[1]))
    out = functional.linear(rows, flat, bias)
    if mask is not None and bias is not None:
        out = out.masked_fill(~mask.unsqueeze(1), 0.0)
    return out
