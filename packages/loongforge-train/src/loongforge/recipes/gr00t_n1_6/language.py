"""Qwen3 decoder cut at the selected layer; right-padded rows, so that causal attention needs no mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from loongforge.recipes.gr00t_n1_6.config import LanguageConfig
from loongforge.recipes.gr00t_n1_6.layers import RMSNorm


def rotary_table(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return float32 cosines and sines (length, head_dim), the half-split layout of Qwen3."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), 1.0 / theta**exponent)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate heads (B, H, L, D) by the table (L, D)."""
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-high, low), dim=-1) * sines


class LanguageAttention(nn.Module):
    """Causal grouped-query attention with per-head RMSNorm of queries and keys before the rotation."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        d, h = config.hidden_size, config.head_dim
        self.head_dim = h
        self.grouped = config.heads != config.kv_heads
        self.q_proj = nn.Linear(d, config.heads * h, bias=False)
        self.k_proj = nn.Linear(d, config.kv_heads * h, bias=False)
        self.v_proj = nn.Linear(d, config.kv_heads * h, bias=False)
        self.o_proj = nn.Linear(config.heads * h, d, bias=False)
        self.q_norm = RMSNorm(h, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(h, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Attend over (B, L, D); row ``i`` sees rows ``0..i``."""
        b, length, _ = x.shape
        shape = (b, length, -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2), cosines, sines)
        k = rotate(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), cosines, sines)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(mixed.transpose(1, 2).reshape(b, length, -1))


class LanguageMLP(nn.Module):
    """SiLU-gated MLP."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (..., D)."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class LanguageLayer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.self_attn = LanguageAttention(config)
        self.mlp = LanguageMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Transform (B, L, D)."""
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding table, layers, closing norm."""

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LanguageLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._tables: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary table for ``length`` positions in the dtype and on the device of ``like``."""
        key = (length, like.device, like.dtype)
        known = self._tables.get(key)
        if known is None:
            cosines, sines = rotary_table(length, self.config.head_dim, self.config.rope_theta, like.device)
            known = (cosines.to(like.dtype), sines.to(like.dtype))
            self._tables[key] = known
        return known

    def run(self, x: Tensor, layers: Sequence[nn.Module], *, recompute: bool = False) -> Tensor:
        """Run ``layers`` over hidden states (B, L, D)."""
        cosines, sines = self.tables(x.shape[1], x)
        for layer in layers:
            if recompute and torch.is_grad_enabled():
                x = checkpoint(layer, x, cosines, sines, use_reentrant=False)
            else:
                x = layer(x, cosines, sines)
        return x


class LanguageModel(nn.Module):
    """Decoder plus the stored, never needed vocabulary projection."""

    def __init__(self, config: LanguageConfig, *, lm_head: bool = True) -> None:
        super().__init__()
        self.model = Decoder(config)
        if lm_head:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
