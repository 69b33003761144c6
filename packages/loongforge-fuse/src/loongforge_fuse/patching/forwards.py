"""Fused forwards: each computes what the named module computes, with fewer passes over memory.

Linear layers are called as modules, so their hooks, wrappers and autocast keep working. Under autocast, norms
whose only consumers are linear layers return the autocast type at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from loongforge_fuse import ops
from loongforge_fuse.ops._common import in_product
from loongforge_fuse.precision.fp8 import Float8FrozenLinear

# Submodules are reached by attribute names that the patterns have checked.
Module = Any

_EPILOGUE_TYPES = (torch.bfloat16, torch.float16)


def _linear_input(x: Tensor) -> torch.dtype:
    """Type in which a linear layer will read its input."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _keys(count: int, device: torch.device) -> Tensor:
    """Draw `count` dropout keys from torch's generator.

    That generator is the one state of randomness: manual_seed, checkpoints, activation recomputation and CUDA
    graphs all handle it already.
    """
    return torch.randint(0, 2**62, (count, 2), device=device)


def _drop(module: Module) -> float:
    return float(module.p) if module.training else 0.0


def layer_norm(module: Module, x: Tensor) -> Tensor:
    """nn.LayerNorm over the last dimension."""
    # torch runs layer_norm in float32 under autocast and returns float32.
    kind = torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
    weight, bias = module.weight, module.bias
    return ops.layer_norm_modulate(_rows(x), weight=weight, bias=bias, eps=module.eps, dtype=kind).view(
        x.shape
    )


def rms_norm(module: Module, x: Tensor) -> Tensor:
    """RMSNorm that returns the input's type, with the weight's multiplication inside."""
    return ops.rms_norm(_rows(x), weight=module.weight, eps=rms_eps(module)).view(x.shape)


def rms_eps(module: Module) -> float:
    """Return the epsilon of an RMSNorm, however the class calls it."""
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return float(torch.finfo(torch.float32).eps if eps is None else eps)


def _rows(x: Tensor) -> Tensor:
    return x.unsqueeze(0) if x.dim() == 1 else x


def gelu_tanh_mlp(module: Module, x: Tensor) -> Tensor:
    """fc2(gelu_tanh(fc1(x)))."""
    first = module.fc1
    if torch.is_grad_enabled() or not x.is_cuda or x.dtype not in _EPILOGUE_TYPES or not _plain(first, x):
        return _after(module.fc2, "gelu_tanh", first(x))
    # Nothing is kept for a backward pass, so the product may write the activation itself.
    in_product("gelu_tanh")
    rows = torch._addmm_activation(  # noqa: SLF001 - cuBLASLt's epilogue has no public name
        first.bias, x.flatten(0, -2), first.weight.t(), use_gelu=True
    )
    return module.fc2(rows.view(*x.shape[:-1], -1))


def _bare(module: Module) -> bool:
    """Whether calling a linear layer is one product with a bias and nothing else."""
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and module.bias is not None
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)  # noqa: SLF001
    )


def _plain(module: Module, x: Tensor) -> bool:
    """Whether that product has one type, the input's."""
    return _bare(module) and module.weight.dtype == module.bias.dtype == x.dtype == _linear_input(x)


def _float8(module: Module) -> bool:
    """Whether a linear layer is a float8 one that nobody watches or has changed: its halves may be called."""
    return (
        type(module) is Float8FrozenLinear
        and "forward" not in vars(module)
        and not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)  # noqa: SLF001
    )


def _after(linear: Module, activation: str, x: Tensor, up: Tensor | None = None) -> Tensor:
    """Apply an activation and a linear layer; in float8 the activation is part of quantising its input."""
    if _float8(linear):
        return linear.multiply(linear.rows(x, up=up, activation=activation), x)
    return linear(ops.gelu_tanh(x) if up is None else ops.silu_mul(x, up))


def _each(linears: tuple[Module, ...], x: Tensor) -> tuple[Tensor, ...]:
    """Apply linear layers that read the same input; in float8 it is quantised once."""
    if all(_float8(linear) for linear in linears):
        rows = linears[0].rows(x)
        return tuple(linear.multiply(rows, x) for linear in linears)
    return tuple(linear(x) for linear in linears)


def silu_gated_mlp(module: Module, x: Tensor) -> Tensor:
    """down_proj(silu(gate_proj(x)) * up_proj(x))."""
    gate, up = _each((module.gate_proj, module.up_proj), x)
    return _after(module.down_proj, "silu_mul", gate, up)


def vision_attention(module: Module, x: Tensor) -> Tensor:
    """Full attention of one head width; what its projections read is one tensor."""
    n, p, d = x.shape
    projected = _each((module.q_proj, module.k_proj, module.v_proj), x)
    q, k, v = (t.view(n, p, module.heads, d // module.heads).transpose(1, 2) for t in projected)
    mixed = functional.scaled_dot_product_attention(q, k, v)
    return module.out_proj(mixed.transpose(1, 2).reshape(n, p, d))


def vision_block(module: Module, x: Tensor) -> Tensor:
    """Pre-norm attention and MLP; the addition after attention joins the second norm."""
    first, second = module.layer_norm1, module.layer_norm2
    kind = _linear_input(x)
    y = ops.layer_norm_modulate(x, weight=first.weight, bias=first.bias, eps=first.eps, dtype=kind)
    attended = module.self_attn(y)
    y, total = ops.layer_norm_modulate(
        x, residual=attended, weight=second.weight, bias=second.bias, eps=second.eps, dtype=kind
    )
    return total + module.mlp(y)


def language_attention(module: Module, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Causal grouped-query attention; head norms and rotation are one pass each for queries and keys."""
    b, length, _ = x.shape
    shape = (b, length, -1, module.head_dim)
    q_norm, k_norm = module.q_norm, module.k_norm
    q, k, v = (t.view(shape) for t in _each((module.q_proj, module.k_proj, module.v_proj), x))
    q = ops.head_norm_rope(q, q_norm.weight, cosines, sines, eps=rms_eps(q_norm))
    k = ops.head_norm_rope(k, k_norm.weight, cosines, sines, eps=rms_eps(k_norm))
    mixed = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=module.grouped
    )
    return module.o_proj(mixed.transpose(1, 2).reshape(b, length, -1))


def language_layer(module: Module, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Pre-norm decoder layer; the first addition joins the second norm."""
    first, second = module.input_layernorm, module.post_attention_layernorm
    attended = module.self_attn(ops.rms_norm(x, weight=first.weight, eps=rms_eps(first)), cosines, sines)
    y, total = ops.rms_norm(x, residual=attended, weight=second.weight, eps=rms_eps(second))
    return total + module.mlp(y)


def dit_block(
    module: Module, x: Tensor, activated_time: Tensor, memory: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Modulated norm, attention, norm, feed-forward, with all four dropouts folded into three passes."""
    attention, (project, middle, last, after) = module.attn1, module.ff.net
    table = _linear(module.norm1.linear, activated_time)
    kind = _linear_input(x)
    normed = ops.layer_norm_modulate(x, table=table, eps=1e-5, dtype=kind)
    attended = _attend(attention, normed, normed if memory is None else memory, bias)
    # Two dropouts in series on the attention output are one with the joint probability.
    first = ops.series_probability(_drop(attention.to_out[1]), _drop(module.final_dropout))
    chances = (first, _drop(middle), _drop(after))
    keys = _keys(3, x.device) if any(chances) else None
    if first:
        x = ops.dropout_residual(attended, x, p=first, key=_pick(keys, 0))
        normed = ops.layer_norm_modulate(x, eps=1e-5, dtype=kind)
    else:
        normed, x = ops.layer_norm_modulate(x, residual=attended, eps=1e-5, dtype=kind)
    inner = ops.gelu_tanh(_linear(project.proj, normed), p=chances[1], key=_pick(keys, 1))
    return ops.dropout_residual(_linear(last, inner), x, p=chances[2], key=_pick(keys, 2))


def _linear(module: Module, x: Tensor) -> Tensor:
    """Call a linear layer; a trainable bias gets its gradient from our kernel where that is safe."""
    if torch.is_grad_enabled() and _bare(module) and module.bias.requires_grad:
        return ops.linear(x, module.weight, module.bias)
    return module(x)


def _pick(keys: Tensor | None, row: int) -> Tensor | None:
    return None if keys is None else keys[row]


def _attend(module: Module, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
    """Multi-head attention and output projection, without the dropout that follows."""
    b, t, d = x.shape
    q = _linear(module.to_q, x).view(b, t, module.heads, -1).transpose(1, 2)
    k = _linear(module.to_k, memory).view(b, memory.shape[1], module.heads, -1).transpose(1, 2)
    v = _linear(module.to_v, memory).view(b, memory.shape[1], module.heads, -1).transpose(1, 2)
    mask = None if bias is None else bias.to(q.dtype).expand(b, module.heads, t, -1)
    mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return _linear(module.to_out[0], mixed.transpose(1, 2).reshape(b, t, d))


def is_tanh_gelu(value: object) -> bool:
    """Tell whether an activation is GELU in its tanh form."""
    if isinstance(value, nn.GELU):
        return value.approximate == "tanh"
    return type(value).__name__ in ("GELUTanh", "PytorchGELUTanh", "NewGELUActivation")


def is_silu(value: object) -> bool:
    """Tell whether an activation is SiLU."""
    return isinstance(value, nn.SiLU) or type(value).__name__ == "SiLUActivation"
