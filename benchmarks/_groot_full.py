"""The GR00T N1.6 model at full size (or tiny, for a dry run) with a synthetic batch, for step benchmarks.

Random weights. One embodiment slot, as single-robot fine-tuning steps it: 1.3 of the 1.6 billion trainable
parameters receive gradients then. A sample has two 252x252 views, 220 vision-language and 51 action tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from loongforge.recipes.gr00t_n1_6.config import (
    DiTConfig,
    GrootConfig,
    HeadConfig,
    LanguageConfig,
    VisionConfig,
    WorkConfig,
)
from loongforge.recipes.gr00t_n1_6.initialise import build_on_meta, materialise, random_fill
from loongforge.recipes.gr00t_n1_6.layout import layout_tokens
from loongforge.recipes.gr00t_n1_6.slots import use_single_slot
from torch import Tensor, nn

TOKENS, STEPS, DIMS = 220, 16, 7


def config(*, tiny: bool = False, dropout: float | None = None) -> GrootConfig:
    """Return the full configuration, or one of the same shape that a CPU can run."""
    work = WorkConfig(keep_unused=False)
    full = GrootConfig(work=work, head=HeadConfig(max_embodiments=1))
    if tiny:
        full = GrootConfig(
            vision=VisionConfig(hidden_size=32, layers=2, heads=2, mlp_size=64),
            language=LanguageConfig(
                hidden_size=64, layers=6, heads=4, kv_heads=2, head_dim=16, mlp_size=96, vocab_size=152_000
            ),
            dit=DiTConfig(layers=4, heads=2, head_dim=16, output_size=32),
            head=HeadConfig(max_embodiments=1, hidden_size=32),
            work=work,
        )
    if dropout is not None:
        full = dataclasses.replace(full, dit=dataclasses.replace(full.dit, dropout=dropout))
    return full


def build(
    *,
    tiny: bool = False,
    device: str = "cuda",
    seed: int = 0,
    masters: bool = False,
    dropout: float | None = None,
) -> nn.Module:
    """Build the model in training mode.

    Args:
        tiny: The small configuration.
        device: Where it goes.
        seed: Seed of the weights.
        masters: Trainable parameters in float32 (for autocast); otherwise everything is bfloat16.
        dropout: Replaces the head's dropout probability.
    """
    cfg = config(tiny=tiny, dropout=dropout)
    model = build_on_meta(cfg)
    materialise(model, device, frozen_dtype=torch.bfloat16, fill=random_fill(seed, cfg))
    if not masters:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    # One slot exists, so the layers need no look-up by embodiment.
    use_single_slot(model, 0, live_only=True)
    return model.train()


def micro_batch(
    samples: int,
    *,
    model: nn.Module,
    device: str = "cuda",
    seed: int = 0,
    side: int = 252,
    tokens: int = TOKENS,
) -> dict[str, object]:
    """Make one micro-batch on ``device``; the number of valid text tokens and action steps varies by sample.

    Args:
        samples: Samples.
        model: The model it is for.
        device: Where the tensors go.
        seed: Seed of the numbers.
        side: Height and width of the two images, pixels, a multiple of 28.
        tokens: Padded length of a row of text and image tokens.
    """
    cfg = model.config
    generator = torch.Generator().manual_seed(seed)
    images = 2 * cfg.image_tokens(side, side)
    language = cfg.language
    rows = []
    for _ in range(samples):
        text = int(torch.randint(min(40, tokens - images), tokens - images + 1, (), generator=generator))
        ids = torch.randint(0, 1000, (text,), generator=generator).tolist()
        rows.append([*ids[:20], *[language.image_token_id] * images, *ids[20:]])
    layout = layout_tokens(
        rows, image_token_id=language.image_token_id, pad_token_id=language.pad_token_id, pad_to=tokens
    )
    head = cfg.head
    mask = torch.zeros(samples, head.action_horizon, head.max_action_dim)
    for row, steps in enumerate(
        torch.randint(STEPS // 2, STEPS + 1, (samples,), generator=generator).tolist()
    ):
        mask[row, :steps, :DIMS] = 1
    batch: dict[str, Tensor] = {
        **layout.items(),
        "pixel_values": torch.randn(samples, 2, 3, side, side, generator=generator).to(torch.bfloat16),
        "state": torch.randn(samples, 1, head.max_state_dim, generator=generator),
        "action": torch.randn(samples, head.action_horizon, head.max_action_dim, generator=generator) * mask,
        "action_mask": mask,
        "embodiment_id": torch.zeros(samples, dtype=torch.int64),
    }
    return {name: value.to(device) for name, value in batch.items()}


def joined(batches: list[dict[str, object]]) -> dict[str, object]:
    """Concatenate micro-batches as a loader with the large batch size would."""
    return {name: torch.cat([b[name] for b in batches if isinstance(b[name], Tensor)]) for name in batches[0]}


CATEGORIES: Mapping[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "gemm": ("gemm", "cutlass", "cublas", "nvjet", "sm90_xmma", "wgmma", "splitk", "gemv", "_scaled_mm"),
    "optimizer": ("adam", "multi_tensor"),
    "inductor": ("triton",),
    "copy": ("memcpy", "memset", "copy", "catarray", "cat_"),
    "reduce": ("reduce", "norm", "softmax"),
}


def category(kernel: str) -> str:
    """Sort a kernel's name into a family."""
    name = kernel.lower()
    for family, marks in CATEGORIES.items():
        if any(mark in name for mark in marks):
            return family
    return "elementwise"
