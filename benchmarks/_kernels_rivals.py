"""Rivals of the fused operators at the shapes of GR00T N1.6: eager, compiled, Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from loongforge_fuse import ops
from torch import Tensor
from torch.nn import functional as F

BF16 = torch.bfloat16
Chain = Callable[..., object]


@dataclass(kw_only=True)
class Case:
    """One block: our way, the eager chain, optionally a Triton kernel (forward only)."""

    name: str
    shape: tuple[int, ...]
    inputs: Callable[[], list[Tensor]]
    ours: Chain
    eager: Chain
    triton: Chain | None = None
    backward: bool = False
    made: dict[str, Chain] = field(default_factory=dict)

    def ways(self) -> dict[str, Chain]:
        """Return the implementations by name."""
        found = {"ours": self.ours, "eager": self.eager, "compile": torch.compile(self.eager, dynamic=False)}
        if self.triton is not None and not self.backward:
            found["triton"] = self.triton
        return found

    def call(self, function: Chain) -> Callable[[], object]:
        """Return a call on buffers of its own."""
        inputs = self.inputs()
        if not self.backward:
            return lambda: function(*inputs)
        leaves = [t.requires_grad_() for t in inputs]
        with torch.no_grad():
            out = function(*leaves)
        outs = out if isinstance(out, tuple) else (out,)
        seeds = [torch.randn_like(o) for o in outs]

        def work() -> None:
            got = function(*leaves)
            torch.autograd.grad(got if isinstance(got, tuple) else (got,), leaves, seeds)

        return work


def bf(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(BF16)


def eager_modulate(x: Tensor, r: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    scale, shift = table[:, None].chunk(2, -1)
    return F.layer_norm(total, (x.shape[-1],), eps=1e-5) * (1 + scale) + shift, total


def ours_modulate(x: Tensor, r: Tensor, table: Tensor) -> object:
    return ops.layer_norm_modulate(x, residual=r, table=table)


def eager_layer(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    return F.layer_norm(total, (x.shape[-1],), w, b, 1e-6), total


def ours_layer(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> object:
    return ops.layer_norm_modulate(x, residual=r, weight=w, bias=b, eps=1e-6)


def ours_rms(x: Tensor, r: Tensor, w: Tensor) -> object:
    return ops.rms_norm(x, residual=r, weight=w)


def eager_rms(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + r
    wide = total.float()
    return w * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype), total


def eager_float8(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
    return (wide / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def float8_cases(samples: int) -> list[Case]:
    """What frozen float8 layers read: plain rows, and rows with the activation in front of them."""
    images, tokens = (2 * samples, 324), (samples, 220)
    cases = [
        Case(
            name=f"{part} quantise {width} b{samples} forward", shape=(*lead, width),
            inputs=lambda s=(*lead, width): [bf(*s)],
            ours=ops.quantise_rows, eager=eager_float8, triton=triton_quantise,
        )
        for part, lead, width in (
            ("vision", images, 1152), ("language", tokens, 2048), ("language", tokens, 6144),
        )
    ]  # fmt: skip
    return [
        *cases,
        Case(
            name=f"vision gelu+quantise b{samples} forward", shape=(*images, 4304),
            inputs=lambda s=(*images, 4304): [bf(*s)],
            ours=lambda x: ops.quantise_rows(x, activation="gelu_tanh"),
            eager=lambda x: eager_float8(F.gelu(x, approximate="tanh")),
            triton=lambda x: triton_quantise(x, "gelu_tanh"),
        ),
        Case(
            name=f"language silu_mul+quantise b{samples} forward", shape=(*tokens, 6144),
            inputs=lambda s=(*tokens, 6144): [bf(*s), bf(*s)],
            ours=lambda a, b: ops.quantise_rows(a, up=b, activation="silu_mul"),
            eager=lambda a, b: eager_float8(F.silu(a) * b),
            triton=lambda a, b: triton_quantise(a, "silu_mul", b),
        ),
    ]  # fmt: skip


def model_cases() -> list[Case]:
    """Blocks of the vision tower, the language model and the action head, for 4 and 16 samples."""
    cases: list[Case] = []
    for samples in (4, 16):
        for backward in (False, True):
            tag = f"b{samples} " + ("forward+backward" if backward else "forward")
            vision, language, action = (2 * samples, 324, 1152), (samples, 220, 2048), (samples, 51, 1536)
            cases += [
                Case(
                    name=f"dit residual+layer_norm+modulate {tag}", shape=action, backward=backward,
                    inputs=lambda s=action: [bf(*s), bf(*s), bf(s[0], 2 * s[2])],
                    ours=ours_modulate, eager=eager_modulate, triton=triton_modulate,
                ),
                Case(
                    name=f"vision residual+layer_norm {tag}", shape=vision, backward=backward,
                    inputs=lambda s=vision: [bf(*s), bf(*s), bf(s[2]), bf(s[2])],
                    ours=ours_layer,
                    eager=eager_layer, triton=triton_layer,
                ),
                Case(
                    name=f"language residual+rms_norm {tag}", shape=language, backward=backward,
                    inputs=lambda s=language: [bf(*s), bf(*s), bf(s[2])],
                    ours=ours_rms, eager=eager_rms, triton=triton_rms,
                ),
                Case(
                    name=f"vision gelu {tag}", shape=(*vision[:2], 4304), backward=backward,
                    inputs=lambda s=vision: [bf(*s[:2], 4304)],
                    ours=ops.gelu_tanh, eager=lambda x: F.gelu(x, approximate="tanh"), triton=triton_gelu,
                ),
                Case(
                    name=f"dit gelu {tag}", shape=(*action[:2], 6144), backward=backward,
                    inputs=lambda s=action: [bf(*s[:2], 6144)],
                    ours=ops.gelu_tanh, eager=lambda x: F.gelu(x, approximate="tanh"), triton=triton_gelu,
                ),
                Case(
                    name=f"language silu_mul {tag}", shape=(*language[:2], 6144), backward=backward,
                    inputs=lambda s=language: [bf(*s[:2], 6144), bf(*s[:2], 6144)],
                    ours=ops.silu_mul, eager=lambda a, b: F.silu(a) * b, triton=triton_silu_mul,
                ),
            ]  # fmt: skip
        if torch.cuda.get_device_capability() >= (8, 9):
            cases += float8_cases(samples)
    return cases


def _triton_kernels() -> dict[str, object]:
    """Compile-on-use Triton kernels of the plain kind: one program per row or per 1024 elements."""
    import _kernels_triton

    return _kernels_triton.KERNELS


def triton_gelu(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    n = x.numel()
    _triton_kernels()["gelu"][(-(-n // 2048),)](x, y, n, BLOCK=2048, num_warps=8)
    return y


def triton_silu_mul(a: Tensor, b: Tensor) -> Tensor:
    y = torch.empty_like(a)
    n = a.numel()
    _triton_kernels()["silu_mul"][(-(-n // 2048),)](a, b, y, n, BLOCK=2048, num_warps=8)
    return y


def triton_quantise(x: Tensor, activation: str = "none", up: Tensor | None = None) -> tuple:
    width = x.shape[-1]
    rows = x.numel() // width
    y = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = 1 << (width - 1).bit_length()
    _triton_kernels()["quantise"][(rows,)](
        x, x if up is None else up, y, scale, width, ACTIVATION=activation, BLOCK=block, num_warps=8
    )
    return y, scale


def _triton_norm(
    x: Tensor, r: Tensor, w: Tensor, b: Tensor, group: int, step: int, layer: bool, one: float
) -> tuple:
    y, total = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    block = 1 << (width - 1).bit_length()
    _triton_kernels()["norm"][(rows,)](
        x, r, w, b, y, total, width, group, step, 1e-6, one, LAYER=layer, BLOCK=block, num_warps=8
    )
    return y, total


def triton_modulate(x: Tensor, r: Tensor, table: Tensor) -> tuple:
    scale, shift = table.chunk(2, -1)
    return _triton_norm(x, r, scale, shift, x.shape[1], table.shape[1], layer=True, one=1.0)


def triton_layer(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple:
    return _triton_norm(x, r, w, b, x.numel() // x.shape[-1], 0, layer=True, one=0.0)


def triton_rms(x: Tensor, r: Tensor, w: Tensor) -> tuple:
    return _triton_norm(x, r, w, w, x.numel() // x.shape[-1], 0, layer=False, one=0.0)
