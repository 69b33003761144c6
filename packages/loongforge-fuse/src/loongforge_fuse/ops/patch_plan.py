"""Patch tables, and which kernel gathers or scatters patches of which kind. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loongforge_fuse.kernels.specs import KernelSpec, Option

TABLE_COLUMNS = 4
CHANNELS = 3
PATCHES = (14, 16)  # sides that have kernels
_ROWS_ARGUMENTS, _BACK_ARGUMENTS = "PPPPqffffff", "PPPPq"
_WARP = 32
# Patches that a warp takes together, by side: 3 x 21 or 4 x 24 pairs of bytes fill its lanes.
_STRIP = {14: 3, 16: 4}
_STRIP_BLOCK, _WIDE_BLOCK = 128, 192

# Ways to clear the buffer that gradients of patches go to: from its end on, by the vectors that a thread
# clears, or torch's.
CLEAR_JOB, CLEAR_WAYS = "masked_unfold clearing", ("down 4", "down 1", "torch")


def clear_spec(way: str) -> KernelSpec:
    """Return the specification of the kernel that clears a buffer, for any way but torch's."""
    return KernelSpec(
        module="clearing", maker="clear_down", options={"each": int(way.split()[1])}, arguments="Pqq"
    )


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


def padded_length(patch: int, channels: int = CHANNELS) -> int:
    """Return the row length: patch * patch * channels, rounded up to a multiple of 8 for the tensor cores."""
    return -(-patch * patch * channels // 8) * 8


def _tile_ways(code: str, patch: int, *, scatter: bool) -> tuple[str, ...]:
    # Float32 takes twice the shared memory. "walk": a fixed grid, the next tile read ahead. "min": blocks
    # that must fit on a multiprocessor: 14 addresses at once cost the registers of as many more warps.
    if code == "f32":
        return "tiles 8", "tiles 4"
    if not scatter:
        return "tiles 8 min 7", "tiles 4 min 12", "tiles 8", "tiles 8 walk 6"
    if patch == 14:
        # Lines of 28 bytes leave sectors half written where tiles meet: wide tiles meet less often, and
        # those of 18 patches nowhere in an image of 252 pixels.
        return "tiles 18 min 4", "tiles 16", "tiles 18", "tiles 36 min 2", "tiles 8"
    return "tiles 8", "tiles 4 min 12", "tiles 8 min 7"


def gather_ways(x: str, y: str, patch: int, *, last: bool, planar: bool) -> tuple[str, ...]:
    """Return the kernels that gather patches of this kind, the default first; see ``variants``."""
    if x == "u8" and last and not planar:
        strips = ("strips", "strips min 10", "strips walk 8")
        # Six warps take the patches of a line of 252 pixels: words that two of them need are read once.
        words = ("words min 12", "words min 14", "words walk 9", "words wide min 8", "words wide min 9")
        return (*words, *strips, "runs") if patch % 8 else ("vectors", "runs", "strips")
    if x == y and planar != last:
        return _tile_ways(y, patch, scatter=False)
    return ("rows",)


def scatter_ways(g: str, y: str, patch: int, *, last: bool, planar: bool) -> tuple[str, ...]:
    """Return the kernels that scatter gradients of this kind, the default first."""
    return _tile_ways(y, patch, scatter=True) if g == y and planar != last else ("rows",)


def tile_of(way: str) -> int:
    """Return the patches that a block of the way takes, such as 16 for ``"tiles 16"``."""
    return int(way.split()[1])


def _fitting(way: str) -> int:
    """Return how many blocks must fit on a processor: 7 for ``"tiles 8 min 7"``, 0 where it says nothing."""
    words = way.split()
    return int(words[-1]) if words[-2:-1] in (["min"], ["walk"]) else 0


def _tile_block(y: str, patch: int, tile: int) -> int:
    words = tile * patch * CHANNELS // (1 if y == "f32" else 2)
    return -(-words // _WARP) * _WARP


def rows_spec(x: str, y: str, patch: int, way: str, *, last: bool, planar: bool, masked: bool) -> KernelSpec:
    """Return the specification of a gathering kernel; `way` is one of :func:`gather_ways`."""
    common: dict[str, Option] = {"y": y, "patch": patch, "masked": masked}
    if way.startswith(("strips", "words")):
        options = {**common, "tile": _STRIP[patch], "walk": "walk" in way}
        return KernelSpec(
            module="patch_bytes", maker=f"patch_{way.split()[0]}", options=options, arguments=_ROWS_ARGUMENTS,
            block=_WIDE_BLOCK if "wide" in way else _STRIP_BLOCK, min_blocks=_fitting(way),
        )  # fmt: skip
    if way in ("runs", "vectors"):
        return KernelSpec(
            module="patch_bytes", maker=f"patch_{way}", options=common, arguments=_ROWS_ARGUMENTS
        )
    if way.startswith("tiles"):
        options = {**common, "channels": CHANNELS, "last": last, "tile": tile_of(way), "walk": "walk" in way}
        return KernelSpec(
            module="patch_tiles", maker="patch_tiles", options=options, arguments=_ROWS_ARGUMENTS,
            # Reading ahead with a mask, or with lines of three channels, takes more registers.
            block=_tile_block(y, patch, tile_of(way)),
            min_blocks=_fitting(way) * 2 // 3 if "walk" in way and (masked or last) else _fitting(way),
        )  # fmt: skip
    options = {**common, "channels": CHANNELS, "x": x, "last": last, "planar": planar}
    return KernelSpec(module="patches", maker="patch_rows", options=options, arguments=_ROWS_ARGUMENTS)


def rows_backward_spec(
    g: str, y: str, patch: int, way: str, *, last: bool, planar: bool, masked: bool, fill: bool
) -> KernelSpec:
    """Return the specification of a scattering kernel; `way` is one of :func:`scatter_ways`."""
    options: dict[str, Option] = {
        "y": y, "patch": patch, "channels": CHANNELS, "last": last, "masked": masked, "fill": fill,
    }  # fmt: skip
    if way.startswith("tiles"):
        return KernelSpec(
            module="patch_tiles", maker="patch_tiles_backward", arguments=_BACK_ARGUMENTS,
            options={**options, "tile": tile_of(way), "walk": "walk" in way},
            block=_tile_block(y, patch, tile_of(way)), min_blocks=_fitting(way),
        )  # fmt: skip
    return KernelSpec(
        module="patches", maker="patch_rows_backward", options={**options, "g": g, "planar": planar},
        arguments=_BACK_ARGUMENTS, vector=False,
    )  # fmt: skip


def gather_blocks(spec: KernelSpec, patches: int, processors: int) -> int:
    """Return the number of blocks of a gathering kernel on a device of so many multiprocessors."""
    if spec.maker == "patch_tiles":
        return _walking(spec, -(-patches // int(spec.options["tile"])), processors)
    if spec.maker in ("patch_strips", "patch_words"):
        return _walking(spec, -(-patches // (int(spec.options["tile"]) * (spec.block // _WARP))), processors)
    if spec.maker == "patch_vectors":
        return -(-patches // (spec.block // _WARP))
    return -(-patches * padded_length(int(spec.options["patch"])) // 8 // spec.block)


def scatter_blocks(spec: KernelSpec, patches: int, processors: int) -> int:
    """Return the number of blocks of a scattering kernel on a device of so many multiprocessors."""
    if spec.maker == "patch_tiles_backward":
        return _walking(spec, -(-patches // int(spec.options["tile"])), processors)
    return -(-patches // (spec.block // _WARP))


def _walking(spec: KernelSpec, blocks: int, processors: int) -> int:
    """Return the blocks of a grid over all tiles, or of one that walks them: as many as fit at once."""
    return min(blocks, max(1, spec.min_blocks) * processors) if spec.options["walk"] else blocks
