"""Published checkpoint in, fine-tuned policy out, by the command line, on a folder of the exact layout."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from loongforge.cli import run
from loongforge.errors import CheckpointError, ConfigError
from loongforge.evaluation.policies import load_policy
from loongforge.recipes import get_recipe
from loongforge.recipes.gr00t_n1_6.checkpoint import export_model
from safetensors.torch import load_file

RECIPE = "gr00t_n1_6_tiny"
# Fields that the published config.json has and this implementation passes through.
FOREIGN = {
    "model_type": "Gr00tN1d6",
    "architectures": ["Gr00tN1d6"],
    "torch_dtype": "bfloat16",
    "model_name": "nvidia/Eagle-Block2A-2B-v2",
    "backbone_model_type": "eagle",
    "load_bf16": False,
    "reproject_vision": False,
    "use_flash_attention": True,
    "backbone_trainable_params_fp32": True,
    "formalize_language": True,
    "gradient_checkpointing": False,
}
OTHER_ROBOT = {"state": {"arm": {name: [0.5, 1.0] for name in ("min", "max", "mean", "std", "q01", "q99")}}}


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    synthetic = pytest.importorskip("loongforge_data.synthetic")
    root = tmp_path_factory.mktemp("data") / "moving"
    synthetic.write_dataset(root, episodes=3, frames=24, cameras=2, size=(64, 80), seed=1)
    return root


def write_published(folder: Path, *, percentiles: bool = False) -> None:
    """Write a tiny checkpoint as the published one lies on disk: shards, index, config, processor files."""
    recipe = get_recipe(RECIPE)
    model = recipe.build_model(recipe.options({"frozen_dtype": "bfloat16", "live_slots": "off"}), 7)
    export_model(model, folder, shard_bytes=2_000_000)
    # The published folder does not name the sizes of the vision-language model.
    (folder / "loongforge_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**FOREIGN, **config}))
    part = {"delta_indices": [0], "modality_keys": ["arm"]}
    processor = {
        "processor_class": "Gr00tN1d6Processor",
        "processor_kwargs": {
            "modality_configs": {"gr1": {"state": part, "action": part}},
            "shortest_image_edge": 84,
            "crop_fraction": 0.9,
            "use_percentiles": percentiles,
            "clip_outliers": True,
            "formalize_language": True,
        },
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "statistics.json").write_text(json.dumps({"gr1": OTHER_ROBOT}))
    (folder / "embodiment_id.json").write_text(json.dumps({"gr1": 20, "disc_robot": 3}))


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "GR00T-tiny"
    write_published(folder)
    return folder


def settings(published: Path, **more: object) -> list[str]:
    values = {"checkpoint": published, "embodiment.tag": "disc_robot", "held_out": "2", **more}
    return [part for name, value in values.items() for part in ("--set", f"recipe_options.{name}={value}")]


def train(output: Path, recording: Path, options: list[str], *, steps: int) -> int:
    """Train by the command line; return its exit code."""
    return run(
        [
            *("train", "--recipe", RECIPE, "--dataset", str(recording), "--output", str(output)),
            *("--steps", str(steps), "--batch-size", "4", "--workers", "0", "--device", "cpu"),
            *("--set", "control=false", "--set", "pillars.comm=off", *options),
        ]
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory, recording, published) -> Path:
    output = tmp_path_factory.mktemp("runs") / "tuned"
    assert train(output, recording, settings(published), steps=2) == 0
    return output


@pytest.fixture(scope="module")
def exported(tmp_path_factory, trained) -> Path:
    folder = tmp_path_factory.mktemp("out") / "policy"
    assert run(["export", "--checkpoint", str(trained), "--output", str(folder)]) == 0
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def metrics(output: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_fine_tuning_starts_from_the_published_weights_and_changes_what_trains(published, trained):
    assert len(list(published.glob("model-*-of-*.safetensors"))) > 1
    losses = [record["loss"] for record in metrics(trained)]
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
    before, after = tensors(published), load_policy(str(trained)).model.state_dict()
    assert set(before) == set(after)
    slot = 3
    moved = {
        name for name, value in after.items() if not torch.equal(value.to(before[name].dtype), before[name])
    }
    assert "action_head.action_decoder.layer2.W" in moved
    assert not [name for name in moved if ".vision_model." in name or "layers.0." in name]
    decoder = after["action_head.action_decoder.layer2.W"], before["action_head.action_decoder.layer2.W"]
    # The checkpoint's own table gives this robot its slot; all others stay as published.
    different = (decoder[0] != decoder[1]).flatten(1).any(1).nonzero().flatten().tolist()
    assert different == [slot]


def test_the_processor_of_the_checkpoint_decides(published, trained):
    policy = load_policy(str(trained))
    resolved = policy.recipe.resolved(policy.options)
    assert resolved.image.short_edge == 84 and resolved.image.crop_fraction == 0.9
    assert policy.model.image_options.short_edge == 84
    own = policy.recipe.resolved(policy.recipe.options({"checkpoint": str(published), "processor": "recipe"}))
    assert own.image.short_edge == 56


def test_percentiles_of_the_processor_reach_the_normalisation(tmp_path):
    write_published(tmp_path / "hub", percentiles=True)
    recipe = get_recipe(RECIPE)
    options = recipe.options({"checkpoint": str(tmp_path / "hub")})
    assert recipe.resolved(options).embodiment.normalization == "q01_q99"
    keyed = recipe.options({"checkpoint": str(tmp_path / "hub"), "embodiment.normalization": "mean_std"})
    assert recipe.resolved(keyed).embodiment.normalization == "mean_std"


def test_the_export_keeps_what_was_published_and_adds_the_robot(published, exported):
    assert set(tensors(exported)) == set(tensors(published))
    config = json.loads((exported / "config.json").read_text())
    assert {name: config[name] for name in FOREIGN} == FOREIGN
    statistics = json.loads((exported / "statistics.json").read_text())
    assert statistics["gr1"] == OTHER_ROBOT
    assert set(statistics["disc_robot"]["action"]["action"]) == {"min", "max", "mean", "std", "q01", "q99"}
    slots = json.loads((exported / "embodiment_id.json").read_text())
    assert slots["disc_robot"] == 3 and slots["gr1"] == 20
    arguments = json.loads((exported / "processor_config.json").read_text())["processor_kwargs"]
    assert set(arguments["modality_configs"]) == {"gr1", "disc_robot"}
    assert arguments["shortest_image_edge"] == 84 and arguments["use_percentiles"] is False


def test_the_exported_policy_acts_as_the_run_does(recording, trained, exported, tmp_path, capsys):
    common = ["--dataset", str(recording), "--samples", "8", "--batch-size", "2"]
    summaries = []
    options = ("--option", "embodiment.tag=disc_robot", "--option", "held_out=2")
    policies = (
        ["--checkpoint", str(trained)],
        ["--checkpoint", str(exported), "--recipe", RECIPE, *options],
    )
    for number, policy in enumerate(policies):
        capsys.readouterr()
        assert run(["eval", *policy, *common, "--output", str(tmp_path / str(number))]) == 0
        summaries.append(json.loads(capsys.readouterr().out.strip().splitlines()[-1]))
    first, second = summaries
    assert first["per_episode"][0]["episode"] == 2
    # The run keeps frozen weights in float32, the export in the published bfloat16.
    assert first["mse"] == pytest.approx(second["mse"], rel=1e-6)
    assert first["validation_loss"] == pytest.approx(second["validation_loss"], rel=1e-6)


def test_actions_come_out_in_the_units_of_the_training_data(recording, exported, tmp_path):
    """The same policy on a recording with other statistics still speaks the training data's units."""
    other = tmp_path / "other"
    from loongforge_data.synthetic import write_dataset

    write_dataset(other, episodes=2, frames=24, cameras=2, size=(64, 80), seed=9)
    policy = load_policy(str(exported), recipe=RECIPE, overrides={"embodiment.tag": "disc_robot"})
    answers = []
    for root in (recording, other):
        dataset = policy.recipe.build_dataset(str(root), policy.options)
        collate = policy.recipe.build_collate(dataset, policy.model, policy.options)
        samples = [policy.recipe.build_dataset(str(recording), policy.options)[5]]
        predictor = policy.recipe.predictor(policy.model, collate)
        answers.append(predictor.predict(samples, torch.Generator().manual_seed(0)))
    np.testing.assert_array_equal(*answers)
    limits = json.loads((exported / "statistics.json").read_text())["disc_robot"]["action"]["action"]
    low, high = np.array(limits["min"]), np.array(limits["max"])
    assert (answers[0] >= low - 1e-6).all() and (answers[0] <= high + 1e-6).all()


def test_a_run_outlives_the_checkpoint_it_started_from(tmp_path, recording, published, caplog):
    moved = tmp_path / "hub"
    moved.mkdir()
    for path in published.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    output = tmp_path / "run"
    options = settings(moved, **{"embodiment.slot": 3})
    assert train(output, recording, options, steps=1) == 0
    for path in moved.iterdir():
        path.unlink()
    moved.rmdir()
    with caplog.at_level(logging.WARNING, logger="loongforge"):
        policy = load_policy(str(output))
    assert "started from" in caplog.text and "--option checkpoint=DIR" in caplog.text
    assert policy.model.single_slot == 3


@pytest.mark.parametrize(
    ("robot", "words"),
    [
        ({}, r"no statistics of robot 'new_embodiment'; it has disc_robot, gr1"),
        (
            {"tag": "disc_robot", "slot": 3, "action": [{"name": "wheel", "end": 1}]},
            r"no action key 'wheel' of robot 'disc_robot'; it has action",
        ),
        (
            {"tag": "disc_robot", "slot": 3, "action": [{"name": "action", "end": 2}]},
            r"key 'action' has 3 values, the data set's key has 2",
        ),
    ],
)
def test_statistics_that_do_not_fit_are_named(recording, exported, robot, words):
    recipe = get_recipe(RECIPE)
    options = recipe.options({"statistics": str(exported), "embodiment": robot})
    dataset = recipe.build_dataset(str(recording), options)
    with pytest.raises(CheckpointError, match=words):
        recipe.build_collate(dataset, None, options)


def test_an_export_never_replaces_its_source(recording, published):
    recipe = get_recipe(RECIPE)
    options = recipe.options({"checkpoint": str(published), "embodiment.tag": "disc_robot"})
    model, dataset = recipe.build_model(options, 0), recipe.build_dataset(str(recording), options)
    with pytest.raises(ConfigError, match="give another folder to export to"):
        recipe.export(model, dataset, options, published)


def test_the_stand_in_tokenizer_is_refused_with_published_weights(published, tmp_path):
    recipe = get_recipe(RECIPE)
    options = recipe.options({"checkpoint": str(published), "config.language.image_token_id": 151_669})
    with pytest.raises(ConfigError, match="option tokenizer to the folder"):
        recipe.tokenizer(options)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([{"name": "a", "end": 2, "normalization": "none"}, {"name": "b", "start": 2}], "keys a have"),
        (
            [{"name": "a", "end": 2, "normalization": "q01_q99"}, {"name": "b", "start": 2}],
            "one switch for all",
        ),
    ],
)
def test_what_the_published_processor_cannot_express_is_not_exported(tiny_dataset, tmp_path, keys, words):
    recipe = get_recipe(RECIPE)
    options = recipe.options({"embodiment": {"action": keys}})
    model = recipe.build_model(options, 0)
    with pytest.raises(ConfigError, match=words):
        recipe.export(model, tiny_dataset, options, tmp_path)


def test_a_changed_setting_of_all_robots_is_told(tiny_dataset, published, tmp_path, caplog):
    recipe = get_recipe(RECIPE)
    options = recipe.options({"checkpoint": str(published), "processor": "recipe"})
    model = recipe.build_model(options, 0)
    with caplog.at_level(logging.WARNING, logger="loongforge"):
        recipe.export(model, tiny_dataset, options, tmp_path / "out")
    assert "shortest_image_edge, crop_fraction" in caplog.text or "crop_fraction" in caplog.text
    assert "gr1 no longer work as before" in caplog.text
