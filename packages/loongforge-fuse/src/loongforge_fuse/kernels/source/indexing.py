# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201
# mypy: ignore-errors
"""Index arithmetic of the image kernels, apart from memory access so that the simulator can run it too."""

from __future__ import annotations

from numba import cuda, int64, uint32


@cuda.jit(device=True, inline="always")
def patch_element(k, patch, channels, last):
    """Return (y, x, channel) of element k of a patch vector; `last`: channel fastest, else channel slowest.

    Everything goes through uint32: a 64-bit division by a constant costs several times as much.
    """
    if last:
        pixel = uint32(k) // uint32(channels)
        c = uint32(k) - uint32(pixel) * uint32(channels)
        y = uint32(pixel) // uint32(patch)
        return int64(y), int64(uint32(pixel) - uint32(y) * uint32(patch)), int64(c)
    plane = patch * patch
    c = uint32(k) // uint32(plane)
    rest = uint32(k) - uint32(c) * uint32(plane)
    y = uint32(rest) // uint32(patch)
    return int64(y), int64(uint32(rest) - uint32(y) * uint32(patch)), int64(c)


@cuda.jit(device=True, inline="always")
def next_element(y, x, c, patch, channels, last):
    """Return what follows (y, x, channel) in a patch vector, without a division."""
    if last:
        c += 1
        if c == channels:
            c = int64(0)
            x += 1
            if x == patch:
                x = int64(0)
                y += 1
    else:
        x += 1
        if x == patch:
            x = int64(0)
            y += 1
            if y == patch:
                y = int64(0)
                c += 1
    return y, x, c


@cuda.jit(device=True, inline="always")
def source_pixel(y, x, top, left, width, flip):
    """Return the pixel of the source image that output pixel (y, x) of a crop shows, mirrored when asked."""
    return top + y, left + (width - 1 - x if flip else x)
