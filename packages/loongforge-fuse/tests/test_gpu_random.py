"""Ten thousand random shapes, strides and alignments on a real GPU, against the reference."""

from __future__ import annotations

import random

import pytest
import torch
from loongforge_fuse import ops
from loongforge_fuse.ops import reference
from torch import Tensor
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]


@pytest.fixture(autouse=True)
def counted():
    """Start every test with empty counters."""
    ops.reset_op_counters()
    torch.manual_seed(0)


def odd(shape: tuple[int, ...], dtype: torch.dtype, kind: int) -> Tensor:
    """A tensor of this shape that is contiguous, misaligned, transposed, strided or expanded."""
    if kind == 1:
        flat = torch.randn(int(torch.tensor(shape).prod()) + 3, device="cuda").to(dtype)
        return flat[3:].view(shape)
    if kind == 2:
        return torch.randn(*shape[::-1], device="cuda").to(dtype).permute(*range(len(shape) - 1, -1, -1))
    if kind == 3:
        return torch.randn(*shape[:-1], 2 * shape[-1], device="cuda").to(dtype)[..., ::2]
    if kind == 4 and len(shape) > 1:
        return torch.randn(1, *shape[1:], device="cuda").to(dtype).expand(shape)
    return torch.randn(*shape, device="cuda").to(dtype)


def close(got: Tensor, want: Tensor, dtype: torch.dtype, label: str) -> None:
    tolerance = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}[dtype]
    assert got.shape == want.shape, label
    if got.numel():
        gap = (got.float() - want.float()).abs()
        assert bool((gap <= tolerance * (want.float().abs() + 1.0)).all()), f"{label}: {float(gap.max())}"


def test_ten_thousand_random_shapes_strides_and_alignments():
    rng = random.Random(7)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    key = ops.philox_next(ops.philox_counter(9, "cuda"))
    for case in range(10_000):
        dtype = rng.choice(dtypes)
        dims = rng.randint(1, 3)
        shape = tuple(
            rng.choice((0, 1, 2, 3, 5, 8, 17, 33)) if rng.random() < 0.03 else rng.randint(1, 24)
            for _ in range(dims)
        )
        kind = rng.randint(0, 4)
        which = rng.randint(0, 5)
        label = f"case {case}: {which} {shape} {dtype} kind {kind}"
        x = odd(shape, dtype, kind)
        if which == 0:
            close(ops.gelu_tanh(x), reference.gelu_tanh(x, 0.0, None), dtype, label)
        elif which == 1:
            g = odd(shape, dtype, rng.randint(0, 4))
            close(ops.silu_mul(x, g), reference.silu_mul(x, g), dtype, label)
        elif which == 2:
            r = odd(shape, dtype, rng.randint(0, 4))
            close(
                ops.dropout_residual(x, r, p=0.3, key=key),
                reference.dropout_residual(x, r, 0.3, key),
                dtype,
                label,
            )
        elif which == 3:
            target = rng.choice(dtypes)
            close(
                ops.cast_scale(x, target, factor=0.5)[0],
                reference.cast_scale(x, target, 0.5, None)[0],
                target,
                label,
            )
        else:
            width = (
                rng.choice((48, 96, 2048, 20, 7))
                if dtype == torch.float16
                else rng.choice((48, 96, 128, 2048, 20, 7))
            )
            shape = (rng.randint(1, 5), rng.randint(1, 9), width)
            x = odd(shape, dtype, kind)
            r = odd(shape, dtype, rng.randint(0, 4))
            w = odd((width,), dtype, rng.choice((0, 1, 3)))
            total = (x.float() + r.float()).to(dtype).float()
            if which == 4:
                y, _ = ops.rms_norm(x, residual=r, weight=w)
                want = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * w.float()
            else:
                y, _ = ops.layer_norm_modulate(x, residual=r, weight=w, bias=w)
                want = F.layer_norm(total, (width,), w.float(), w.float())
            close(y, want.to(dtype), dtype, label)
    counters = ops.op_counters()
    assert sum(counters["launches"].values()) > 6_000, counters
    allowed = ("multiple of 8", "16-byte")
    assert all(any(a in reason for a in allowed) for reason in counters["fallbacks"]), counters["fallbacks"]
