"""A small vision-language-action model that follows the model protocol, for tests of fusion and graphs.

It has the parts that make fusing hard in one place: variable text length with a key mask, an action mask with
unequal valid lengths, dropout, noise and times drawn per micro-batch, and a frozen prefix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from loongforge_fuse.fusion.batch import PadRule
from loongforge_fuse.protocol import Batch


class TinyVLA(nn.Module):
    """Image and text tokens -> frozen layer -> trainable attention -> flow-matching action head.

    Batch keys: ``images`` (B, 3, H, W) float, ``text`` (B, T, width) float with ``text_mask`` (B, T) bool,
    ``action`` (B, S, A) float with ``action_mask`` (B, S, A) bool, and after ``draw`` ``noise`` and ``time``.

    Args:
        width: Feature width. Default 32.
        dropout: Dropout probability. Default 0.
        action_dim: Action dimensions A. Default 5.
    """

    def __init__(self, *, width: int = 32, dropout: float = 0.0, action_dim: int = 5) -> None:
        super().__init__()
        self.pad_rules = {
            "text": PadRule(),
            "text_mask": PadRule(),
            "action": PadRule(),
            "action_mask": PadRule(),
            "noise": PadRule(),
            "seen": PadRule(),
        }
        self.patch = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.frozen = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        for parameter in [*self.patch.parameters(), *self.frozen.parameters()]:
            parameter.requires_grad_(False)
        self.query = nn.Linear(action_dim + 1, width)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, action_dim))

    def draw(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        """Add ``noise`` like ``action`` and ``time`` (B,)."""
        action = _tensor(batch, "action")
        noise = torch.randn(action.shape, generator=generator, device=action.device, dtype=action.dtype)
        time = torch.rand(action.shape[0], generator=generator, device=action.device, dtype=action.dtype)
        return {**batch, "noise": noise, "time": time}

    def loss_count(self, batch: Batch) -> Tensor:
        """Return the valid action elements per sample (B,)."""
        return _tensor(batch, "action_mask").flatten(1).sum(dim=1)

    def frozen_modules(self) -> list[nn.Module]:
        """Return the modules of the frozen prefix."""
        return [self.patch, self.frozen]

    def run_frozen(self, batch: Batch) -> dict[str, Tensor]:
        """Return the encoded image and text tokens as ``seen`` (B, patches + T, width)."""
        return self.finish_frozen(self.begin_frozen(batch))

    def begin_frozen(self, batch: Batch) -> dict[str, Tensor]:
        """Return the tokens before their encoding, under the same name."""
        images, text = _tensor(batch, "images"), _tensor(batch, "text")
        return {"seen": torch.cat([self.patch(images).flatten(2).transpose(1, 2), text], dim=1)}

    def finish_frozen(self, batch: Batch) -> dict[str, Tensor]:
        """Encode the tokens."""
        return {"seen": self.frozen(_tensor(batch, "seen"))}

    def frozen_inputs(self, batch: Batch) -> list[str]:
        """Return the entries that only the frozen prefix reads."""
        return [name for name in batch if name in {"images", "text"}]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return ``loss``, ``loss_sum`` (B,) and ``loss_count`` (B,)."""
        made = batch.get("seen")
        seen = made if isinstance(made, Tensor) else self.run_frozen(batch)["seen"]
        mask = _tensor(batch, "text_mask")
        keep = functional.pad(mask, (seen.shape[1] - mask.shape[1], 0), value=True)
        noise, action = _tensor(batch, "noise"), _tensor(batch, "action")
        time = _tensor(batch, "time")[:, None, None]
        mixed = (1 - time) * noise + time * action
        query = self.query(torch.cat([mixed, time.expand(-1, mixed.shape[1], 1)], dim=-1))
        attended = functional.scaled_dot_product_attention(
            query, self.key(seen), self.value(seen), attn_mask=keep[:, None, :]
        )
        predicted = self.head(self.norm(query + self.dropout(attended)))
        mask = _tensor(batch, "action_mask").to(predicted.dtype)
        error = (predicted - (action - noise)).square() * mask
        sums, counts = error.flatten(1).sum(dim=1), mask.flatten(1).sum(dim=1)
        return {"loss": sums.sum() / counts.sum().clamp(min=1), "loss_sum": sums, "loss_count": counts}


def tiny_batch(
    samples: int,
    *,
    seed: int,
    text: int = 6,
    steps: int = 8,
    size: int = 16,
    width: int = 32,
    action_dim: int = 5,
    valid: tuple[int, ...] | None = None,
) -> dict[str, object]:
    """Make a seeded micro-batch for :class:`TinyVLA` on the CPU.

    Args:
        samples: Samples B.
        seed: Seed of the numbers.
        text: Text tokens; every sample has between one and all of them valid.
        steps: Action steps S.
        size: Image height and width, a multiple of 4.
        width: The model's width.
        action_dim: Action dimensions.
        valid: Valid action steps of each sample. Default random between 1 and ``steps``.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, text + 1, (samples,), generator=generator)
    if valid is None:
        valid = tuple(int(v) for v in torch.randint(1, steps + 1, (samples,), generator=generator))
    mask = torch.arange(steps)[None, :, None] < torch.tensor(valid)[:, None, None]
    return {
        "images": torch.randn(samples, 3, size, size, generator=generator),
        "text": torch.randn(samples, text, width, generator=generator),
        "text_mask": torch.arange(text)[None, :] < lengths[:, None],
        "action": torch.randn(samples, steps, action_dim, generator=generator),
        "action_mask": mask.expand(samples, steps, action_dim).contiguous(),
        "task": [f"task {seed}.{i}" for i in range(samples)],
    }


def _tensor(batch: Batch, key: str) -> Tensor:
    value = batch[key]
    if not isinstance(value, Tensor):
        message = f"batch['{key}'] must be a tensor, got {type(value).__name__}"
        raise TypeError(message)
    return value
