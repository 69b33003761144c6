"""Inertial and other time series: rows joined into tokens, then a small transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from loongforge.recipes.multimodal.audio import SelfAttention, sinusoids
from loongforge.recipes.multimodal.config import SeriesConfig


class SeriesBlock(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.attention = SelfAttention(d, config.heads)
        self.norm = nn.LayerNorm(d)
        self.enter = nn.Linear(d, 4 * d)
        self.leave = nn.Linear(4 * d, d)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Transform (B, T, D)."""
        x = x + self.attention(x, bias)
        return x + self.leave(functional.gelu(self.enter(self.norm(x))))


class SeriesEncoder(nn.Module):
    """Series (B, rows, channels) to tokens (B, rows / patch, D)."""

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__()
        self.config = config
        self.enter = nn.Linear(config.patch * config.channels, config.hidden_size)
        self.layers = nn.ModuleList(SeriesBlock(config) for _ in range(config.layers))

    def forward(self, rows: Tensor, valid: Tensor) -> Tensor:
        """Encode; ``valid`` (B, tokens) marks tokens whose rows were recorded."""
        b, count, _ = rows.shape
        joined = rows.reshape(b, count // self.config.patch, -1).to(self.enter.weight.dtype)
        x = self.enter(joined)
        x = x + sinusoids(x.shape[1], x.shape[-1], x.device).to(x.dtype)
        keep = valid | ~valid.any(dim=1, keepdim=True)
        bias = torch.zeros(keep.shape, dtype=x.dtype, device=x.device).masked_fill(~keep, float("-inf"))
        for layer in self.layers:
            x = layer(x, bias[:, None, None, :])
        return x
