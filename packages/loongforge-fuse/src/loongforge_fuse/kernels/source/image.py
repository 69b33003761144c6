# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Image kernels: uint8 pixels to normalised planes, of whole images or of what a table selects."""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32

from loongforge_fuse.kernels.source.common import global_thread
from loongforge_fuse.kernels.source.indexing import source_pixel
from loongforge_fuse.kernels.source.intrinsics import (
    EXPAND,
    STORE,
    STORE_SCALAR,
    load_i64,
    load_u8,
    load_word,
    misalignment,
    word_between,
)

Kernel = Callable[..., None]


@cuda.jit(device=True, inline="always")
def byte_of(words, position):
    """Byte `position` of an array of words as float32."""
    return float32((words[position >> 2] >> uint32(8 * (position & 3))) & uint32(0xFF))


def image_planes(*, y: str, pixels: int) -> Kernel:
    """Kernel (bytes, out, plane, a0, a1, a2, b0, b1, b2): interleaved RGB to planes, blockIdx.y is the image.

    A thread converts `pixels` (4 or 8) neighbouring pixels; `plane` (pixels in an image) is a multiple of it.
    Four keep the reads of neighbouring threads closest together.
    """
    store = STORE[y, pixels]
    words_each = 3 * pixels // 4

    def kernel(pin, pout, plane, a0, a1, a2, b0, b1, b2):
        i = global_thread()
        words = cuda.local.array(words_each, uint32)
        v = cuda.local.array(pixels, float32)
        a = cuda.local.array(3, float32)
        b = cuda.local.array(3, float32)
        if i * pixels < plane:
            a[0], a[1], a[2] = a0, a1, a2
            b[0], b[1], b[2] = b0, b1, b2
            image = int64(cuda.blockIdx.y)
            start = (image * plane + i * pixels) * 3
            for w in range(words_each):
                words[w] = load_word(pin, start + 4 * w)
            base = (image * 3 * plane) // pixels + i
            for c in range(3):
                for k in range(pixels):
                    v[k] = byte_of(words, k * 3 + c) * a[c] + b[c]
                store(pout, base + c * (plane // pixels), v, 0)

    return kernel


@cuda.jit(device=True, inline="always")
def load_window(pin, offset, words, held):
    """Fill words[0:held] with the bytes from any byte offset on.

    Reads whole aligned words, so up to 3 bytes beside the window are read too; they lie in words that the
    window touches, hence in the same allocation.
    """
    above = misalignment(pin, offset) & 3
    base = offset - above
    bits = uint32(8 * above)
    low = load_word(pin, base)
    for w in range(held):
        high = uint32(0)
        if w + 1 < held or above > 0:
            high = load_word(pin, base + 4 * (w + 1))
        words[w] = word_between(low, high, bits)
        low = high


@cuda.jit(device=True, inline="always")
def window_words(pin, offset, count, first, last, raw, position):
    """Load the aligned words that hold bytes `first` to `last` - 1 of a window of `count` words from any byte
    offset on; raw[position : position + count + 1] can then be shifted into place. Return the shift in bits.

    A whole window is read as it lies. Of a part only words that hold some of it are read, some of them
    twice, so that no address needs a branch of its own. Up to 3 bytes beside the part are read too; they lie
    in words that it touches, hence in the same allocation.
    """
    above = int32(misalignment(pin, offset) & 3)
    base = offset - above
    if first == int32(0) and last == int32(4 * count):
        for w in range(count):
            raw[position + w] = load_word(pin, base + 4 * w)
        beyond = int64(4 * count) if above > int32(0) else int64(4 * count - 4)
        raw[position + count] = load_word(pin, base + beyond)
    else:
        low = int32((first + above) & int32(-4))
        high = int32((last - int32(1) + above) & int32(-4))
        for w in range(count + 1):
            place = min(max(int32(4 * w), low), high)
            raw[position + w] = load_word(pin, base + int64(place))
    return uint32(8 * above)


@cuda.jit(device=True, inline="always")
def mirror(v):
    """Turn 8 values around."""
    for k in range(4):
        v[k], v[7 - k] = v[7 - k], v[k]


def image_table(*, y: str, channels: int, vector: bool, lines: int) -> Kernel:
    """Kernel (bytes, table, out, height, width, pad, a0, a1, a2, a3, b0, b1, b2, b3); blockIdx.y is the
    image.

    A table row is (offset, row_step, pixel_step, channel_step, top, left, height, width, flip), steps in
    bytes; pixels of the output outside the crop get `pad`, a pixel value. One thread makes 8 (or 1) pixels
    of each of `lines` rows, all channels of them. Where its pixels are interleaved neighbours it reads them
    as words, those of all its rows before it uses any, also at the edge of a crop. Planes are read as words
    inside the crop, everything else byte by byte.
    """
    store, store1, expand = STORE[y, 8], STORE_SCALAR[y], EXPAND["u8", 4]
    each = 8 if vector else 1
    window = 2 * channels  # words of 8 interleaved pixels
    slots, stretch = 8 * channels, window + 1
    held = lines * stretch

    def kernel(pin, table, pout, height, width, pad, a0, a1, a2, a3, b0, b1, b2, b3):
        i = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        per_row = uint32(width // each)
        band = int64(uint32(i) // per_row)
        y0 = band * lines
        v = cuda.local.array(8, float32)
        pixels = cuda.local.array(slots, float32)
        words = cuda.local.array(2, uint32)
        raw = cuda.local.array(held, uint32)
        shift = cuda.local.array(lines, uint32)
        a = cuda.local.array(4, float32)
        b = cuda.local.array(4, float32)
        if y0 < height:
            a[0], a[1], a[2], a[3] = a0, a1, a2, a3
            b[0], b[1], b[2], b[3] = b0, b1, b2, b3
            x0 = (int64(i) - band * int64(per_row)) * each
            image = int64(cuda.blockIdx.y)
            t = image * 9
            row_step = load_i64(table, t + 1)
            pixel_step = load_i64(table, t + 2)
            channel_step = load_i64(table, t + 3)
            crop_h = load_i64(table, t + 6)
            crop_w = load_i64(table, t + 7)
            flip = load_i64(table, t + 8) != 0
            sy, sx = source_pixel(y0, x0, load_i64(table, t + 4), load_i64(table, t + 5), crop_w, flip)
            start = load_i64(table, t) + sy * row_step + sx * pixel_step
            # How many of the pixels lie inside the crop; all of them nearly everywhere.
            inside = int32(min(max(crop_w - x0, int64(0)), int64(each)))
            first = start - 7 * pixel_step if flip else start  # the leftmost pixel of a whole vector
            place = (image * channels * height + y0) * width + x0
            if vector and pixel_step == channels and channel_step == 1:
                # Of mirrored pixels those outside the crop lie at the start of the window.
                low = int32(channels) * (int32(8) - inside) if flip else int32(0)
                high = low + int32(channels) * inside
                for u in range(lines):
                    for w in range(stretch):
                        raw[stretch * u + w] = uint32(0)
                    shift[u] = uint32(0)
                    if inside > int32(0) and y0 + u < crop_h:
                        at = first + u * row_step
                        shift[u] = window_words(pin, at, window, low, high, raw, stretch * u)
                for u in range(lines):
                    for w in range(window):
                        at = stretch * u + w
                        words[0] = word_between(raw[at], raw[at + 1], shift[u])
                        expand(words, 0, pixels, 4 * w)
                    here = inside if y0 + u < crop_h else int32(0)
                    for c in range(channels):
                        for k in range(8):
                            v[k] = pixels[c + channels * k]
                        if flip:
                            mirror(v)
                        if here < int32(8):
                            for k in range(8):
                                v[k] = v[k] if int32(k) < here else pad
                        for k in range(8):
                            v[k] = v[k] * a[c] + b[c]
                        if y0 + u < height:
                            store(pout, (place + (c * height + u) * width) >> 3, v, 0)
            else:
                step = -pixel_step if flip else pixel_step
                rest = min(height - y0, int64(lines))
                u = int64(0)
                while u < rest:
                    here = inside if y0 + u < crop_h else int32(0)
                    for c in range(channels):
                        if vector and here == int32(8) and pixel_step == 1:
                            load_window(pin, first + u * row_step + c * channel_step, words, 2)
                            expand(words, 0, v, 0)
                            expand(words, 1, v, 4)
                            if flip:
                                mirror(v)
                        else:
                            at = start + u * row_step + c * channel_step
                            for k in range(each):
                                v[k] = float32(load_u8(pin, at + k * step)) if int32(k) < here else pad
                        for k in range(each):
                            v[k] = v[k] * a[c] + b[c]
                        spot = place + (c * height + u) * width
                        if vector:
                            store(pout, spot >> 3, v, 0)
                        else:
                            store1(pout, spot, v[0])
                    u += 1

    return kernel
