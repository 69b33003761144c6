"""The transformer behind the synthetic traces. Imports torch; imported on demand only."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loongforge_mem.shapes import TransformerShape


class Block(nn.Module):
    """Attention and MLP with pre-norm."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.causal, self.gated = shape.heads, shape.causal, shape.gated
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, shape.mlp), nn.Linear(shape.mlp, width)
        self.gate = nn.Linear(width, shape.mlp) if shape.gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, width) to the same shape."""
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        y = self.norm2(x)
        inner = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(inner)


class Transformer(nn.Module):
    """Blocks, and a vocabulary with cross-entropy in float32 where the shape asks for one."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width) if shape.vocabulary else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False) if shape.vocabulary else None

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the scalar loss of one batch."""
        x = self.embed(batch["tokens"]) if self.embed is not None else batch["x"]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.shape.recompute else block(x)
        x = self.norm(x)
        if self.head is None:
            return x.float().square().mean()
        logits = self.head(x).float()
        return F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())
