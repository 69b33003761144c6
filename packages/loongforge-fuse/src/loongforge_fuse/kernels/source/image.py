# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Image kernels: uint8 pixels to normalised half planes, patches of mixed-size images to matrix rows and
back.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int64, uint32

from loongforge_fuse.kernels.source.indexing import patch_element, source_pixel
from loongforge_fuse.kernels.source.intrinsics import (
    LOAD_SCALAR,
    LOAD_VECTOR,
    STORE_SCALAR,
    STORE_VECTOR,
    global_thread,
    load_i64,
    load_u8,
    load_word,
    load_words4,
)

Kernel = Callable[..., None]


@cuda.jit(device=True, inline="always")
def byte_of(words, position):
    """Byte `position` of an array of words as float32."""
    return float32((words[position >> 2] >> uint32(8 * (position & 3))) & uint32(0xFF))


def image_planes(*, y: str, pixels: int) -> Kernel:
    """Kernel (bytes, out, plane, a0, a1, a2, b0, b1, b2): interleaved RGB to planes, blockIdx.y is the image.

    A thread converts `pixels` (8 or 16) neighbouring pixels; `plane` (pixels in an image) is a multiple of
    it.
    """
    store = STORE_VECTOR[y]
    words_each = 3 * pixels // 4
    vectors_each = pixels // 8

    def kernel(pin, pout, plane, a0, a1, a2, b0, b1, b2):
        i = global_thread()
        words = cuda.local.array(words_each, uint32)
        v = cuda.local.array(8, float32)
        a = cuda.local.array(3, float32)
        b = cuda.local.array(3, float32)
        if i * pixels < plane:
            a[0], a[1], a[2] = a0, a1, a2
            b[0], b[1], b[2] = b0, b1, b2
            image = int64(cuda.blockIdx.y)
            start = (image * plane + i * pixels) * 3
            if pixels == 16:
                for w in range(3):
                    load_words4(pin, start + 16 * w, words, 4 * w)
            else:
                for w in range(words_each):
                    words[w] = load_word(pin, start + 4 * w)
            for c in range(3):
                for part in range(vectors_each):
                    for k in range(8):
                        v[k] = byte_of(words, (8 * part + k) * 3 + c) * a[c] + b[c]
                    at = ((image * 3 + c) * plane + i * pixels) // 8 + part
                    store(pout, at, v, 0)

    return kernel


def image_table(*, y: str, vector: bool) -> Kernel:
    """Kernel (bytes, table, out, images, height, width, channels, pad, a0, a1, a2, a3, b0, b1, b2, b3).

    A table row is (offset, row_step, pixel_step, channel_step, top, left, height, width, flip), steps in
    bytes; pixels of the output outside the crop get `pad`, a pixel value. One thread makes 8 (or 1) pixels
    of a row of one plane.
    """
    store, store1 = STORE_VECTOR[y], STORE_SCALAR[y]
    each = 8 if vector else 1

    def kernel(pin, table, pout, images, height, width, channels, pad, a0, a1, a2, a3, b0, b1, b2, b3):
        i = global_thread()
        per_row = width // each
        row = i // per_row
        v = cuda.local.array(8, float32)
        if row < images * channels * height:
            x0 = (i - row * per_row) * each
            plane = row // height
            yy = row - plane * height
            image = plane // channels
            c = plane - image * channels
            a = a0 if c == 0 else (a1 if c == 1 else (a2 if c == 2 else a3))
            b = b0 if c == 0 else (b1 if c == 1 else (b2 if c == 2 else b3))
            t = image * 9
            base = load_i64(table, t) + c * load_i64(table, t + 3)
            row_step = load_i64(table, t + 1)
            pixel_step = load_i64(table, t + 2)
            top = load_i64(table, t + 4)
            left = load_i64(table, t + 5)
            crop_h = load_i64(table, t + 6)
            crop_w = load_i64(table, t + 7)
            flip = load_i64(table, t + 8) != 0
            for k in range(each):
                value = pad
                if yy < crop_h and x0 + k < crop_w:
                    sy, sx = source_pixel(yy, x0 + k, top, left, crop_w, flip)
                    value = float32(load_u8(pin, base + sy * row_step + sx * pixel_step))
                v[k] = value * a + b
            if vector:
                store(pout, (row * width + x0) >> 3, v, 0)
            else:
                store1(pout, row * width + x0, v[0])

    return kernel


def patch_rows(*, x: str, y: str, patch: int, channels: int, last: bool, masked: bool) -> Kernel:
    """Kernel (pixels, table, mask, out, patches, a0, a1, a2, b0, b1, b2): gather patches into matrix rows.

    A table row is (origin, row_step, pixel_step, channel_step) in elements of the pixel buffer, whose type
    `x` is "u8" (normalised by a and b) or a float type (copied). Rows have patch * patch * channels
    elements, padded with zeros to a multiple of 8; a row whose origin is negative or whose mask byte is 0
    is all zeros and reads nothing. One thread makes one vector.
    """
    load = load_u8 if x == "u8" else LOAD_SCALAR[x]
    store = STORE_VECTOR[y]
    length = patch * patch * channels
    per_row = -(-length // 8)
    normalise = x == "u8"

    def kernel(pin, table, mask, pout, patches, a0, a1, a2, b0, b1, b2):
        i = global_thread()
        row = i // per_row
        v = cuda.local.array(8, float32)
        if row < patches:
            k0 = (i - row * per_row) * 8
            origin = load_i64(table, 4 * row)
            valid = origin >= 0
            if masked:
                valid = valid and load_u8(mask, row) != 0
            for e in range(8):
                v[e] = float32(0.0)
            if valid:
                row_step = load_i64(table, 4 * row + 1)
                pixel_step = load_i64(table, 4 * row + 2)
                channel_step = load_i64(table, 4 * row + 3)
                for e in range(8):
                    k = k0 + e
                    if k < length:
                        py, px, c = patch_element(k, patch, channels, last)
                        value = float32(
                            load(pin, origin + py * row_step + px * pixel_step + c * channel_step)
                        )
                        if normalise:
                            a = a0 if c == 0 else (a1 if c == 1 else a2)
                            b = b0 if c == 0 else (b1 if c == 1 else b2)
                            value = value * a + b
                        v[e] = value
            store(pout, i, v, 0)

    return kernel


def patch_rows_backward(*, g: str, y: str, patch: int, channels: int, last: bool, masked: bool) -> Kernel:
    """Kernel (grad_rows, table, mask, grad_pixels, patches): the gradient of :func:`patch_rows`.

    Patches do not overlap, so every pixel has one writer; the caller cleared the buffer.
    """
    load, store = LOAD_VECTOR[g], STORE_SCALAR[y]
    length = patch * patch * channels
    per_row = -(-length // 8)

    def kernel(pg, table, mask, pout, patches):
        i = global_thread()
        row = i // per_row
        v = cuda.local.array(8, float32)
        if row < patches:
            k0 = (i - row * per_row) * 8
            origin = load_i64(table, 4 * row)
            valid = origin >= 0
            if masked:
                valid = valid and load_u8(mask, row) != 0
            if valid:
                row_step = load_i64(table, 4 * row + 1)
                pixel_step = load_i64(table, 4 * row + 2)
                channel_step = load_i64(table, 4 * row + 3)
                load(pg, i, v, 0)
                for e in range(8):
                    k = k0 + e
                    if k < length:
                        py, px, c = patch_element(k, patch, channels, last)
                        store(pout, origin + py * row_step + px * pixel_step + c * channel_step, v[e])

    return kernel
