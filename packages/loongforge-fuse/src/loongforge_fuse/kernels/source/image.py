# Kernel functions take Numba values: annotations would be wrong there.
# ruff: noqa: ANN001, ANN201, ANN202
# mypy: ignore-errors
"""Image kernels: uint8 pixels to normalised half planes, patches of mixed-size images to matrix rows and
back.
"""

from __future__ import annotations

from collections.abc import Callable

from numba import cuda, float32, int32, int64, uint32, uint64

from loongforge_fuse.kernels.source.indexing import next_element, patch_element, source_pixel
from loongforge_fuse.kernels.source.intrinsics import (
    LOAD_SCALAR,
    STORE_QUAD,
    STORE_SCALAR,
    STORE_VECTOR,
    global_thread,
    load_i32,
    load_i64,
    load_u8,
    load_word,
    misalignment,
    store_i32,
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
    store = STORE_QUAD[y] if pixels == 4 else STORE_VECTOR[y]
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


def image_table(*, y: str, channels: int, vector: bool) -> Kernel:
    """Kernel (bytes, table, out, height, width, pad, a0, a1, a2, a3, b0, b1, b2, b3); blockIdx.y is the
    image.

    A table row is (offset, row_step, pixel_step, channel_step, top, left, height, width, flip), steps in
    bytes; pixels of the output outside the crop get `pad`, a pixel value. One thread makes 8 (or 1) pixels
    of a row, all channels of them.
    """
    store, store1 = STORE_VECTOR[y], STORE_SCALAR[y]
    each = 8 if vector else 1

    def kernel(pin, table, pout, height, width, pad, a0, a1, a2, a3, b0, b1, b2, b3):
        i = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        per_row = uint32(width // each)
        yy = int64(uint32(i) // per_row)
        v = cuda.local.array(8, float32)
        a = cuda.local.array(4, float32)
        b = cuda.local.array(4, float32)
        if yy < height:
            a[0], a[1], a[2], a[3] = a0, a1, a2, a3
            b[0], b[1], b[2], b[3] = b0, b1, b2, b3
            x0 = (int64(i) - yy * int64(per_row)) * each
            image = int64(cuda.blockIdx.y)
            t = image * 9
            row_step = load_i64(table, t + 1)
            pixel_step = load_i64(table, t + 2)
            channel_step = load_i64(table, t + 3)
            crop_w = load_i64(table, t + 7)
            flip = load_i64(table, t + 8) != 0
            sy, sx = source_pixel(yy, x0, load_i64(table, t + 4), load_i64(table, t + 5), crop_w, flip)
            start = load_i64(table, t) + sy * row_step + sx * pixel_step
            step = -pixel_step if flip else pixel_step
            # How many of the pixels lie inside the crop; all of them nearly everywhere.
            inside = int32(min(max(crop_w - x0, int64(0)), int64(each)))
            if yy >= load_i64(table, t + 6):
                inside = int32(0)
            for c in range(channels):
                if inside == int32(each):
                    for k in range(each):
                        v[k] = float32(load_u8(pin, start + k * step))
                else:
                    for k in range(each):
                        v[k] = float32(load_u8(pin, start + k * step)) if int32(k) < inside else pad
                for k in range(each):
                    v[k] = v[k] * a[c] + b[c]
                place = ((image * channels + c) * height + yy) * width + x0
                if vector:
                    store(pout, place >> 3, v, 0)
                else:
                    store1(pout, place, v[0])
                start += channel_step

    return kernel


@cuda.jit(device=True, inline="always")
def patch_origin(table, mask, row, masked):
    """Return where a patch begins in the pixel buffer, -1 when it is left out."""
    origin = load_i64(table, 4 * row)
    if masked and load_u8(mask, row) == 0:
        origin = int64(-1)
    return origin


def patch_rows(
    *, x: str, y: str, patch: int, channels: int, last: bool, planar: bool, masked: bool
) -> Kernel:
    """Kernel (pixels, table, mask, out, patches, a0, a1, a2, b0, b1, b2): gather patches into matrix rows.

    A table row is (origin, row_step, pixel_step, channel_step) in elements of the pixel buffer, whose type
    `x` is "u8" (normalised by a and b) or a float type (copied); `planar` says which of the steps is 1.
    Rows have patch * patch * channels elements, padded with zeros to a multiple of 8; a row whose origin
    is negative or whose mask byte is 0 is all zeros and reads nothing. One thread makes one vector.
    """
    load = load_u8 if x == "u8" else LOAD_SCALAR[x]
    store = STORE_VECTOR[y]
    length = patch * patch * channels
    per_row = -(-length // 8)
    full = length % 8 == 0
    normalise = x == "u8"

    def kernel(pin, table, mask, pout, patches, a0, a1, a2, b0, b1, b2):
        i = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        row = int64(uint32(i) // uint32(per_row))
        v = cuda.local.array(8, float32)
        if row < patches:
            k0 = (int64(i) - row * per_row) * 8
            origin = patch_origin(table, mask, row, masked)
            for e in range(8):
                v[e] = float32(0.0)
            if origin >= 0:
                row_step = load_i64(table, 4 * row + 1)
                channel_step = load_i64(table, 4 * row + 3) if planar else int64(1)
                py, px, c = patch_element(k0, patch, channels, last)
                for e in range(8):
                    if full or k0 + e < length:
                        at = origin + py * row_step + (px if planar else px * channels) + c * channel_step
                        value = float32(load(pin, at))
                        if normalise:
                            a = a0 if c == 0 else (a1 if c == 1 else a2)
                            b = b0 if c == 0 else (b1 if c == 1 else b2)
                            value = value * a + b
                        v[e] = value
                    py, px, c = next_element(py, px, c, patch, channels, last)
            store(pout, int64(i), v, 0)

    return kernel


@cuda.jit(device=True, inline="always")
def byte_window(pin, offset, wanted):
    """Return `wanted` (up to 8) bytes from any byte offset as one 64-bit word, the first byte lowest.

    Reads whole aligned words, so up to 3 bytes beside the window are read too; they lie in the same word,
    hence in the same allocation.
    """
    above = misalignment(pin, offset)
    base = offset - above
    need = above + wanted
    low = uint64(load_word(pin, base))
    middle = uint64(0)
    high = uint64(0)
    if need > 4:
        middle = uint64(load_word(pin, base + 4))
    if need > 8:
        high = uint64(load_word(pin, base + 8))
    shift = uint64(8 * above)
    # Two shifts, because a shift by 64 is not defined.
    return ((low | (middle << uint64(32))) >> shift) | ((high << (uint64(32) - shift)) << uint64(32))


def patch_runs(*, y: str, patch: int, channels: int, masked: bool) -> Kernel:
    """Kernel like :func:`patch_rows` for interleaved bytes with the channel fastest, where rows are runs
    of bytes.

    The 8 elements of a vector are 8 neighbouring bytes of one image row, or the end of one and the start
    of the next; three channels repeat with the same period in both.
    """
    store = STORE_VECTOR[y]
    run = patch * channels
    length = patch * run
    per_row = -(-length // 8)
    crossing = run % 8 != 0

    def kernel(pin, table, mask, pout, patches, a0, a1, a2, b0, b1, b2):
        i = uint32(cuda.blockIdx.x) * uint32(cuda.blockDim.x) + uint32(cuda.threadIdx.x)
        row = int64(uint32(i) // uint32(per_row))
        v = cuda.local.array(8, float32)
        if row < patches:
            k0 = uint32(uint32(i) - uint32(uint32(row) * uint32(per_row))) * uint32(8)
            origin = patch_origin(table, mask, row, masked)
            for e in range(8):
                v[e] = float32(0.0)
            if origin >= 0:
                line = uint32(uint32(k0) // uint32(run))
                at = uint32(uint32(k0) - uint32(line * uint32(run)))
                row_step = load_i64(table, 4 * row + 1)
                start = origin + int64(line) * row_step + int64(at)
                count = int32(8)
                if crossing:
                    left = int32(run) - int32(at)
                    count = int32(min(int32(length) - int32(k0), int32(8)))
                    here = int32(min(left, count))
                    bits = byte_window(pin, start, int64(here))
                    if here < count:
                        # The first bytes of the next image row, moved up behind what is left of this one.
                        more = byte_window(pin, start + int64(left) + row_step - run, int64(count - here))
                        keep = (uint64(1) << uint64(8 * here)) - uint64(1)
                        bits = (bits & keep) | (more << uint64(8 * here))
                else:
                    bits = byte_window(pin, start, int64(8))
                phase = uint32(uint32(at) % uint32(channels))
                p0 = a0 if phase == 0 else (a1 if phase == 1 else a2)
                p1 = a1 if phase == 0 else (a2 if phase == 1 else a0)
                p2 = a2 if phase == 0 else (a0 if phase == 1 else a1)
                q0 = b0 if phase == 0 else (b1 if phase == 1 else b2)
                q1 = b1 if phase == 0 else (b2 if phase == 1 else b0)
                q2 = b2 if phase == 0 else (b0 if phase == 1 else b1)
                low = uint32(bits)
                high = uint32(bits >> uint64(32))
                for e in range(8):
                    word = low if e < 4 else high
                    value = float32((word >> uint32(8 * (e & 3))) & uint32(0xFF))
                    if e % 3 == 0:
                        value = value * p0 + q0
                    elif e % 3 == 1:
                        value = value * p1 + q1
                    else:
                        value = value * p2 + q2
                    if crossing:
                        value = value if int32(e) < count else float32(0.0)
                    v[e] = value
            store(pout, int64(i), v, 0)

    return kernel


@cuda.jit(device=True, inline="always")
def even_steps(pixels, origin, row_step, channel_step):
    """Tell whether every line of a patch of 16-bit planes starts on a 4-byte border."""
    odd = misalignment(pixels, 2 * origin) | ((row_step | channel_step) & 1)
    return odd == 0


def patch_lines(*, y: str, patch: int, channels: int, masked: bool) -> Kernel:
    """Kernel like :func:`patch_rows` for 16-bit planes with the channel slowest, where rows are runs of a
    line.

    One warp makes one patch: lanes copy neighbouring elements, two at a time where lines start on 4-byte
    borders.
    """
    load, store = LOAD_SCALAR[y], STORE_SCALAR[y]
    length = patch * patch * channels
    padded = -(-length // 8) * 8
    rounds = -(-padded // 32)
    pairs = padded // 2
    pair_rounds = -(-pairs // 32)

    def kernel(pin, table, mask, pout, patches, a0, a1, a2, b0, b1, b2):
        row = int64(cuda.blockIdx.x) * int64(cuda.blockDim.x >> 5) + int64(cuda.threadIdx.x >> 5)
        lane = int64(cuda.threadIdx.x & 31)
        if row < patches:
            origin = patch_origin(table, mask, row, masked)
            row_step = load_i64(table, 4 * row + 1)
            channel_step = load_i64(table, 4 * row + 3)
            if origin < 0:
                for r in range(pair_rounds):
                    if lane + 32 * r < pairs:
                        store_i32(pout, row * pairs + lane + 32 * r, int32(0))
            elif even_steps(pin, origin, row_step, channel_step):
                for r in range(pair_rounds):
                    k = lane + 32 * r
                    if k < pairs:
                        word = int32(0)
                        if 2 * k < length:
                            py, px, c = patch_element(2 * k, patch, channels, False)
                            word = load_i32(pin, (origin + py * row_step + px + c * channel_step) >> 1)
                        store_i32(pout, row * pairs + k, word)
            else:
                for r in range(rounds):
                    k = lane + 32 * r
                    if k < padded:
                        value = float32(0.0)
                        if k < length:
                            py, px, c = patch_element(k, patch, channels, False)
                            value = load(pin, origin + py * row_step + px + c * channel_step)
                        store(pout, row * padded + k, value)

    return kernel


def patch_lines_backward(*, y: str, patch: int, channels: int, masked: bool) -> Kernel:
    """Kernel (grad_rows, table, mask, grad_pixels, patches): the gradient of :func:`patch_lines`, the same
    way.
    """
    load, store = LOAD_SCALAR[y], STORE_SCALAR[y]
    length = patch * patch * channels
    padded = -(-length // 8) * 8
    rounds = -(-length // 32)
    pairs = length // 2
    pair_rounds = -(-pairs // 32)

    def kernel(pg, table, mask, pout, patches):
        row = int64(cuda.blockIdx.x) * int64(cuda.blockDim.x >> 5) + int64(cuda.threadIdx.x >> 5)
        lane = int64(cuda.threadIdx.x & 31)
        if row < patches:
            origin = patch_origin(table, mask, row, masked)
            if origin >= 0:
                row_step = load_i64(table, 4 * row + 1)
                channel_step = load_i64(table, 4 * row + 3)
                if even_steps(pout, origin, row_step, channel_step):
                    for r in range(pair_rounds):
                        k = lane + 32 * r
                        if k < pairs:
                            py, px, c = patch_element(2 * k, patch, channels, False)
                            word = load_i32(pg, row * (padded // 2) + k)
                            store_i32(pout, (origin + py * row_step + px + c * channel_step) >> 1, word)
                else:
                    for r in range(rounds):
                        k = lane + 32 * r
                        if k < length:
                            py, px, c = patch_element(k, patch, channels, False)
                            value = load(pg, row * padded + k)
                            store(pout, origin + py * row_step + px + c * channel_step, value)

    return kernel


def patch_rows_backward(
    *, g: str, y: str, patch: int, channels: int, last: bool, planar: bool, masked: bool
) -> Kernel:
    """Kernel (grad_rows, table, mask, grad_pixels, patches): the gradient of :func:`patch_rows`.

    Patches do not overlap, so every pixel has one writer; the caller cleared the buffer. One warp writes one
    patch, its lanes neighbouring elements.
    """
    load, store = LOAD_SCALAR[g], STORE_SCALAR[y]
    length = patch * patch * channels
    padded = -(-length // 8) * 8
    rounds = -(-length // 32)

    def kernel(pg, table, mask, pout, patches):
        row = int64(cuda.blockIdx.x) * int64(cuda.blockDim.x >> 5) + int64(cuda.threadIdx.x >> 5)
        lane = int64(cuda.threadIdx.x & 31)
        if row < patches:
            origin = patch_origin(table, mask, row, masked)
            if origin >= 0:
                row_step = load_i64(table, 4 * row + 1)
                channel_step = load_i64(table, 4 * row + 3) if planar else int64(1)
                for r in range(rounds):
                    k = lane + 32 * r
                    if k < length:
                        py, px, c = patch_element(k, patch, channels, last)
                        at = origin + py * row_step + (px if planar else px * channels) + c * channel_step
                        store(pout, at, load(pg, row * padded + k))

    return kernel
