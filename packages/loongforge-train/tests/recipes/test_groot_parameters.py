"""Names, shapes, dtypes, trainable flags and weight decay of the full-size model."""

from __future__ import annotations

import pytest
import torch
from loongforge.recipes import get_recipe
from loongforge.recipes.gr00t_n1_6 import GrootConfig
from loongforge.recipes.gr00t_n1_6.config import (
    DiTConfig,
    HeadConfig,
    LanguageConfig,
    TuneConfig,
    VisionConfig,
)
from loongforge.recipes.gr00t_n1_6.initialise import build_on_meta
from loongforge.recipes.gr00t_n1_6.recipe import decays


@pytest.fixture(scope="module")
def full_model():
    return build_on_meta(get_recipe("gr00t_n1_6").default_options.config)


def test_golden_full_size_parameters(full_model, groot_parameter_table):
    rows = {row["name"]: row for row in groot_parameter_table if row["kind"] == "param"}
    ours = dict(full_model.named_parameters())
    assert set(ours) == set(rows)
    assert len(ours) == 1106
    for name, parameter in ours.items():
        row = rows[name]
        assert "x".join(map(str, parameter.shape)) == row["shape"], name
        assert parameter.requires_grad == (row["trainable"] == "yes"), name
        if parameter.requires_grad:
            assert decays(name) == (row["weight_decay"] == "yes"), name
            assert row["dtype"] == "float32"
        else:
            assert row["dtype"] == "bfloat16"


def test_golden_full_size_counts(full_model):
    parameters = list(full_model.parameters())
    assert sum(p.numel() for p in parameters) == 3_286_608_832
    assert sum(p.numel() for p in parameters if p.requires_grad) == 1_619_968_000


def test_the_model_has_no_buffers(full_model):
    assert list(full_model.named_buffers()) == []


def test_weights_depend_on_the_seed_alone_and_leave_the_global_generator():
    recipe = get_recipe("gr00t_n1_6_tiny")
    options = recipe.options()
    before = torch.get_rng_state()
    first, again, other = (recipe.build_model(options, seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    weights, twin = first.state_dict(), again.state_dict()
    assert all(torch.equal(weights[name], twin[name]) for name in weights)
    assert any(not torch.equal(weights[name], value) for name, value in other.state_dict().items())


def test_frozen_parameters_are_bfloat16_and_trainable_ones_float32():
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options({"frozen_dtype": "bfloat16"}), 0)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name


def test_optimizer_groups_hold_every_trainable_parameter_once():
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options(), 0)
    groups = recipe.param_groups(model, 1e-5)
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert {group["weight_decay"] for group in groups} == {0.0, 1e-5}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: VisionConfig(hidden_size=10, heads=3), "10 does not divide by heads 3"),
        (lambda: LanguageConfig(heads=6, kv_heads=4), "kv_heads 4 does not divide heads 6"),
        (lambda: HeadConfig(action_horizon=9, max_positions=8), "action_horizon 9 exceeds the 8"),
        (lambda: HeadConfig(state_dropout=1.0), "state_dropout must lie in"),
        (
            lambda: GrootConfig(tune=TuneConfig(top_language_layers=17)),
            r"top_language_layers must lie in \[0, 16\]",
        ),
        (lambda: GrootConfig().image_tokens(100, 252), "100x252 must be positive multiples of 28"),
    ],
)
def test_impossible_sizes_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_flags_choose_what_trains():
    def trainable(**flags):
        model = build_on_meta(
            GrootConfig(vision=VisionConfig(layers=1), dit=DiTConfig(layers=2), tune=TuneConfig(**flags))
        )
        return {name for name, p in model.named_parameters() if p.requires_grad}

    nothing = trainable(top_language_layers=0, projector=False, diffusion=False, vlln=False)
    assert nothing == set()
    visual = trainable(top_language_layers=0, projector=False, diffusion=False, vlln=False, visual=True)
    assert {name.split(".")[2] for name in visual} == {"vision_model", "mlp1"}
    language = trainable(top_language_layers=0, projector=False, diffusion=False, vlln=False, language=True)
    assert all(".language_model." in name for name in language)
    assert any("embed_tokens" in name for name in language)
