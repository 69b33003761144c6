"""Checkpoints in the published layout: bit-equal round trip, errors that name tensors, one copy in memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from loongforge.errors import CheckpointError, ConfigError
from loongforge.recipes import get_recipe
from loongforge.recipes.gr00t_n1_6.checkpoint import (
    check_fit,
    export_model,
    find_checkpoint,
    load_model,
    open_checkpoint,
)
from loongforge.recipes.gr00t_n1_6.config import GrootConfig
from loongforge.recipes.gr00t_n1_6.lora import LoraConfig, add_adapters, merge_adapters
from loongforge.recipes.gr00t_n1_6.published import read_config, written_config
from safetensors.torch import load_file, save_file


@pytest.fixture
def tiny():
    recipe = get_recipe("gr00t_n1_6_tiny")
    options = recipe.options({"frozen_dtype": "bfloat16"})
    return recipe, options, recipe.build_model(options, 3)


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """A tiny checkpoint in two shards."""
    _, _, model = tiny
    export_model(model, tmp_path / "checkpoint", shard_bytes=2_000_000)
    return tmp_path / "checkpoint"


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        result.update(load_file(path))
    return result


def rewrite(folder: Path, change) -> None:
    """Change the tensors of a checkpoint, keeping one file."""
    values = tensors(folder)
    change(values)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file(values, folder / "model.safetensors")
    (folder / "model.safetensors.index.json").unlink()


def test_load_export_load_is_bit_equal(tiny, folder, tmp_path):
    recipe, _, model = tiny
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 1
    checkpoint = open_checkpoint(folder)
    loaded, report = load_model(checkpoint, checkpoint.config())
    assert report.tensors == len(tensors(folder)) == len(model.state_dict())
    original = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, original[name]), name
        assert value.dtype == original[name].dtype
    export_model(loaded, tmp_path / "again", source=checkpoint)
    again = tensors(tmp_path / "again")
    first = tensors(folder)
    assert set(again) == set(first)
    for name, value in first.items():
        assert value.dtype == again[name].dtype
        assert torch.equal(value, again[name]), name
    assert recipe.options({"checkpoint": str(folder)}).checkpoint == str(folder)


def test_golden_weights_survive_the_round_trip(groot_reference, tmp_path):
    model = groot_reference.model()
    export_model(model, tmp_path / "out")
    checkpoint = open_checkpoint(tmp_path / "out")
    config = checkpoint.config()
    assert config.vision == groot_reference.config.vision
    assert config.language == groot_reference.config.language
    assert config.head == groot_reference.config.head
    loaded, _ = load_model(checkpoint, config, frozen_dtype=torch.float32)
    source = load_file(groot_reference.folder / "tiny_weights.safetensors")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, source[name]), name


def test_a_recipe_starts_from_a_checkpoint(folder, tiny):
    recipe, _, model = tiny
    options = recipe.options({"checkpoint": str(folder), "frozen_dtype": "bfloat16"})
    loaded = recipe.build_model(options, 99)
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name


def test_sizes_come_from_the_checkpoint_not_from_the_recipe(folder):
    full = get_recipe("gr00t_n1_6")
    options = full.resolved(full.options({"checkpoint": str(folder), "config.tune.top_language_layers": 1}))
    assert options.config.language.hidden_size == 96
    assert options.config.head.max_action_dim == 32
    assert options.config.tune.top_language_layers == 1


def test_renamed_missing_and_misshapen_tensors_are_named(folder):
    def spoil(values):
        values["action_head.vlln.gamma"] = values.pop("action_head.vlln.weight")
        del values["action_head.position_embedding.weight"]
        values["backbone.model.mlp1.1.bias"] = values["backbone.model.mlp1.1.bias"][:-1]

    rewrite(folder, spoil)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError) as raised:
        load_model(checkpoint, checkpoint.config())
    message = str(raised.value)
    assert "4 tensors" in message
    assert "missing: action_head.vlln.weight" in message
    assert "missing: action_head.position_embedding.weight" in message
    assert "unknown: action_head.vlln.gamma" in message
    assert re.search(
        r"wrong shape: backbone\.model\.mlp1\.1\.bias has shape \[95\], the model needs \[96\]", message
    )


def test_unused_tensors_may_be_absent_on_either_side(folder, tmp_path, tiny):
    _, _, full = tiny
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config()
    lean = replace(config, work=replace(config.work, keep_unused=False))
    model, report = load_model(checkpoint, lean)
    assert len(report.left_in_file) == 12
    assert all("lm_head" in name or ".head." in name for name in report.left_in_file)
    # The export takes them from the source, so that the original code finds all it expects.
    export_model(model, tmp_path / "out", source=checkpoint)
    assert set(tensors(tmp_path / "out")) == set(full.state_dict())
    export_model(model, tmp_path / "lean")
    lean_checkpoint = open_checkpoint(tmp_path / "lean")
    _, report = load_model(lean_checkpoint, config)
    assert len(report.not_in_file) == 12


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: next(f.glob("model-00001*")).unlink(), "files that are not there: model-00001"),
        (lambda f: next(f.glob("model-00001*")).write_bytes(b"x" * 100), "cannot be read as safetensors"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "no table 'weight_map'"),
    ],
    ids=["no config", "bad config", "no shard", "damaged shard", "bad index"],
)
def test_a_damaged_folder_is_refused(folder, spoil, words):
    spoil(folder)
    with pytest.raises(CheckpointError, match=words):
        load_model(open_checkpoint(folder), GrootConfig())


def test_an_unknown_folder_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist; give a folder or a hub id"):
        find_checkpoint(str(tmp_path / "absent" / "deeper"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="neither model"):
        open_checkpoint(tmp_path)


def test_a_load_holds_one_copy(tmp_path):
    """Private memory grows by the size of the model, not by twice of it."""
    config = get_recipe("gr00t_n1_6_tiny").default_options.config
    language = replace(config.language, vocab_size=60_000, hidden_size=256)
    config = replace(config, language=language)
    from loongforge.recipes.gr00t_n1_6.initialise import build_on_meta, materialise, random_fill

    model = build_on_meta(config)
    materialise(model, "cpu", frozen_dtype=torch.float32, fill=random_fill(0, config))
    export_model(model, tmp_path)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    del model
    checkpoint = open_checkpoint(tmp_path)
    before = private_bytes()
    loaded, _ = load_model(checkpoint, config, frozen_dtype=torch.float32)
    grown = private_bytes() - before
    largest = max(p.numel() * p.element_size() for p in loaded.parameters())
    assert grown < size + 0.5 * largest, (grown / 2**20, size / 2**20)


def private_bytes() -> int:
    """Highest private memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    pytest.skip("the kernel does not report RssAnon")


def test_adapters_are_folded_into_the_export(tmp_path):
    config = get_recipe("gr00t_n1_6_tiny").default_options.config
    from loongforge.recipes.gr00t_n1_6.initialise import build_on_meta, materialise, random_fill

    model = build_on_meta(config, LoraConfig(rank=4, alpha=8))
    materialise(model, "cpu", frozen_dtype=torch.float32, fill=random_fill(0, config))
    name = "action_head.model.transformer_blocks.0.attn1.to_q"
    layer = model.get_submodule(name)
    with torch.no_grad():
        layer.lora_B.normal_()
    x = torch.randn(2, 3, layer.in_features)
    adapted = layer(x)
    export_model(model, tmp_path)
    written = tensors(tmp_path)
    assert not [n for n in written if "lora" in n]
    plain = torch.nn.functional.linear(x, written[f"{name}.weight"], written[f"{name}.bias"])
    torch.testing.assert_close(plain, adapted, rtol=1e-5, atol=1e-5)
    assert merge_adapters(model) > 0
    torch.testing.assert_close(layer(x), adapted, rtol=1e-5, atol=1e-5)


def test_fresh_adapters_change_nothing_and_only_they_train_in_their_parts(tiny_batch):
    recipe = get_recipe("gr00t_n1_6_tiny")
    plain = recipe.build_model(recipe.options(), 0)
    adapted = recipe.build_model(recipe.options({"lora.rank": 4}), 0)
    assert torch.equal(plain(tiny_batch)["loss"], adapted(tiny_batch)["loss"])
    adapted(tiny_batch)["loss"].backward()
    for name, parameter in adapted.named_parameters():
        inside = "action_head.model." in name or ".language_model." in name
        assert parameter.requires_grad == (".lora_" in name) if inside else True, name
        if parameter.requires_grad:
            assert parameter.grad is not None, name
    frozen_bottom = [
        n for n, _ in adapted.named_parameters() if "layers.0." in n and "lora" in n and "language" in n
    ]
    assert frozen_bottom == []


def test_impossible_adapters_are_refused():
    with pytest.raises(ValueError, match="unknown lora target 'head'"):
        LoraConfig(targets=("head",))
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options({"config.tune.top_language_layers": 0}), 0)
    with pytest.raises(ConfigError, match="no trainable linear layer matches"):
        add_adapters(model, LoraConfig(rank=2, targets=("language",)))


def test_config_json_keeps_what_it_does_not_know(tmp_path, tiny):
    _, options, _ = tiny
    written = written_config(options.config, {"model_type": "Gr00tN1d6", "some_field": [1, 2]})
    assert written["some_field"] == [1, 2]
    own = options.config
    base = replace(GrootConfig(), language=own.language, vision=own.vision, tune=own.tune)
    read = read_config(json.loads(json.dumps(written)), base=base)
    assert read == replace(options.config, work=read.work)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_alternate_vl_dit": False}, "use_alternate_vl_dit = False; only True is supported"),
        ({"backbone_embedding_dim": 7}, "backbone_embedding_dim 7"),
        ({"input_embedding_dim": 7}, "input_embedding_dim 7"),
        ({"select_layer": "x"}, "expected a whole number"),
    ],
)
def test_a_config_that_asks_for_more_is_refused(change, words, tiny):
    _, options, _ = tiny
    with pytest.raises(ConfigError, match=words):
        read_config({**written_config(options.config), **change}, base=options.config)


def test_processor_files_serve_the_original_code(tiny, tiny_dataset, tmp_path):
    recipe, options, model = tiny
    recipe.export(model, tiny_dataset, options, tmp_path)
    processor = json.loads((tmp_path / "processor_config.json").read_text())
    arguments = processor["processor_kwargs"]
    assert processor["processor_class"] == "Gr00tN1d6Processor"
    assert arguments["max_action_dim"] == options.config.head.max_action_dim
    modality = arguments["modality_configs"]["new_embodiment"]
    assert modality["video"]["modality_keys"] == ["front", "wrist"]
    assert modality["action"]["delta_indices"] == list(range(16))
    assert modality["action"]["action_configs"][0]["rep"] == "ABSOLUTE"
    statistics = json.loads((tmp_path / "statistics.json").read_text())["new_embodiment"]
    assert statistics["state"]["state"]["min"] == [-3.0] * 7
    assert set(statistics["action"]["action"]) == {"min", "max", "mean", "std", "q01", "q99"}
    slots = json.loads((tmp_path / "embodiment_id.json").read_text())
    assert slots["new_embodiment"] == 10 and slots["gr1"] == 20

    # A second robot is added to the files of the checkpoint it starts from.
    again = recipe.options({"checkpoint": str(tmp_path), "embodiment.tag": "my_robot", "embodiment.slot": 5})
    recipe.export(model, tiny_dataset, again, tmp_path / "second")
    both = json.loads((tmp_path / "second" / "statistics.json").read_text())
    assert set(both) == {"new_embodiment", "my_robot"}
    third = recipe.options({"checkpoint": str(tmp_path / "second"), "embodiment.tag": "my_robot"})
    assert recipe.slot(third) == 5


def test_check_fit_accepts_equal_tables():
    table = {"a.weight": (2, 3)}
    assert check_fit(table, table).tensors == 1
    assert np.prod(table["a.weight"]) == 6
