"""Recipes as files: every one loads, fits the trainer's settings, and a copy can be changed."""

from __future__ import annotations

import dataclasses

import pytest
from loongforge.config import build_config
from loongforge.errors import ConfigError
from loongforge.recipes import get_recipe, recipe_names, recipe_text
from loongforge.recipes.base import Recipe
from loongforge.recipes.gr00t_n1_6.budget import estimate_memory, plan_memory
from loongforge.recipes.gr00t_n1_6.lora import LoraConfig
from loongforge.recipes.settings import updated


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_suggests_known_settings(name):
    recipe = get_recipe(name)
    assert isinstance(recipe, Recipe)
    assert recipe.name == name
    assert recipe.description
    assert recipe.options() == recipe.default_options
    build_config(recipe.training)


def test_golden_hyper_parameters_of_the_public_recipe():
    training = get_recipe("gr00t_n1_6").training
    assert training["learning_rate"] == 1e-4
    assert training["weight_decay"] == 1e-5
    assert training["warmup_ratio"] == 0.05
    assert (training["schedule"], training["clip_norm"], training["batch_size"]) == ("cosine", 1.0, 64)
    libero = get_recipe("libero").training
    assert (libero["batch_size"] * 8, libero["steps"]) == (640, 20000)
    assert get_recipe("so100").training["batch_size"] == 32
    eight = get_recipe("unitree_g1_8gpu").training
    assert eight["batch_size"] * eight["accumulation"] * 8 == 1024


def test_a_copied_file_is_a_recipe(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(recipe_text("unitree_g1").replace('tag = "unitree_g1"', 'tag = "gr1"'))
    recipe = get_recipe(str(path))
    assert recipe.name == "mine"
    assert recipe.default_options.embodiment.tag == "gr1"
    assert recipe.default_options.embodiment.state[0].name == "left_arm"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('base = "nope"', "unknown recipe 'nope'; known are gr00t_n1_6"),
        ('family = "other"', "names no known family, got 'other'"),
        ("base = [", "not valid TOML"),
        ('family = "gr00t_n1_6"\ncolour = 1', "unknown fields colour"),
        ('base = "gr00t_n1_6"\noptions = 3', "'options' of recipe"),
        ('base = "gr00t_n1_6"\n[options.config.dit]\ndepth = 3', r"unknown config\.dit 'depth'"),
        ('base = "gr00t_n1_6"\n[options.config.dit]\nlayers = 2.5', "layers must be an integer"),
        ('base = "gr00t_n1_6"\n[options]\nfrozen_dtype = "int8"', "frozen_dtype must be one of"),
        ('base = "gr00t_n1_6"\n[options.embodiment]\nstate = [{ nam = "x" }]', "unknown field 'nam'"),
        ('base = "gr00t_n1_6"\n[options.image]\ncrop_fraction = 3', "crop_fraction must lie in"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path, text, words):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        get_recipe(str(path))


def test_a_recipe_based_on_itself_is_refused(tmp_path):
    path = tmp_path / "loop.toml"
    path.write_text(f'base = "{path}"')
    with pytest.raises(ConfigError, match="based on itself"):
        get_recipe(str(path))
    with pytest.raises(ConfigError, match="does not exist"):
        get_recipe(str(tmp_path / "absent.toml"))


def test_options_take_dotted_names_and_text():
    options = get_recipe("gr00t_n1_6_tiny").options(
        {
            "config.dit.dropout": "0.1",
            "config.work.recompute": "yes",
            "embodiment.views": "front,wrist",
            "pad_to": "none",
            "image": {"short_edge": 84},
            "image.hue": 0,
        }
    )
    assert options.config.dit.dropout == 0.1
    assert options.config.work.recompute is True
    assert options.embodiment.views == ("front", "wrist")
    assert options.pad_to is None
    assert (options.image.short_edge, options.image.hue) == (84, 0.0)


@dataclasses.dataclass(frozen=True)
class _Sample:
    flag: bool = True
    pair: tuple[int, float] = (1, 2.0)
    table: dict = dataclasses.field(default_factory=dict)
    anything: object = None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"flag": 3}, "flag must be true or false, got 3"),
        ({"pair": [1]}, "pair must have 2 values, got 1"),
        ({"pair": 5}, "pair must be a list"),
        ({"table": 5}, "table must be a table"),
        ({"nothing": 5}, "unknown option 'nothing'; allowed are anything, flag, pair, table"),
    ],
)
def test_values_of_the_wrong_kind_are_named(values, words):
    with pytest.raises(ConfigError, match=words):
        updated(_Sample(), values)
    assert updated(_Sample(), {"pair": "3,4", "anything": 5}) == _Sample(pair=(3, 4.0), anything=5)


def test_the_word_none_is_a_normalisation_where_it_is_one():
    options = get_recipe("gr00t_n1_6_tiny").options(
        {"embodiment.action": [{"name": "a", "normalization": "none"}, {"name": "b"}], "checkpoint": "none"}
    )
    assert [key.normalization for key in options.embodiment.action] == ["none", None]
    assert options.checkpoint is None


# ---- memory budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rank", "limit"),
    [("unitree_g1_24gb", 64, 22), ("unitree_g1_48gb", 0, 46), ("unitree_g1_80gb", 0, 78)],
)
def test_presets_fit_their_budget(name, rank, limit):
    recipe = get_recipe(name)
    options = recipe.fitted(recipe.options())
    assert options.lora.rank == rank
    estimate = estimate_memory(
        options.config, options.lora, batch_size=recipe.training["batch_size"], tokens=220
    )
    assert estimate.table()["total"] <= limit


def test_a_budget_switches_on_only_what_it_needs():
    config = get_recipe("gr00t_n1_6").default_options.config

    def plan(budget):
        return plan_memory(config, LoraConfig(), budget_gb=budget, batch_size=16)

    roomy = plan(80)
    assert roomy.steps == () and roomy.config == config
    needed = roomy.estimate.table()["total"]
    assert plan(needed - 0.5).steps == ("drop_unused",)
    tight = plan(24)
    assert "adapters" in tight.steps and tight.lora.rank > 0
    assert tight.estimate.total < roomy.estimate.total
    with pytest.raises(ConfigError, match="lower batch_size"):
        plan(4)
