"""What the kernel benchmark measures at 64 MB and above: bandwidth-bound kernels and the bytes they move."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from _kernels_timing import BF16, Call, bf
from loongforge_fuse import ops
from loongforge_fuse.kernels.catalog import NORMS
from loongforge_fuse.ops.adamw import FusedAdamW


def bandwidth_cases(scale: int) -> dict[str, Callable[[], tuple[Call, int]]]:
    """Every bandwidth-bound kernel on at least `scale` * 64 MB of its largest tensor."""
    rows = scale * 16384  # x 2048 bf16 = 64 MiB
    n = rows * 2048
    key = ops.philox_next(ops.philox_counter(1, "cuda"))

    def gelu() -> tuple[Call, int]:
        x = bf(rows, 2048)
        return lambda: ops.gelu_tanh(x), 4 * n

    def gelu_dropout() -> tuple[Call, int]:
        x = bf(rows, 2048)
        return lambda: ops.gelu_tanh(x, p=0.2, key=key), 4 * n

    def gelu_back() -> tuple[Call, int]:
        x, g = bf(rows, 2048), bf(rows, 2048)
        return lambda: torch.ops.loongforge.gelu_tanh_backward(g, x, 0.0, None), 6 * n

    def silu() -> tuple[Call, int]:
        x, g = bf(rows, 2048), bf(rows, 2048)
        return lambda: ops.silu_mul(x, g), 6 * n

    def silu_back() -> tuple[Call, int]:
        x, g, d = bf(rows, 2048), bf(rows, 2048), bf(rows, 2048)
        return lambda: torch.ops.loongforge.silu_mul_backward(d, x, g), 10 * n

    def dropout() -> tuple[Call, int]:
        x, r = bf(rows, 2048), bf(rows, 2048)
        return lambda: ops.dropout_residual(x, r, p=0.2, key=key), 6 * n

    def cast() -> tuple[Call, int]:
        x = torch.randn(n, device="cuda")
        return lambda: ops.cast_scale(x, BF16, factor=0.5), 6 * n

    def uncast() -> tuple[Call, int]:
        x = bf(n)
        return lambda: ops.cast_scale(x, torch.float32, factor=0.5), 6 * n

    def image() -> tuple[Call, int]:
        x = torch.randint(0, 256, (scale * 512, 252, 252, 3), device="cuda", dtype=torch.uint8)
        return lambda: ops.image_to_half(x), 3 * x.numel()

    def table() -> tuple[Call, int]:
        x = torch.randint(0, 256, (scale * 512, 256, 256, 3), device="cuda", dtype=torch.uint8)
        t = ops.image_table([(256, 256)] * x.shape[0], crops=[(2, 2, 252, 252)] * x.shape[0]).cuda()
        # The pixels of the crops, and all of the results: the rest of the images need not be read.
        moved = x.shape[0] * 3 * (252 * 252 + 2 * 256 * 256)
        return lambda: ops.image_table_to_half(x.view(-1), t, (256, 256)), moved

    def unfold(patch: int, source: torch.dtype, planar: bool) -> Callable[[], tuple[Call, int]]:
        def make() -> tuple[Call, int]:
            side = patch * 18
            images = scale * 400
            count = images * side * side * 3
            if source == torch.uint8:
                x = torch.randint(0, 256, (count,), device="cuda", dtype=torch.uint8)
            else:
                x = bf(count)
            t = ops.patch_table([(side, side)] * images, patch, planar=planar).cuda()
            out = t.shape[0] * (-(-patch * patch * 3 // 8) * 8)
            # A row of the table is one memory sector for each patch: 2 % of what bytes of 14 pixels move.
            moved = count * x.element_size() + 2 * out + t.numel() * t.element_size()
            return lambda: ops.masked_unfold(x, t, patch=patch, last=not planar, planar=planar), moved

        return make

    def unfold_back(patch: int, complete: bool) -> Callable[[], tuple[Call, int]]:
        def make() -> tuple[Call, int]:
            images, side = scale * 400, 18 * patch
            count = images * side * side * 3
            t = ops.patch_table([(side, side)] * images, patch, planar=True).cuda()
            g = bf(t.shape[0], -(-patch * patch * 3 // 8) * 8)
            back = functools.partial(
                torch.ops.loongforge.masked_unfold_backward,
                g, t, None, patch, False, True, count, BF16, complete,
            )  # fmt: skip
            # Without the promise that every pixel has a patch the buffer is cleared first: one more write.
            return back, (4 if complete else 6) * count + t.numel() * t.element_size()

        return make

    def rope() -> tuple[Call, int]:
        x, w = bf(16, rows // 16, 16, 128), bf(128)
        cos, sin = bf(rows // 16, 128), bf(rows // 16, 128)
        return lambda: ops.head_norm_rope(x, w, cos, sin), 4 * n

    def rope_back(columns: bool) -> Callable[[], tuple[Call, int]]:
        def make() -> tuple[Call, int]:
            x, w, g = bf(16, rows // 16, 16, 128), bf(128), bf(16, rows // 16, 16, 128)
            cos, sin = bf(rows // 16, 128), bf(rows // 16, 128)
            back = torch.ops.loongforge.head_norm_rope_backward
            return lambda: back(g, x, w, cos, sin, 1e-6, columns), 6 * n

        return make

    def adamw(state: torch.dtype, masters: bool) -> Callable[[], tuple[Call, int]]:
        def make() -> tuple[Call, int]:
            # A model's worth of elements: the two small launches in front do not count then.
            p = torch.nn.Parameter(bf(8 * rows, 2048))
            p.grad = bf(8 * rows, 2048)
            optimizer = FusedAdamW([p], state_dtype=state, master_weights=masters)
            optimizer.step()
            size = 2 if state == BF16 else 4
            each = (
                2 + (2 + 2 if not masters else 2 + 8) + 2 * 2 * size + 2
            )  # the norm reads gradients once more
            return optimizer.step, each * 8 * n

        return make

    def quantise(width: int, activation: str = "none") -> Callable[[], tuple[Call, int]]:
        def make() -> tuple[Call, int]:
            lines = n // width
            x = bf(lines, width)
            up = bf(lines, width) if activation == "silu_mul" else None
            moved = lines * ((5 if up is not None else 3) * width + 4)
            return lambda: ops.quantise_rows(x, up=up, activation=activation), moved

        return make

    cases = {
        "gelu_tanh": gelu, "gelu_tanh dropout": gelu_dropout, "gelu_tanh backward": gelu_back, "silu_mul":
        silu, "silu_mul backward": silu_back, "dropout_residual": dropout, "cast_scale f32 to bf16": cast,
        "cast_scale bf16 to f32": uncast, "image_to_half": image, "image_table_to_half": table,
        "masked_unfold 14 u8": unfold(14, torch.uint8, planar=False),
        "masked_unfold 16 u8": unfold(16, torch.uint8, planar=False),
        "masked_unfold 14 bf16 planar": unfold(14, BF16, planar=True),
        "masked_unfold 16 bf16 planar": unfold(16, BF16, planar=True),
        "masked_unfold backward": unfold_back(14, complete=False),
        "masked_unfold backward complete": unfold_back(14, complete=True),
        "masked_unfold 16 backward complete": unfold_back(16, complete=True),
        "head_norm_rope": rope, "head_norm_rope backward": rope_back(columns=True),
        "head_norm_rope backward frozen": rope_back(columns=False),
        "adamw bf16 state": adamw(BF16, masters=False), "adamw f32 state": adamw(torch.float32,
        masters=False), "adamw f32 master": adamw(torch.float32, masters=True),
    }  # fmt: skip
    if torch.cuda.get_device_capability() >= (8, 9):
        cases |= {f"quantise_rows {width}": quantise(width) for width in (1152, 2048, 4304, 4608, 6144)}
        cases["quantise_rows 4304 gelu_tanh"] = quantise(4304, "gelu_tanh")
        cases["quantise_rows 6144 silu_mul"] = quantise(6144, "silu_mul")
    for width in (1152, 1536, 2048):
        lines = n // width
        for layer, gain, _ in NORMS[width]:
            cases |= norm_cases(width, lines, layer=layer, gain=gain)
    return cases


def norm_cases(width: int, rows: int, *, layer: bool, gain: str) -> dict[str, Callable[[], tuple[Call, int]]]:
    """Forward and backward of one kind of norm, with residual and weight gradients."""
    groups = 16 if gain == "modulate" else 1
    rows = rows // groups * groups
    n = rows * width
    w = None if gain == "none" else bf(groups, width)
    o = w if layer else None
    tail = (layer, gain == "modulate", rows // groups)

    def forward(residual: bool) -> tuple[Call, int]:
        x, r = bf(rows, width), bf(rows, width) if residual else None
        call = functools.partial(torch.ops.loongforge.norm, x, r, w, o, *tail, 1e-6, BF16)
        return call, (8 if residual else 4) * n

    def backward(columns: bool) -> tuple[Call, int]:
        x, g = bf(rows, width), bf(rows, width)
        mean, rstd = torch.zeros(rows if layer else 0, device="cuda"), torch.ones(rows, device="cuda")
        call = functools.partial(
            torch.ops.loongforge.norm_backward,
            g,
            None,
            x,
            w,
            mean,
            rstd,
            *tail,
            columns,
            layer and columns,
            groups,
        )
        return call, 6 * n

    name = f"{'layer' if layer else 'rms'}_norm {gain} {width}"
    return {
        f"{name}": functools.partial(forward, residual=False),
        f"{name} residual": functools.partial(forward, residual=True),
        f"{name} backward": functools.partial(backward, columns=gain != "none"),
        f"{name} backward frozen": functools.partial(backward, columns=False),
    }
