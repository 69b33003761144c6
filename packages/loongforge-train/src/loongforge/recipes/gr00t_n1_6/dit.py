"""Diffusion transformer: AdaLN blocks that read the backbone's text, its images, and themselves in turn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from loongforge.recipes.gr00t_n1_6.config import DiTConfig
from loongforge.recipes.gr00t_n1_6.layers import at_dtype_of, plain_layer_norm

TIME_CHANNELS = 256


@dataclass(frozen=True, kw_only=True)
class CrossMemory:
    """What one cross-attention block may read.

    Attributes:
        features: (B, K, D_vl) rows of the backbone.
        bias: Additive mask (B, 1, 1, K), 0 where a row may be read and -inf elsewhere; None where all may.
    """

    features: Tensor
    bias: Tensor | None


def key_bias(valid: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a validity mask (B, K) into the additive attention bias (B, 1, 1, K)."""
    zero = torch.zeros(valid.shape, dtype=dtype, device=valid.device)
    return zero.masked_fill(~valid, float("-inf"))[:, None, None, :]


def time_projection(buckets: Tensor) -> Tensor:
    """Sinusoidal features (B, 256) of integer time buckets (B,), cosines first."""
    half = TIME_CHANNELS // 2
    # Float32 angles reach 1000 radians, so the order of operations shows in the fifth digit.
    exponent = -math.log(10_000) * torch.arange(half, dtype=torch.float32, device=buckets.device) / (half - 1)
    angles = buckets[:, None].float() * torch.exp(exponent)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class TimestepEmbedder(nn.Module):
    """Two linear layers around a SiLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(TIME_CHANNELS, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, projection: Tensor) -> Tensor:
        """Map (B, 256) to (B, width)."""
        return self.linear_2(functional.silu(self.linear_1(projection)))


class TimestepEncoder(nn.Module):
    """Embedding of the flow time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedder(width)

    def forward(self, buckets: Tensor) -> Tensor:
        """Embed integer buckets (B,) as (B, width)."""
        embedder = self.timestep_embedder
        return embedder(at_dtype_of(time_projection(buckets), embedder.linear_1.weight))


class AdaLayerNorm(nn.Module):
    """LayerNorm whose scale and shift come from the time embedding (scale first)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, activated_time: Tensor) -> Tensor:
        """Normalise (B, T, D); ``activated_time`` (B, D) is SiLU of the time embedding."""
        scale, shift = self.linear(activated_time)[:, None].chunk(2, dim=-1)
        return plain_layer_norm(x, 1e-5) * (1 + scale) + shift


class DiTAttention(nn.Module):
    """Multi-head attention; keys and values from the sequence itself or from the backbone."""

    def __init__(self, config: DiTConfig, memory_width: int) -> None:
        super().__init__()
        d = config.width
        self.heads = config.heads
        self.to_q = nn.Linear(d, d)
        self.to_k = nn.Linear(memory_width, d)
        self.to_v = nn.Linear(memory_width, d)
        self.to_out = nn.ModuleList([nn.Linear(d, d), nn.Dropout(config.dropout)])

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        """Attend from (B, T, D) to ``memory`` (B, K, D_m)."""
        b, t, d = x.shape
        q = self.to_q(x).view(b, t, self.heads, -1).transpose(1, 2)
        k = self.to_k(memory).view(b, memory.shape[1], self.heads, -1).transpose(1, 2)
        v = self.to_v(memory).view(b, memory.shape[1], self.heads, -1).transpose(1, 2)
        mask = None if bias is None else bias.to(q.dtype).expand(b, self.heads, t, -1)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out[1](self.to_out[0](mixed.transpose(1, 2).reshape(b, t, d)))


class GeluProjection(nn.Module):
    """Linear layer followed by the tanh-approximated GELU."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (..., D)."""
        return functional.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """Linear, GELU, dropout, linear, dropout."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        d = config.width
        self.net = nn.ModuleList(
            [
                GeluProjection(d, 4 * d),
                nn.Dropout(config.dropout),
                nn.Linear(4 * d, d),
                nn.Dropout(config.dropout),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transform (..., D)."""
        for part in self.net:
            x = part(x)
        return x


class DiTBlock(nn.Module):
    """One block: modulated norm, attention, plain norm, feed-forward; no gates."""

    def __init__(self, config: DiTConfig, memory_width: int | None) -> None:
        super().__init__()
        self.is_cross = memory_width is not None
        self.norm1 = AdaLayerNorm(config.width)
        self.attn1 = DiTAttention(config, config.width if memory_width is None else memory_width)
        self.ff = FeedForward(config)
        # The original applies a second dropout to the attention output, after the one inside to_out.
        self.final_dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, activated_time: Tensor, memory: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Transform (B, T, D); ``memory`` None means self-attention."""
        normed = self.norm1(x, activated_time)
        attended = self.attn1(normed, normed if memory is None else memory, bias)
        x = x + self.final_dropout(attended)
        return x + self.ff(plain_layer_norm(x, 1e-5))


class DiT(nn.Module):
    """The stack, with the closing modulated norm and projection."""

    def __init__(self, config: DiTConfig, memory_width: int) -> None:
        super().__init__()
        self.config = config
        d = config.width
        self.timestep_encoder = TimestepEncoder(d)
        self.transformer_blocks = nn.ModuleList(
            DiTBlock(config, memory_width if i % 2 == 0 else None) for i in range(config.layers)
        )
        self.proj_out_1 = nn.Linear(d, 2 * d)
        self.proj_out_2 = nn.Linear(d, config.output_size)

    def reads_text(self, block: int) -> bool:
        """Tell whether an (even) cross-attention block reads text; the others read images."""
        return block % (2 * self.config.attend_text_every_n_blocks) == 0

    def forward(
        self, x: Tensor, buckets: Tensor, text: CrossMemory, image: CrossMemory, *, recompute: bool = False
    ) -> Tensor:
        """Transform state and action tokens.

        Args:
            x: (B, T, D) tokens.
            buckets: (B,) integer flow times.
            text: Rows that text-reading blocks see.
            image: Rows that image-reading blocks see.
            recompute: Store no activations inside blocks; compute them again in backward.

        Returns:
            (B, T, output_size).
        """
        time = self.timestep_encoder(buckets)
        activated = functional.silu(time)
        for i, block in enumerate(self.transformer_blocks):
            source = (text if self.reads_text(i) else image) if i % 2 == 0 else None
            memory, bias = (None, None) if source is None else (source.features, source.bias)
            if recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, activated, memory, bias, use_reentrant=False)
            else:
                x = block(x, activated, memory, bias)
        shift, scale = self.proj_out_1(activated)[:, None].chunk(2, dim=-1)
        return self.proj_out_2(plain_layer_norm(x, 1e-6) * (1 + scale) + shift)
