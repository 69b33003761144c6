"""Our blocks against those of transformers, with the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loongforge.recipes import get_recipe
from loongforge.recipes.gr00t_n1_6.config import LanguageConfig, VisionConfig
from loongforge.recipes.gr00t_n1_6.language import Decoder
from loongforge.recipes.gr00t_n1_6.vision import VisionBlock

transformers = pytest.importorskip("transformers")


def randomised(module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.1, generator=generator)
    return module


def copy_weights(source, target):
    target.load_state_dict(source.state_dict(), strict=True)
    return target.eval()


def test_the_decoder_is_that_of_transformers():
    config = LanguageConfig(
        hidden_size=48, layers=2, heads=4, kv_heads=2, head_dim=12, mlp_size=80, vocab_size=100
    )
    theirs_config = transformers.Qwen3Config(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        intermediate_size=80,
        vocab_size=100,
        rope_theta=config.rope_theta,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        rms_norm_eps=config.rms_norm_eps,
        attn_implementation="eager",
    )
    theirs = randomised(transformers.Qwen3Model(theirs_config)).eval()
    ours = copy_weights(theirs, Decoder(config))
    ids = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = theirs(input_ids=ids).last_hidden_state
    found = ours.norm(ours.run(ours.embed_tokens(ids), list(ours.layers)))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_vision_block_is_that_of_transformers():
    from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

    config = VisionConfig(hidden_size=32, heads=4, mlp_size=48)
    theirs_config = transformers.SiglipVisionConfig(
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_act="gelu_pytorch_tanh",
        attn_implementation="eager",
    )
    theirs = randomised(SiglipEncoderLayer(theirs_config)).eval()
    ours = copy_weights(theirs, VisionBlock(config))
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
    expected = theirs(x, attention_mask=None)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_dropout_acts_in_training_alone(tiny_batch, dropout):
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options({"config.dit.dropout": dropout}), 0)
    first, second = (model(tiny_batch)["loss"].item() for _ in range(2))
    assert (first == second) == (dropout == 0.0)
    model.eval()
    assert model(tiny_batch)["loss"].item() == model(tiny_batch)["loss"].item()


def test_state_dropout_and_noise_come_from_the_draws(tiny_batch):
    recipe = get_recipe("gr00t_n1_6_tiny")
    head = replace(recipe.default_options.config.head, state_dropout=0.5, state_noise=0.1)
    options = replace(recipe.default_options, config=replace(recipe.default_options.config, head=head))
    model = recipe.build_model(options, 0)
    batch = model.draw(tiny_batch, torch.Generator().manual_seed(3))
    assert batch["state_drop"].dtype == torch.bool
    assert batch["state_noise"].shape == (4, 1, options.config.dit.width)
    loss = model(batch)["loss"]
    loss.backward()
    assert model.action_head.mask_token.grad is not None
    assert model(batch)["loss"].item() == loss.item()
    other = {**batch, "state_drop": ~batch["state_drop"]}
    assert model(other)["loss"].item() != loss.item()


def test_a_model_in_bfloat16_predicts_without_autocast(tiny_batch):
    """The original casts everything to 16 bits for inference."""
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options(), 0).eval()
    noise = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(0))
    exact = model.get_action({**tiny_batch, "initial_noise": noise})
    rough = model.bfloat16().get_action({**tiny_batch, "initial_noise": noise})
    assert rough.dtype == torch.float32
    assert (rough - exact).abs().mean() < 0.03 * exact.abs().mean() + 0.02


def test_autocast_with_a_frozen_bfloat16_backbone_stays_near_float32(tiny_batch):
    recipe = get_recipe("gr00t_n1_6_tiny")
    exact = recipe.build_model(recipe.options(), 0)(tiny_batch)["loss"].item()
    model = recipe.build_model(recipe.options({"frozen_dtype": "bfloat16"}), 0)
    plain = model(tiny_batch)["loss"]
    plain.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(tiny_batch)["loss"]
    mixed.backward()
    assert plain.item() == pytest.approx(exact, rel=1e-2)
    assert mixed.item() == pytest.approx(exact, rel=2e-2)
