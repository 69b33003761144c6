"""A model with the shape of GR00T N1.6: same layers, widths and token counts, random weights, no data
pipeline.

Frozen SigLIP2-like vision tower (27 x 1152), connector, 16-layer Qwen3-like language model (2048, top layers
train) and a 32-layer diffusion transformer (1536) that alternates cross- and self-attention. Used where a
benchmark needs the memory and launch pattern of the real model but neither its weights nor its recipe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes; the defaults are those of the full model."""

    vision_layers: int = 27
    vision_width: int = 1152
    vision_heads: int = 16
    vision_mlp: int = 4304
    patch: int = 14
    grid: int = 16
    llm_layers: int = 16
    llm_width: int = 2048
    llm_heads: int = 16
    llm_kv_heads: int = 8
    llm_head_dim: int = 128
    llm_mlp: int = 6144
    llm_train_layers: int = 4
    vocabulary: int = 151_680
    dit_layers: int = 32
    dit_width: int = 1536
    dit_heads: int = 32
    dit_out: int = 1024
    action_dim: int = 128
    horizon: int = 50
    images: int = 2
    image_size: int = 252
    text_tokens: int = 58


FULL = Shape()
TINY = Shape(
    vision_layers=2, vision_width=64, vision_heads=4, vision_mlp=160, grid=4,
    llm_layers=3, llm_width=96, llm_heads=4, llm_kv_heads=2, llm_head_dim=24, llm_mlp=256, llm_train_layers=1,
    vocabulary=512, dit_layers=4, dit_width=96, dit_heads=4, dit_out=64, action_dim=32, horizon=16,
    image_size=56, text_tokens=12,
)  # fmt: skip


class VisionBlock(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads = s.vision_heads
        self.norm1, self.norm2 = nn.LayerNorm(s.vision_width), nn.LayerNorm(s.vision_width)
        self.qkv, self.out = (
            nn.Linear(s.vision_width, 3 * s.vision_width),
            nn.Linear(s.vision_width, s.vision_width),
        )
        self.up, self.down = nn.Linear(s.vision_width, s.vision_mlp), nn.Linear(s.vision_mlp, s.vision_width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Vision(nn.Module):
    """Images (B, 3, H, W) with H and W multiples of twice the patch -> tokens (B, H*W / (4 patch^2), llm
    width).
    """

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, s.vision_width, s.patch, s.patch)
        self.position = nn.Parameter(torch.zeros(1, s.vision_width, s.grid, s.grid))
        self.blocks = nn.ModuleList(VisionBlock(s) for _ in range(s.vision_layers))
        self.norm = nn.LayerNorm(4 * s.vision_width)
        self.connector = nn.Sequential(
            nn.Linear(4 * s.vision_width, s.llm_width), nn.GELU(), nn.Linear(s.llm_width, s.llm_width)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images)
        b, d, h, w = x.shape
        x = x + F.interpolate(self.position.float(), (h, w), mode="bilinear").to(x.dtype)
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        x = x.view(b, h // 2, 2, w // 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(b, h * w // 4, 4 * d)
        return self.connector(self.norm(x))


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class LanguageBlock(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = s.llm_heads, s.llm_kv_heads, s.llm_head_dim
        self.norm1, self.norm2 = RMSNorm(s.llm_width), RMSNorm(s.llm_width)
        self.qn, self.kn = RMSNorm(self.dim), RMSNorm(self.dim)
        self.q = nn.Linear(s.llm_width, self.heads * self.dim, bias=False)
        self.k = nn.Linear(s.llm_width, self.kv * self.dim, bias=False)
        self.v = nn.Linear(s.llm_width, self.kv * self.dim, bias=False)
        self.o = nn.Linear(self.heads * self.dim, s.llm_width, bias=False)
        self.gate = nn.Linear(s.llm_width, s.llm_mlp, bias=False)
        self.up = nn.Linear(s.llm_width, s.llm_mlp, bias=False)
        self.down = nn.Linear(s.llm_mlp, s.llm_width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, n, _ = x.shape
        y = self.norm1(x)
        q = rotate(self.qn(self.q(y).view(b, n, self.heads, self.dim)).transpose(1, 2), cos, sin)
        k = rotate(self.kn(self.k(y).view(b, n, self.kv, self.dim)).transpose(1, 2), cos, sin)
        v = self.v(y).view(b, n, self.kv, self.dim).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(b, n, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class DitBlock(nn.Module):
    def __init__(self, s: Shape, cross: bool) -> None:
        super().__init__()
        self.heads, width = s.dit_heads, s.dit_width
        self.modulate = nn.Linear(width, 2 * width)
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        source = s.llm_width if cross else width
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(source, width), nn.Linear(source, width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, time: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        b, n, d = x.shape
        scale, shift = self.modulate(F.silu(time)).unsqueeze(1).chunk(2, -1)
        y = self.norm1(x) * (1 + scale) + shift
        source = y if context is None else context
        q = self.q(y).view(b, n, self.heads, -1).transpose(1, 2)
        k = self.k(source).view(b, source.shape[1], self.heads, -1).transpose(1, 2)
        v = self.v(source).view(b, source.shape[1], self.heads, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GrootShape(nn.Module):
    """The model. ``forward(batch)`` returns ``{"loss": scalar}``."""

    def __init__(self, s: Shape = FULL) -> None:
        super().__init__()
        self.shape = s
        self.vision = Vision(s)
        self.embedding = nn.Embedding(s.vocabulary, s.llm_width)
        self.language = nn.ModuleList(LanguageBlock(s) for _ in range(s.llm_layers))
        self.language_norm = RMSNorm(s.llm_width)
        self.state = nn.Sequential(nn.Linear(s.action_dim, 1024), nn.ReLU(), nn.Linear(1024, s.dit_width))
        self.action = nn.Sequential(
            nn.Linear(s.action_dim, s.dit_width), nn.SiLU(), nn.Linear(s.dit_width, s.dit_width)
        )
        self.position = nn.Parameter(torch.zeros(s.horizon, s.dit_width))
        self.time = nn.Sequential(nn.Linear(256, s.dit_width), nn.SiLU(), nn.Linear(s.dit_width, s.dit_width))
        self.dit = nn.ModuleList(DitBlock(s, cross=i % 2 == 0) for i in range(s.dit_layers))
        self.head = nn.Sequential(
            nn.LayerNorm(s.dit_width),
            nn.Linear(s.dit_width, s.dit_out),
            nn.ReLU(),
            nn.Linear(s.dit_out, s.action_dim),
        )
        for frozen in (self.vision, self.embedding, *self.language[: s.llm_layers - s.llm_train_layers]):
            frozen.requires_grad_(False)

    def backbone(self, images: Tensor, text: Tensor) -> Tensor:
        """Images (B, I, 3, H, W) and text (B, T) -> tokens (B, I * image tokens + T, llm width)."""
        b, views = images.shape[:2]
        with torch.no_grad():
            seen = self.vision(images.flatten(0, 1))
            x = torch.cat((seen.view(b, views * seen.shape[1], -1), self.embedding(text)), 1)
        half = self.shape.llm_head_dim // 2
        rate = torch.exp(torch.arange(half, device=x.device) * (-math.log(1e6) / half))
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * rate
        cos, sin = (torch.cat((f(angle), f(angle)), -1).to(x.dtype) for f in (torch.cos, torch.sin))
        for index, block in enumerate(self.language):
            train = index >= self.shape.llm_layers - self.shape.llm_train_layers
            with torch.set_grad_enabled(train and torch.is_grad_enabled()):
                x = block(x, cos, sin)
        return self.language_norm(x)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        context = self.backbone(batch["images"], batch["text"])
        action, noise, t = batch["action"], batch["noise"], batch["time"]
        noisy = (1 - t)[:, None, None] * noise + t[:, None, None] * action
        frequency = torch.exp(torch.arange(128, device=t.device) * (-math.log(10000.0) / 128))
        wave = t.float()[:, None] * 1000 * frequency
        time = self.time(torch.cat((wave.sin(), wave.cos()), -1).to(action.dtype))
        x = torch.cat((self.state(batch["state"]).unsqueeze(1), self.action(noisy) + self.position), 1)
        is_text = torch.arange(context.shape[1], device=x.device) >= context.shape[1] - batch["text"].shape[1]
        for index, block in enumerate(self.dit):
            cross = index % 2 == 0
            mask = (is_text if index % 4 == 0 else ~is_text)[None, None, None] if cross else None
            x = block(x, time, context if cross else None, mask)
        predicted = self.head(x[:, 1:])
        error = (predicted - (action - noise)).float().square() * batch["mask"]
        return {"loss": error.sum() / batch["mask"].sum()}


def make_batch(
    s: Shape,
    samples: int,
    device: str,
    dtype: torch.dtype,
    *,
    image_size: int | None = None,
    text_tokens: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return one random batch."""
    g = torch.Generator(device=device if device not in ("meta",) else "cpu").manual_seed(seed)
    size, tokens = image_size or s.image_size, text_tokens or s.text_tokens

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=g)

    return {
        "images": normal(samples, s.images, 3, size, size),
        "text": torch.randint(0, s.vocabulary, (samples, tokens), device=device, generator=g),
        "state": normal(samples, s.action_dim),
        "action": normal(samples, s.horizon, s.action_dim),
        "noise": normal(samples, s.horizon, s.action_dim),
        "time": torch.rand(samples, device=device, generator=g).to(dtype),
        "mask": torch.ones(samples, s.horizon, s.action_dim, device=device),
    }
