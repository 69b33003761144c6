"""Per-head RMSNorm and rotary position embedding of queries or keys in one pass."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from loongforge_fuse.kernels.driver import Function
from loongforge_fuse.kernels.specs import KernelSpec
from loongforge_fuse.ops import reference
from loongforge_fuse.ops._common import (
    BLOCK,
    CODES,
    Context,
    aligned,
    capturing,
    define,
    differentiable,
    fell_back,
    load_first,
    plain,
    processors,
    resolve,
    wants_grad,
)
from loongforge_fuse.ops.columns import FOLLOWING, add_partials
from loongforge_fuse.ops.variants import forget_on_change, in_turn

_WIDTHS = (16, 32, 64, 128, 256)
_LARGE = 2**24  # elements from which on the device takes longer than the host
# Ways of the backward kernel with the weight's sums, the default first: heads of a token that a group of
# lanes takes, blocks that fit on a multiprocessor, whether the kernel that adds partial sums starts early.
_WAYS = {
    "4 heads 2 blocks early": (4, 2, True),
    "4 heads 2 blocks": (4, 2, False),
    "2 heads 3 blocks early": (2, 3, True),
}
_PLAIN = "4 heads 2 blocks"  # where no kernel starts before the one in front of it has ended
BACKWARD_JOB, BACKWARD_WAYS = "head_norm_rope backward columns", tuple(_WAYS)


def heads_each(heads: int, dtype: torch.dtype) -> int:
    """Return how many heads of a token a group of lanes takes: float32 heads fill twice the registers."""
    most = 2 if dtype == torch.float32 else 4
    return most if heads % most == 0 else 1


def rope_spec(x: str, w: str, c: str, width: int, each: int) -> KernelSpec:
    """Return the specification of the forward kernel."""
    return KernelSpec(
        module="rope",
        maker="head_norm_rope_forward",
        options={"x": x, "w": w, "c": c, "width": width, "heads_each": each},
        arguments="PPPPPqqqf",
    )


def rope_backward_spec(
    x: str, w: str, c: str, width: int, each: int, *, columns: bool, way: str = BACKWARD_WAYS[0]
) -> KernelSpec:
    """Return the specification of the backward kernel; `each` is the most that the number of heads allows."""
    most, blocks, early = _WAYS[way]
    measured = columns and x == w == c == "bf16"
    return KernelSpec(
        module="rope",
        maker="head_norm_rope_backward",
        options={
            "x": x, "w": w, "c": c, "width": width, "heads_each": min(each, most), "columns": columns,
            "early": early and measured,
        },
        arguments="PPPPPPPqqqf",
        capability=FOLLOWING if early and measured else 0,
        # Two blocks fit without a limit.
        min_blocks=blocks if measured and blocks > 2 else 0,
    )  # fmt: skip


_forward_calls: dict[Hashable, Function] = {}
# The kernel, the heads that a group of lanes takes, the blocks that fit on a processor, what "early" says.
_Backward = tuple[Function, int, int, bool]
_backward_calls: dict[Hashable, _Backward] = {}
forget_on_change(_backward_calls.clear)


def _tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return cos.reshape(-1, cos.shape[-1]).contiguous(), sin.reshape(-1, sin.shape[-1]).contiguous()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, L, H, D) by tables of (L, D) or (B, L, D)."""
    low, high = x.chunk(2, -1)
    return x * cos.unsqueeze(-2) + torch.cat((-high, low), -1) * sin.unsqueeze(-2)


def _reference(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    h = reference.wide(x)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.to(h.dtype)
    return _rotate(y, cos.to(h.dtype), sin.to(h.dtype)).to(x.dtype).contiguous()


def _backward_reference(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    columns: bool,  # noqa: FBT001 - the schema's order
) -> tuple[Tensor, Tensor]:
    h, g, w = reference.wide(x), reference.wide(grad), reference.wide(weight)
    low, high = (g * sin.to(g.dtype).unsqueeze(-2)).chunk(2, -1)
    g = g * cos.to(g.dtype).unsqueeze(-2) + torch.cat((high, -low), -1)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    xhat = h * rstd
    inner = g * w.to(g.dtype)
    dx = (inner - xhat * (inner * xhat).mean(-1, keepdim=True)) * rstd
    sums = torch.float64 if h.dtype == torch.float64 else torch.float32
    dw = (g * xhat).flatten(0, -2).sum(0).to(sums) if columns else x.new_empty(0, dtype=sums)
    return dx.to(x.dtype).contiguous(), dw


def _refusal(x: Tensor, *others: Tensor) -> str | None:
    if x.shape[-1] not in _WIDTHS:
        return f"head width {x.shape[-1]}"
    if x.numel() // x.shape[-1] >= 2**31:
        return "2^31 heads"
    for tensor in (x, *others):
        if tensor.dtype not in CODES:
            return f"dtype {tensor.dtype}"
    return None if aligned(x, *others) else "address is not a multiple of 16 bytes"


def _forward_call(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Function | None:
    device, each, width = x.get_device(), heads_each(x.shape[-2], x.dtype), x.shape[-1]
    key = (device, x.dtype, weight.dtype, cos.dtype, sin.dtype, width, each)
    reason = _refusal(x, weight, cos, sin)
    if reason is None and cos.dtype != sin.dtype:
        reason = f"cos {cos.dtype} and sin {sin.dtype}"
    if reason:
        fell_back("head_norm_rope", reason)
        return None
    found = _forward_calls.get(key)
    if found is not None:
        return found
    spec = rope_spec(CODES[x.dtype], CODES[weight.dtype], CODES[cos.dtype], width, each)
    return resolve("head_norm_rope", _forward_calls, key, spec, device)


def _rope_cuda(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    table_cos, table_sin = _tables(cos, sin)
    call = _forward_call(x, weight, table_cos, table_sin)
    if call is None:
        return _reference(x, weight, cos, sin, eps)
    y = torch.empty_like(x)
    heads, width = x.shape[-2:]
    rows = x.numel() // width
    if rows:
        blocks = -(-rows // (heads_each(heads, x.dtype) * (BLOCK // (width // 8))))
        tensors = (x, weight, table_cos, table_sin, y)
        call.run(blocks, 1, (*(t.data_ptr() for t in tensors), rows, heads, table_cos.shape[0], eps))
    return y


def _backward_call(
    grad: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, columns: bool
) -> _Backward | None:
    device, each, width = x.get_device(), heads_each(x.shape[-2], x.dtype), x.shape[-1]
    key = (device, x.dtype, weight.dtype, cos.dtype, width, each, columns)
    reason = _refusal(x, grad, weight, cos, sin)
    if reason:
        fell_back("head_norm_rope_backward", reason)
        return None
    found = _backward_calls.get(key)
    if found is not None:
        return found
    codes = CODES[x.dtype], CODES[weight.dtype], CODES[cos.dtype]
    ways = (*in_turn(BACKWARD_JOB, BACKWARD_WAYS), _PLAIN) if columns else BACKWARD_WAYS[:1]
    specs = [rope_backward_spec(*codes, width, each, columns=columns, way=way) for way in ways]
    loaded = load_first("head_norm_rope_backward", specs, device)
    if loaded is None:
        return None
    call, place = loaded
    options = specs[place].options
    fits = _WAYS[ways[place]][1]
    found = _backward_calls[key] = call, int(options["heads_each"]), fits, bool(options["early"])
    return found


def _rope_backward_cuda(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    columns: bool,  # noqa: FBT001 - the schema's order
) -> tuple[Tensor, Tensor]:
    grad, x, weight = grad.to(x.dtype).contiguous(), x.contiguous(), weight.contiguous()
    table_cos, table_sin = _tables(cos, sin)
    found = _backward_call(grad, x, weight, table_cos, table_sin, columns=columns)
    if found is None:
        return _backward_reference(grad, x, weight, cos, sin, eps, columns)
    call, each, fits, early = found
    dx = torch.empty_like(x)
    heads, width = x.shape[-2:]
    device, rows, per_block = x.get_device(), x.numel() // width, BLOCK // (width // 8)
    blocks = -(-rows // (per_block * each))
    if columns:
        blocks = min(blocks, fits * processors(device))
    part = x.new_empty((blocks, width) if columns else 0, dtype=torch.float32)
    if rows:
        tensors = (x, weight, table_cos, table_sin, grad, dx, part)
        call.run(blocks, 1, (*(t.data_ptr() for t in tensors), rows, heads, table_cos.shape[0], eps))
    if not columns:
        return dx, part
    if not rows:
        return dx, part.new_zeros(width)
    follows = early and (rows * width >= _LARGE or capturing())  # see run_norm_backward
    sums = add_partials(part.unsqueeze(0), torch.float32, "head_norm_rope", follows=follows)
    return dx, sums.view(width)


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    columns: bool,  # noqa: FBT001 - the schema's order
) -> tuple[Tensor, Tensor]:
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty(x.shape[-1] if columns else 0, dtype=sums)


_ROPE = define(
    "head_norm_rope(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> Tensor",
    cpu=_reference,
    cuda=_rope_cuda,
    fake=lambda x, weight, cos, sin, eps: x.new_empty(x.shape),
)
define(
    "head_norm_rope_backward(Tensor grad, Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps,"
    " bool columns) -> (Tensor, Tensor)",
    cpu=_backward_reference,
    cuda=_rope_backward_cuda,
    fake=_backward_fake,
)


def _setup(ctx: Context, inputs: tuple, output: Tensor) -> None:
    x, weight, cos, sin, eps = inputs
    ctx.save_for_backward(x, weight, cos, sin)
    ctx.eps = eps


def _grad(ctx: Context, grad: Tensor) -> tuple:
    x, weight, cos, sin = ctx.saved_tensors
    columns = ctx.needs_input_grad[1]
    if plain(grad, x):
        dx, dw = _rope_backward_cuda(grad, x, weight, cos, sin, ctx.eps, columns)
    else:
        dx, dw = torch.ops.loongforge.head_norm_rope_backward(grad, x, weight, cos, sin, ctx.eps, columns)
    return dx, dw.to(weight.dtype) if columns else None, None, None, None


_fast = differentiable(_ROPE, cuda=_rope_cuda, setup_context=_setup, backward=_grad)


def head_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, *, eps: float = 1e-6) -> Tensor:
    """RMSNorm over each head, then the half-split rotation, as Qwen3 does with queries and keys.

    Args:
        x: (B, L, H, D), e.g. a projection's output viewed by heads. D of 16, 32, 64, 128 or 256 has a kernel.
        weight: (D,).
        cos: (L, D) or (B, L, D); no gradient flows to it.
        sin: like `cos`.
        eps: added to the mean square.

    Returns:
        (B, L, H, D), contiguous, in the type of x; transpose for attention.

    Raises:
        ValueError: a shape does not fit.
    """
    tables = (x.shape[1], x.shape[-1]), (x.shape[0], x.shape[1], x.shape[-1])
    if x.dim() != 4 or cos.shape != sin.shape or tuple(cos.shape) not in tables or x.shape[-1] % 2:
        found = f"x {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        message = f"head_norm_rope: need x (B, L, H, D) and cos, sin (L, D) or (B, L, D), got {found}"
        raise ValueError(message)
    if weight.shape != (x.shape[-1],):
        message = f"head_norm_rope: weight must have shape ({x.shape[-1]},), got {tuple(weight.shape)}"
        raise ValueError(message)
    if plain(x, weight, cos, sin):
        return (
            _fast(x, weight, cos, sin, eps) if wants_grad(x, weight) else _rope_cuda(x, weight, cos, sin, eps)
        )
    return torch.ops.loongforge.head_norm_rope(x, weight, cos, sin, eps)
