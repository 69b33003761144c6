"""Golden values of our own model, for machines without the reference tensors.

The model was compared with the original implementation when the file was written (test_groot_golden.py).
Rewrite it only after that test passes: ``LOONGFORGE_REWRITE_GOLDEN=1 pytest -k golden``.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from loongforge.recipes.gr00t_n1_6 import (
    DiTConfig,
    GrootConfig,
    GrootModel,
    HeadConfig,
    LanguageConfig,
    TuneConfig,
    VisionConfig,
)
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parent / "golden" / "groot_micro.safetensors"
TOLERANCE = 1e-5

MICRO = GrootConfig(
    vision=VisionConfig(hidden_size=16, layers=2, heads=2, mlp_size=24, position_grid=4),
    language=LanguageConfig(
        hidden_size=24,
        layers=3,
        heads=4,
        kv_heads=2,
        head_dim=8,
        mlp_size=40,
        vocab_size=64,
        image_token_id=50,
        pad_token_id=0,
    ),
    dit=DiTConfig(layers=4, heads=2, head_dim=8, output_size=12),
    head=HeadConfig(
        max_state_dim=6,
        max_action_dim=5,
        action_horizon=4,
        hidden_size=12,
        max_positions=8,
        max_embodiments=3,
    ),
    tune=TuneConfig(top_language_layers=2),
)


def numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers that depend on a name alone; numpy promises this stream for good."""
    stream = np.random.RandomState(zlib.crc32(name.encode()))
    return torch.from_numpy(stream.standard_normal(shape).astype(np.float32))


def micro_model() -> GrootModel:
    model = GrootModel(MICRO)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = numbers(name, tuple(parameter.shape))
            if parameter.ndim == 1:
                parameter.copy_(0.1 * value + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
            else:
                inputs = parameter.shape[-2] if name.endswith(".W") else parameter[0].numel()
                parameter.copy_(value / inputs**0.5)
    return model.eval()


def micro_batch() -> dict[str, object]:
    rows = [[3, 4, *[50] * 4, 5, *[50] * 2, 6], [7, *[50] * 4, 8, 9, *[50] * 2]]
    ids = torch.zeros(2, 10, dtype=torch.int64)
    mask = torch.zeros(2, 10, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, 10 - len(row) :] = torch.tensor(row)
        mask[i, 10 - len(row) :] = 1
    action_mask = torch.ones(2, 4, 5)
    action_mask[0, 3:], action_mask[1, :, 4:] = 0, 0
    images = [numbers("image0", (3, 56, 56)), numbers("image1", (3, 28, 56))]
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": [images[0], images[1], 0.5 * images[0], -images[1]],
        "state": numbers("state", (2, 1, 6)),
        "action": numbers("action", (2, 4, 5)).clamp(-1, 1),
        "action_mask": action_mask,
        "embodiment_id": torch.tensor([2, 0]),
        "noise": numbers("noise", (2, 4, 5)),
        "time": torch.tensor([0.137, 0.862]),
    }


def computed() -> dict[str, torch.Tensor]:
    model = micro_model()
    seen: dict[str, torch.Tensor] = {}

    def keep(name, module):
        def hook(_module, _inputs, output):
            seen.setdefault(name, output.detach().clone())

        module.register_forward_hook(hook)

    keep("connector", model.backbone.model.mlp1)
    keep("features", model.backbone)
    keep("state", model.action_head.state_encoder)
    keep("actions", model.action_head.action_encoder)
    for i, block in enumerate(model.action_head.model.transformer_blocks):
        keep(f"block{i}", block)
    keep("velocity", model.action_head.action_decoder)
    batch = micro_batch()
    out = model(batch)
    out["loss"].backward()
    # Rows of padding hold nothing that is promised.
    valid = model.canonical(batch)["attention_mask"]
    seen["features"] = seen["features"][valid]
    seen["loss"], seen["loss_sum"] = out["loss"].detach().reshape(1), out["loss_sum"].detach()
    for name, parameter in model.named_parameters():
        # A key bias has no true gradient: only rounding would be compared.
        if parameter.grad is not None and not name.endswith("to_k.bias"):
            seen[f"grad_norm.{name}"] = parameter.grad.norm().reshape(1)
    seen["policy"] = model.get_action({**batch, "initial_noise": batch["noise"]})
    return seen


def test_golden_micro_model():
    ours = computed()
    if os.environ.get("LOONGFORGE_REWRITE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        save_file({name: value.contiguous() for name, value in ours.items()}, GOLDEN)
        pytest.skip(f"rewrote {GOLDEN}")
    golden = load_file(GOLDEN)
    assert set(ours) == set(golden)
    for name, reference in golden.items():
        scale = max(reference.abs().max().item(), 1e-3)
        assert (ours[name] - reference).abs().max().item() <= TOLERANCE * scale, name


def test_golden_file_is_small():
    assert GOLDEN.stat().st_size <= 200_000
