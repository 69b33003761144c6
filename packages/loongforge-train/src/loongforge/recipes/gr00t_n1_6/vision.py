"""SigLIP2 vision tower with variable grids: patches, resized learned positions, full attention per image."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from loongforge.recipes.gr00t_n1_6.config import VisionConfig


def patchify(images: Tensor, patch: int) -> Tensor:
    """Cut images into patch vectors in raster order.

    Args:
        images: (N, C, H, W), H and W multiples of ``patch``.
        patch: Side of a patch, pixels.

    Returns:
        (N, H/patch * W/patch, patch * patch * C); inside a vector the channel varies fastest.
    """
    n, c, h, w = images.shape
    x = images.reshape(n, c, h // patch, patch, w // patch, patch)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(n, (h // patch) * (w // patch), patch * patch * c)


class VisionEmbeddings(nn.Module):
    """Linear patch embedding plus the learned position table, resized to the image's grid."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.grid = config.position_grid
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, config.hidden_size)
        self.position_embedding = nn.Embedding(config.position_grid**2, config.hidden_size)
        self._positions: dict[tuple[int, int], tuple[tuple[object, ...], Tensor]] = {}

    def positions(self, rows: int, columns: int) -> Tensor:
        """Return the position table resized to ``rows`` x ``columns``: (rows * columns, D).

        Bilinear with antialias in float32. The result is kept per grid while the table does not train.
        """
        table = self.position_embedding.weight
        # A compiler traces the resize into its graph; it cannot compare addresses.
        if table.requires_grad or torch.compiler.is_compiling():
            return self._resized(rows, columns)
        state = (table.data_ptr(), table._version, table.dtype, table.device)  # noqa: SLF001
        known = self._positions.get((rows, columns))
        if known is not None and known[0] == state:
            return known[1]
        result = self._resized(rows, columns)
        self._positions[(rows, columns)] = (state, result)
        return result

    def _resized(self, rows: int, columns: int) -> Tensor:
        table = self.position_embedding.weight
        square = table.float().reshape(1, self.grid, self.grid, -1).permute(0, 3, 1, 2)
        if (rows, columns) != (self.grid, self.grid):
            square = functional.interpolate(
                square, size=(rows, columns), mode="bilinear", align_corners=False, antialias=True
            )
        return square.reshape(square.shape[1], rows * columns).t().to(table.dtype).contiguous()

    def forward(self, images: Tensor) -> Tensor:
        """Embed images (N, 3, H, W) of one size as tokens (N, P, D)."""
        rows, columns = images.shape[-2] // self.patch_size, images.shape[-1] // self.patch_size
        tokens = self.patch_embedding(patchify(images, self.patch_size))
        return tokens + self.positions(rows, columns)


class VisionAttention(nn.Module):
    """Full self-attention inside each image."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.heads = config.heads
        self.k_proj = nn.Linear(d, d)
        self.v_proj = nn.Linear(d, d)
        self.q_proj = nn.Linear(d, d)
        self.out_proj = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over (N, P, D)."""
        n, p, d = x.shape
        shape = (n, p, self.heads, d // self.heads)
        q, k, v = (f(x).view(shape).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(mixed.transpose(1, 2).reshape(n, p, d))


class VisionMLP(nn.Module):
    """Two linear layers around a tanh-approximated GELU."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.mlp_size)
        self.fc2 = nn.Linear(config.mlp_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (..., D)."""
        return self.fc2(functional.gelu(self.fc1(x), approximate="tanh"))


class VisionBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.self_attn = VisionAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = VisionMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """Transform (N, P, D)."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionEncoder(nn.Module):
    """The stack of blocks."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(VisionBlock(config) for _ in range(config.layers))

    def forward(self, x: Tensor) -> Tensor:
        """Transform (N, P, D)."""
        for layer in self.layers:
            x = layer(x)
        return x


class PoolingHead(nn.Module):
    """Attention pooling of the original tower: stored in every checkpoint, never called."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.attention = nn.MultiheadAttention(config.hidden_size, config.heads, batch_first=True)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = VisionMLP(config)


class VisionTransformer(nn.Module):
    """Embeddings, blocks and the closing norm."""

    def __init__(self, config: VisionConfig, *, pooling_head: bool) -> None:
        super().__init__()
        self.embeddings = VisionEmbeddings(config)
        self.encoder = VisionEncoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        if pooling_head:
            self.head = PoolingHead(config)

    def forward(self, images: Tensor) -> Tensor:
        """Encode images (N, 3, H, W) of one size as (N, P, D)."""
        return self.post_layernorm(self.encoder(self.embeddings(images)))


class VisionModel(nn.Module):
    """Wrapper that gives the parameters their published names."""

    def __init__(self, config: VisionConfig, *, pooling_head: bool = True) -> None:
        super().__init__()
        self.vision_model = VisionTransformer(config, pooling_head=pooling_head)

    def forward(self, images: Tensor) -> Tensor:
        """Encode images (N, 3, H, W) of one size as (N, P, D)."""
        return self.vision_model(images)
