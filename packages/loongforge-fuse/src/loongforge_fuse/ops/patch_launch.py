"""Launching the patch kernels: kernels by key, grids, outputs, fallbacks. No dispatcher, no autograd."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.kernels.specs import KernelSpec
from loongforge_fuse.ops import patch_reference
from loongforge_fuse.ops._common import CODES, fell_back, load_first, processors
from loongforge_fuse.ops.image import affine
from loongforge_fuse.ops.patch_plan import (
    CHANNELS,
    CLEAR_JOB,
    CLEAR_WAYS,
    PATCHES,
    clear_spec,
    gather_blocks,
    gather_ways,
    padded_length,
    rows_backward_spec,
    rows_spec,
    scatter_blocks,
    scatter_ways,
)
from loongforge_fuse.ops.variants import chosen, forget_on_change, in_turn

_MAX_THREADS = 2**31  # the kernels count threads in 32 bits
Loaded = tuple[Function, KernelSpec]
_gather_calls: dict[Hashable, Loaded] = {}
_scatter_calls: dict[Hashable, Loaded] = {}
forget_on_change(_gather_calls.clear)
forget_on_change(_scatter_calls.clear)
_clear_calls: dict[int, tuple[Function, KernelSpec] | None] = {}
forget_on_change(_clear_calls.clear)


def gather_job(x: str, y: str, patch: int, *, last: bool, planar: bool) -> str:
    """Name the choice between gathering kernels."""
    return f"masked_unfold {x} {y} {patch} {'last' if last else 'first'} {'planar' if planar else 'woven'}"


def scatter_job(g: str, y: str, patch: int, *, last: bool, planar: bool) -> str:
    """Name the choice between scattering kernels."""
    return gather_job(g, y, patch, last=last, planar=planar) + " backward"


def _refusal(dtypes: tuple[torch.dtype, torch.dtype], known: bool, patch: int, patches: int) -> str | None:  # noqa: FBT001
    if not known:
        return f"dtypes {dtypes[0]} to {dtypes[1]}"
    if patch not in PATCHES:
        return f"patch {patch}"
    return f"{patches} patches" if patches * padded_length(patch) // 8 >= _MAX_THREADS else None


def _gather(key: tuple[int, str, str, int, bool, bool, bool]) -> Loaded | None:
    found = _gather_calls.get(key)
    if found is None:
        device, x, y, patch, last, planar, masked = key
        form = {"last": last, "planar": planar}
        ways = in_turn(gather_job(x, y, patch, **form), gather_ways(x, y, patch, **form))
        specs = [rows_spec(x, y, patch, way, masked=masked, **form) for way in ways]
        loaded = load_first("masked_unfold", specs, device)
        if loaded is None:
            return None
        found = _gather_calls[key] = loaded[0], specs[loaded[1]]
    return found


def rows_cuda(
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
    code = "u8" if pixels.dtype == torch.uint8 else CODES.get(pixels.dtype)
    patches, length = table.shape[0], padded_length(patch)
    reason = _refusal((pixels.dtype, dtype), code is not None and dtype in CODES, patch, patches)
    found = None
    if reason is not None:
        fell_back("masked_unfold", reason)
    elif code is not None:
        found = _gather((pixels.get_device(), code, CODES[dtype], patch, last, planar, mask is not None))
    if found is None:
        return patch_reference.rows(pixels, table, mask, patch, last, planar, mean, std, dtype, complete)
    pixels, table = pixels.contiguous(), table.contiguous()
    keep = None if mask is None else mask.contiguous()
    out = pixels.new_empty((patches, length), dtype=dtype)
    if patches:
        a, b = affine(mean, std, CHANNELS) if code == "u8" else ([1.0] * CHANNELS, [0.0] * CHANNELS)
        masked_at = 0 if keep is None else keep.data_ptr()
        pointers = (pixels.data_ptr(), table.data_ptr(), masked_at, out.data_ptr())
        call, spec = found
        blocks = gather_blocks(spec, patches, processors(pixels.get_device()))
        call.run(blocks, 1, (*pointers, patches, *a, *b))
    return out


def _scatter(key: tuple[int, str, str, int, bool, bool, bool, bool]) -> Loaded | None:
    found = _scatter_calls.get(key)
    if found is None:
        device, g, y, patch, last, planar, masked, fill = key
        form = {"last": last, "planar": planar}
        ways = in_turn(scatter_job(g, y, patch, **form), scatter_ways(g, y, patch, **form))
        specs = [rows_backward_spec(g, y, patch, way, masked=masked, fill=fill, **form) for way in ways]
        loaded = load_first("masked_unfold_backward", specs, device)
        if loaded is None:
            return None
        found = _scatter_calls[key] = loaded[0], specs[loaded[1]]
    return found


def _cleared(grad: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` zeros on the device of `grad`."""
    device = grad.get_device()
    if device not in _clear_calls:
        way = chosen(CLEAR_JOB, CLEAR_WAYS)
        spec = None if way == "torch" else clear_spec(way)
        loaded = None if spec is None else load_first("masked_unfold_backward", [spec], device)
        _clear_calls[device] = None if spec is None or loaded is None else (loaded[0], spec)
    found = _clear_calls[device]
    if found is None or not count:
        return grad.new_zeros(count, dtype=dtype)
    out = grad.new_empty(count, dtype=dtype)
    call, spec = found
    vectors, rest = divmod(count * out.element_size(), 16)
    blocks = max(1, -(-vectors // (spec.block * int(spec.options["each"]))))
    call.run(blocks, 1, (out.data_ptr(), vectors, rest // 2))
    return out


def rows_backward_cuda(
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
    """Scatter the gradient of the rows back to `count` pixels.

    Without `complete` the buffer is cleared first, because pixels may belong to no patch.
    """
    grad, table = grad.contiguous(), table.contiguous()
    patches = table.shape[0]
    known = grad.dtype in CODES and dtype in CODES
    reason = _refusal((grad.dtype, dtype), known, patch, patches)
    found = None
    if reason is None and grad.data_ptr() & 15:
        reason = "a tensor cannot be read in 16-byte vectors"
    fill = complete and patches > 0
    if reason is not None:
        fell_back("masked_unfold_backward", reason)
    else:
        codes = CODES[grad.dtype], CODES[dtype]
        found = _scatter((grad.get_device(), *codes, patch, last, planar, mask is not None, fill))
    if found is None:
        return patch_reference.rows_backward(grad, table, mask, patch, last, planar, count, dtype, complete)
    keep = None if mask is None else mask.contiguous()
    out = grad.new_empty(count, dtype=dtype) if fill else _cleared(grad, count, dtype)
    if patches:
        masked_at = 0 if keep is None else keep.data_ptr()
        pointers = (grad.data_ptr(), table.data_ptr(), masked_at, out.data_ptr())
        call, spec = found
        blocks = scatter_blocks(spec, patches, processors(grad.get_device()))
        call.run(blocks, 1, (*pointers, patches))
    return out
