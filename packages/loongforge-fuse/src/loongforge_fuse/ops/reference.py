"""The operators in plain torch: the CPU implementation, the oracle of the tests and the fallback on a GPU.

Half types are computed in float32 and rounded once at the end; float64 stays float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_KEYS = (0x9E3779B9, 0xBB67AE85)
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_MASK = 0xFFFFFFFF
E4M3_MAX = 448.0
SMALLEST = 1e-12
"""The largest magnitude that a row of zeros is taken to have when it is quantised."""


def wide(x: Tensor) -> Tensor:
    """Return x in its computation type: float64 stays, everything else becomes float32."""
    return x if x.dtype == torch.float64 else x.float()


def threshold_of(p: float) -> int:
    """Return the 16-bit threshold below which an element is dropped; p is rounded to a multiple of 2^-16."""
    return min(65536, max(0, round(p * 65536)))


def drops_all(p: float) -> bool:
    """Tell whether p is rounded to 1: kernels compare 16 bits and divide by the share that is kept."""
    return threshold_of(p) == 65536


def keep_scale(p: float) -> float:
    """Return 1 / (probability that an element is kept), 0 when none is."""
    kept = 65536 - threshold_of(p)
    return 65536 / kept if kept else 0.0


def _multiply(value: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return low and high 32 bits of a 32 x 32 bit product held in int64 tensors."""
    low, high = value & 0xFFFF, value >> 16
    first = low * factor  # < 2^48
    second = high * factor + (first >> 16)  # < 2^49
    return ((second & 0xFFFF) << 16) | (first & 0xFFFF), second >> 16


def random_bits(count: int, key: Tensor) -> Tensor:
    """Return `count` 16-bit values (int64) of the Philox-4x32-7 stream that `key` = (seed, offset)
    selects.
    """
    vectors = -(-count // 8)
    seed, offset = key[0], key[1]
    index = torch.arange(vectors, device=key.device, dtype=torch.int64)
    c0, c1 = index & _MASK, index >> 32
    c2, c3 = (offset & _MASK).expand_as(index), ((offset >> 32) & _MASK).expand_as(index)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(7):
        low_a, high_a = _multiply(c0, _MULTIPLIERS[0])
        low_b, high_b = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _KEYS[0]) & _MASK, (k1 + _KEYS[1]) & _MASK
    words = torch.stack((c0, c1, c2, c3), dim=1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=2)
    return halves.reshape(-1)[:count]


def dropout_mask(x: Tensor, p: float, key: Tensor) -> Tensor:
    """Return the boolean mask (True = kept) for a tensor shaped like x."""
    return (random_bits(x.numel(), key) >= threshold_of(p)).reshape(x.shape)


def dropped(x: Tensor, p: float, key: Tensor) -> Tensor:
    """Return x with dropped elements 0 and kept ones scaled, in the computation type."""
    value = wide(x) * keep_scale(p)
    return torch.where(dropout_mask(x, p, key), value, torch.zeros((), dtype=value.dtype, device=x.device))


def gelu_tanh(x: Tensor, p: float, key: Tensor | None) -> Tensor:
    """GELU in its tanh form, then dropout when a key is given."""
    y = torch.nn.functional.gelu(wide(x), approximate="tanh")
    if key is not None:
        y = dropped(y, p, key)
    return y.to(x.dtype).contiguous()


def gelu_tanh_backward(grad: Tensor, x: Tensor, p: float, key: Tensor | None) -> Tensor:
    """Gradient of :func:`gelu_tanh`, in the type of x."""
    g = wide(grad) if key is None else dropped(grad, p, key)
    dx = torch.ops.aten.gelu_backward(g.to(wide(x).dtype), wide(x), approximate="tanh")
    return dx.to(x.dtype).contiguous()


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return (torch.nn.functional.silu(wide(gate)) * wide(up)).to(gate.dtype).contiguous()


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of :func:`silu_mul` for gate and up."""
    g, a, b = wide(grad), wide(gate), wide(up)
    s = torch.sigmoid(a)
    dgate = g * b * (s + a * s * (1 - s))
    return dgate.to(gate.dtype).contiguous(), (g * a * s).to(up.dtype).contiguous()


def quantise_rows(x: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor]:
    """Rows of x, of gelu(x) or of silu(x) * up as e4m3 (M, K), and the float32 scales (M, 1) of the rows.

    The factor of an element is 448 / m, rounded, not the reciprocal of the rounded scale: one rounding less,
    and where 448 / m is exact nothing but the last rounding happens. The scale is m * (1 / 448), which costs
    no division; it is what torch makes of m / 448 on a GPU.
    """
    if activation == "gelu_tanh":
        x = gelu_tanh(x, 0.0, None)
    elif up is not None:
        x = silu_mul(x, up)
    rows = x.reshape(-1, x.shape[-1]).float()
    most = rows.abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    # A number divided by a tensor would be a product with its reciprocal.
    scaled = rows * (torch.full_like(most, E4M3_MAX) / most)
    # A NaN has no sign here: conversions of the hardware drop it, others keep it.
    scaled = scaled.masked_fill(scaled.isnan(), float("nan")).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), most * (1.0 / E4M3_MAX)


def dropout_residual(x: Tensor, residual: Tensor | None, p: float, key: Tensor) -> Tensor:
    """Residual + dropout(x), in the type of the residual (of x without one)."""
    y = dropped(x, p, key)
    if residual is None:
        return y.to(x.dtype).contiguous()
    return (y + wide(residual)).to(residual.dtype).contiguous()


def cast_scale(x: Tensor, dtype: torch.dtype, factor: float, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x * factor [* scale] in `dtype`, and the number of stored infinities and NaNs (int32, shape
    (1,)).
    """
    value = wide(x) * factor
    if scale is not None:
        value = value * scale.reshape(()).to(value.dtype)
    y = value.to(dtype).contiguous()
    bad = (~torch.isfinite(y)).sum().to(torch.int32).reshape(1)
    return y, bad


def _per_row(value: Tensor, rows: int, group_rows: int) -> Tensor:
    """Repeat the rows of a (groups, width) tensor so that there is one for each of `rows` rows."""
    return (
        wide(value).repeat_interleave(group_rows, 0) if value.shape[0] > 1 else wide(value).expand(rows, -1)
    )


def norm(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor | None,
    offset: Tensor | None,
    layer: bool,  # noqa: FBT001 - the schema's order
    modulate: bool,  # noqa: FBT001
    group_rows: int,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows (R, D): returns y, total (empty without residual), mean (empty for RMS) and rstd, the last two
    (R,).
    """
    total = x if residual is None else (wide(x) + wide(residual)).to(x.dtype)
    h = wide(total)
    mean = h.mean(-1) if layer else h.new_empty(0)
    centred = h - mean.unsqueeze(-1) if layer else h
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rstd.unsqueeze(-1)
    if gain is not None:
        g = _per_row(gain, x.shape[0], group_rows)
        y = y * (1 + g if modulate else g)
    if offset is not None:
        y = y + _per_row(offset, x.shape[0], group_rows)
    kept = x.new_empty(0) if residual is None else total.contiguous()
    return y.to(dtype).contiguous(), kept, mean, rstd


def norm_backward(
    grad: Tensor,
    carry: Tensor | None,
    total: Tensor,
    gain: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    layer: bool,  # noqa: FBT001 - the schema's order
    modulate: bool,  # noqa: FBT001
    group_rows: int,
    columns: bool,  # noqa: FBT001
    offset: bool,  # noqa: FBT001
    groups: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of total, and the sums (groups, 1 or 2 with `offset`, D) in float32: the gradients
    of gain and offset, or an empty tensor without `columns`.
    """
    g, h = wide(grad), wide(total)
    r = rstd.to(h.dtype).unsqueeze(-1)
    xhat = (h - mean.to(h.dtype).unsqueeze(-1)) * r if layer else h * r
    inner = g
    if gain is not None:
        factor = _per_row(gain, h.shape[0], group_rows)
        inner = g * (1 + factor if modulate else factor)
    second = (inner * xhat).mean(-1, keepdim=True)
    first = inner.mean(-1, keepdim=True) if layer else 0.0
    dx = (inner - first - xhat * second) * r
    if carry is not None:
        dx = dx + wide(carry)
    sums = h.new_empty(0)
    if columns:
        kinds = (g * xhat, g) if offset else (g * xhat,)
        sums = torch.stack([k.reshape(groups, -1, h.shape[-1]).sum(1) for k in kinds], 1)
    return dx.to(total.dtype).contiguous(), sums.to(_sum_dtype(h))


def _sum_dtype(h: Tensor) -> torch.dtype:
    return torch.float64 if h.dtype == torch.float64 else torch.float32
