"""uint8 images to normalised planes in half precision, with optional crop, mirror, padding and mixed
sizes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.kernels.specs import KernelSpec, Option
from loongforge_fuse.ops._common import BLOCK, CODES, define, fell_back, load_first, plain, resolve
from loongforge_fuse.ops.variants import forget_on_change, in_turn

_MAX_GRID_Y = 65535
_PIXELS = 4
TABLE_COLUMNS = 9


def affine(mean: Sequence[float], std: Sequence[float], channels: int) -> tuple[list[float], list[float]]:
    """Return factors a and b with pixel * a + b = (pixel / 255 - mean) / std."""
    if len(mean) != channels or len(std) != channels:
        message = (
            f"mean and std need one value for each of {channels} channels, got {len(mean)} and {len(std)}"
        )
        raise ValueError(message)
    if any(s == 0 for s in std):
        message = f"std must not hold 0, got {list(std)}"
        raise ValueError(message)
    return [1.0 / (255.0 * s) for s in std], [-m / s for m, s in zip(mean, std, strict=True)]


def planes_spec(y: str, pixels: int = 4) -> KernelSpec:
    """Return the specification of the whole-image kernel."""
    options: dict[str, Option] = {"y": y, "pixels": pixels}
    # Reads of 4 bytes and writes of 8 keep neighbouring threads closest together.
    return KernelSpec(
        module="image", maker="image_planes", options=options, arguments="PPqffffff", vector=False
    )


# Rows that one thread makes 8 pixels of: what they share is worked out once, and their reads wait together.
# "min": blocks that must fit on a multiprocessor.
TABLE_WAYS = ("2 min 4", "1", "1 min 6", "4")
TABLE_JOB = "image_table_to_half"


def table_spec(y: str, channels: int, *, vector: bool, way: str = "1") -> KernelSpec:
    """Return the specification of the table-driven kernel; `way` is one of `TABLE_WAYS`."""
    lines, _, limit = way.partition(" min ")
    # Four channels need more registers: they would spill under the limit, or with many lines.
    few = channels < 4
    return KernelSpec(
        module="image",
        maker="image_table",
        options={
            "y": y,
            "channels": channels,
            "vector": vector,
            "lines": int(lines) if few else min(2, int(lines)),
        },
        arguments="PPPqqfffffffff",
        min_blocks=int(limit) if limit and few else 0,
        vector=False,
    )


_planes_calls: dict[Hashable, Function] = {}
_table_calls: dict[Hashable, tuple[Function, int]] = {}
forget_on_change(_table_calls.clear)


def _planes_call(device: int, y: str) -> Function | None:
    key = (device, y)
    spec = planes_spec(y, _PIXELS)
    return _planes_calls.get(key) or resolve("image_to_half", _planes_calls, key, spec, device)


def _table_call(device: int, y: str, channels: int, *, vector: bool) -> tuple[Function, int] | None:
    """Return the kernel, and how many rows one of its threads makes pixels of."""
    key = (device, y, channels, vector)
    found = _table_calls.get(key)
    if found is None:
        ways = in_turn(TABLE_JOB, TABLE_WAYS) if vector else ("1",)
        specs = [table_spec(y, channels, vector=vector, way=way) for way in ways]
        loaded = load_first("image_table_to_half", specs, device)
        if loaded is None:
            return None
        found = _table_calls[key] = loaded[0], int(specs[loaded[1]].options["lines"])
    return found


def _normalised(planes: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Normalise (..., C, H, W) pixel values."""
    a, b = affine(mean, std, planes.shape[-3])
    wide = planes.to(torch.float64 if dtype == torch.float64 else torch.float32)
    factor = torch.tensor(a, dtype=wide.dtype, device=planes.device).view(-1, 1, 1)
    move = torch.tensor(b, dtype=wide.dtype, device=planes.device).view(-1, 1, 1)
    return (wide * factor + move).to(dtype).contiguous()


def _image_reference(image: Tensor, mean: list[float], std: list[float], dtype: torch.dtype) -> Tensor:
    return _normalised(image.movedim(-1, -3), mean, std, dtype)


def _image_cuda(image: Tensor, mean: list[float], std: list[float], dtype: torch.dtype) -> Tensor:
    height, width, channels = image.shape[-3:]
    plane = height * width
    images = image.numel() // max(1, plane * channels)
    image = image.contiguous()
    reason = None
    if dtype not in CODES:
        reason = f"dtype {dtype}"
    elif channels != 3:
        reason = f"{channels} channels"
    elif images > _MAX_GRID_Y:
        reason = f"more than {_MAX_GRID_Y} images"
    elif plane % 4 or image.data_ptr() & 3:
        reason = "pixels per image not a multiple of 4, or address not a multiple of 4 bytes"
    call = None
    if reason is not None:
        fell_back("image_to_half", reason)
    else:
        call = _planes_call(image.get_device(), CODES[dtype])
    if call is None:
        return _image_reference(image, mean, std, dtype)
    out = image.new_empty((*image.shape[:-3], 3, height, width), dtype=dtype)
    if images and plane:
        a, b = affine(mean, std, 3)
        grid = (-(-plane // (_PIXELS * BLOCK)), images)
        call.run(*grid, (image.data_ptr(), out.data_ptr(), plane, *a, *b))
    return out


def _image_fake(image: Tensor, mean: list[float], std: list[float], dtype: torch.dtype) -> Tensor:
    height, width, channels = image.shape[-3:]
    return image.new_empty((*image.shape[:-3], channels, height, width), dtype=dtype)


define(
    "image_to_half(Tensor image, float[] mean, float[] std, ScalarType dtype) -> Tensor",
    cpu=_image_reference,
    cuda=_image_cuda,
    fake=_image_fake,
)


def image_to_half(
    image: Tensor,
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Convert interleaved uint8 images to normalised planes: (pixel / 255 - mean) / std, in one pass.

    Args:
        image: uint8, (..., H, W, C), any leading dimensions.
        mean: one value for each channel, in units of 0 to 1.
        std: likewise; not 0.
        dtype: torch.bfloat16, torch.float16 or torch.float32.

    Returns:
        (..., C, H, W) in `dtype`, contiguous. No gradient: pixels are integers.

    Raises:
        ValueError: not uint8, fewer than 3 dimensions, or mean and std do not fit the channels.
    """
    if image.dtype != torch.uint8 or image.dim() < 3:
        found = f"{image.dtype} of shape {tuple(image.shape)}"
        message = f"image_to_half: image must be uint8 of shape (..., H, W, C), got {found}"
        raise ValueError(message)
    affine(mean, std, image.shape[-1])
    if plain(image):
        return _image_cuda(image, list(mean), list(std), dtype)
    return torch.ops.loongforge.image_to_half(image, list(mean), list(std), dtype)


def _gathered(data: Tensor, table: Tensor, height: int, width: int, channels: int, pad: float) -> Tensor:
    """Return the pixels that the table selects, as float32 (N, C, height, width)."""
    column = [table[:, i].view(-1, 1, 1, 1) for i in range(TABLE_COLUMNS)]
    y = torch.arange(height, device=data.device).view(1, 1, -1, 1)
    x = torch.arange(width, device=data.device).view(1, 1, 1, -1)
    c = torch.arange(channels, device=data.device).view(1, -1, 1, 1)
    offset, row_step, pixel_step, channel_step, top, left, crop_h, crop_w, flip = column
    inside = (y < crop_h) & (x < crop_w)
    sx = left + torch.where(flip != 0, crop_w - 1 - x, x)
    index = offset + c * channel_step + (top + y) * row_step + sx * pixel_step
    index = torch.where(inside, index, torch.zeros_like(index))
    pixels = data[index.expand(table.shape[0], channels, height, width)].float()
    return torch.where(inside, pixels, torch.full((), pad, device=data.device))


def _table_reference(
    data: Tensor,
    table: Tensor,
    height: int,
    width: int,
    mean: list[float],
    std: list[float],
    dtype: torch.dtype,
    pad: float,
) -> Tensor:
    channels = len(mean)
    if not table.shape[0] or not height or not width:
        return data.new_empty((table.shape[0], channels, height, width), dtype=dtype)
    return _normalised(_gathered(data, table, height, width, channels, pad), mean, std, dtype)


def _table_cuda(
    data: Tensor,
    table: Tensor,
    height: int,
    width: int,
    mean: list[float],
    std: list[float],
    dtype: torch.dtype,
    pad: float,
) -> Tensor:
    channels, images = len(mean), table.shape[0]
    reason = None if dtype in CODES else f"dtype {dtype}"
    if images > _MAX_GRID_Y or height * width >= 2**31:
        reason = f"{images} images of {height} x {width}"
    vector = width % 8 == 0
    found = None
    if reason is not None:
        fell_back("image_table_to_half", reason)
    else:
        found = _table_call(data.get_device(), CODES[dtype], channels, vector=vector)
    if found is None:
        return _table_reference(data, table, height, width, mean, std, dtype, pad)
    out = data.new_empty((images, channels, height, width), dtype=dtype)
    if out.numel():
        call, lines = found
        threads = -(-height // lines) * (width // (8 if vector else 1))
        a, b = affine(mean, std, channels)
        a, b = a + [0.0] * (4 - channels), b + [0.0] * (4 - channels)
        table = table.contiguous()
        pointers = (data.data_ptr(), table.data_ptr(), out.data_ptr())
        grid = (-(-threads // BLOCK), images)
        call.run(*grid, (*pointers, height, width, pad, *a, *b))
    return out


define(
    "image_table_to_half(Tensor data, Tensor table, int height, int width, float[] mean, float[] std,"
    " ScalarType dtype, float pad) -> Tensor",
    cpu=_table_reference,
    cuda=_table_cuda,
    fake=lambda data, table, height, width, mean, std, dtype, pad: data.new_empty(
        (table.shape[0], len(mean), height, width), dtype=dtype
    ),
)


def image_table(
    sizes: Sequence[tuple[int, int]],
    *,
    channels: int = 3,
    planar: bool = False,
    crops: Sequence[tuple[int, int, int, int]] | None = None,
    flips: Sequence[bool] | None = None,
) -> Tensor:
    """Describe images that lie one after the other in a flat uint8 buffer, for :func:`image_table_to_half`.

    Args:
        sizes: (H, W) of each image, in pixels.
        channels: 1 to 4.
        planar: False: interleaved (H, W, C); True: planes (C, H, W).
        crops: (top, left, height, width) of each image; None: whole images.
        flips: whether to mirror each image left to right; None: none.

    Returns:
        int64 tensor (N, 9) on the CPU: offset, row, pixel and channel step in bytes, crop, mirror flag.

    Raises:
        ValueError: a crop leaves its image or counts differ.
    """
    if not 1 <= channels <= 4:
        message = f"image_table: channels must be 1 to 4, got {channels}"
        raise ValueError(message)
    boxes = list(crops) if crops is not None else [(0, 0, h, w) for h, w in sizes]
    mirror = list(flips) if flips is not None else [False] * len(sizes)
    if not len(sizes) == len(boxes) == len(mirror):
        found = f"{len(sizes)} sizes, {len(boxes)} crops, {len(mirror)} flips"
        message = f"image_table: one crop and one flip per image are needed, got {found}"
        raise ValueError(message)
    rows, offset = [], 0
    for (h, w), (top, left, ch, cw), flip in zip(sizes, boxes, mirror, strict=True):
        if min(top, left, ch, cw) < 0 or top + ch > h or left + cw > w:
            message = f"image_table: crop {(top, left, ch, cw)} leaves the image of {h} x {w} pixels"
            raise ValueError(message)
        steps = (w, 1, h * w) if planar else (w * channels, channels, 1)
        rows.append((offset, *steps, top, left, ch, cw, int(flip)))
        offset += h * w * channels
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, TABLE_COLUMNS)


def image_table_to_half(
    data: Tensor,
    table: Tensor,
    size: tuple[int, int],
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    dtype: torch.dtype = torch.bfloat16,
    *,
    pad: float = 0.0,
) -> Tensor:
    """Crop, mirror, pad and normalise images of mixed sizes in one launch.

    Args:
        data: flat uint8 buffer that holds all images.
        table: int64 (N, 9) from :func:`image_table`, on the device of `data`. Its contents are trusted.
        size: (H, W) of every output image; what lies outside a crop is padded at the right and the bottom.
        mean: one value for each channel (1 to 4), in units of 0 to 1.
        std: likewise; not 0.
        dtype: torch.bfloat16, torch.float16 or torch.float32.
        pad: pixel value of the padding, 0 to 255, normalised like the others.

    Returns:
        (N, C, H, W) in `dtype`.

    Raises:
        ValueError: wrong types or shapes.
    """
    if data.dtype != torch.uint8 or data.dim() != 1:
        found = f"{data.dtype} of shape {tuple(data.shape)}"
        message = f"image_table_to_half: data must be a flat uint8 tensor, got {found}"
        raise ValueError(message)
    if table.dtype != torch.int64 or table.dim() != 2 or table.shape[1] != TABLE_COLUMNS:
        found = f"{table.dtype} of shape {tuple(table.shape)}"
        message = f"image_table_to_half: table must be int64 of shape (N, {TABLE_COLUMNS}), got {found}"
        raise ValueError(message)
    if not 1 <= len(mean) <= 4:
        message = f"image_table_to_half: 1 to 4 channels are supported, got {len(mean)}"
        raise ValueError(message)
    affine(mean, std, len(mean))
    data = data.contiguous()
    if plain(data, table):
        return _table_cuda(data, table, *size, list(mean), list(std), dtype, pad)
    return torch.ops.loongforge.image_table_to_half(data, table, *size, list(mean), list(std), dtype, pad)
