"""From samples to batches: static shapes, views of any size, what is missing is named."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loongforge.errors import ConfigError
from loongforge.recipes import get_recipe


def test_a_batch_has_static_shapes_and_host_tensors(tiny_dataset):
    recipe = get_recipe("gr00t_n1_6_tiny")
    options = recipe.options({"pad_to": 160})
    collate = recipe.build_collate(tiny_dataset, None, options)
    batch = collate(tiny_dataset.samples)
    assert batch["images"].dtype == torch.uint8
    assert batch["images"].shape == (4, 2, 56, 75, 3)
    assert batch["input_ids"].shape == (4, 160)
    assert batch["index"].tolist() == [10, 11, 12, 13]
    assert all(value.shape[0] == 4 for value in batch.values())
    assert collate(tiny_dataset.samples[:2])["text_index"].shape[1] == batch["text_index"].shape[1]


def test_views_of_unequal_size_travel_apart(tiny_dataset, tiny_samples):
    recipe = get_recipe("gr00t_n1_6_tiny")
    options = recipe.options()
    wide = SimpleNamespace(dtype="video", shape=(60, 120, 3))
    dataset = SimpleNamespace(
        features={**tiny_dataset.features, "observation.images.wrist": wide},
        stats=tiny_dataset.stats,
        modality=None,
    )
    samples = [
        {**s, "observation.images.wrist": np.repeat(s["observation.images.wrist"], 2, axis=1)[:, :120]}
        for s in tiny_samples
    ]
    model = recipe.build_model(options, 0).train()
    batch = recipe.build_collate(dataset, model, options)(samples)
    assert "images" not in batch and batch["images.1"].shape == (4, 56, 112, 3)
    out = model(model.draw(batch, torch.Generator().manual_seed(0)))
    assert torch.isfinite(out["loss"])
    # The same pictures as a list, the way the original passes unequal sizes.
    model.eval()
    still = dict(batch)
    still.update(
        {
            k: v
            for k, v in model.draw(batch, torch.Generator().manual_seed(0)).items()
            if k in ("noise", "time")
        }
    )
    prepared = model.with_pixels(still)
    flat = [p[i, 0] for i in range(4) for p in prepared["pixel_values"]]
    one = model(still)["loss"]
    other = model(
        {**{k: v for k, v in prepared.items() if not k.startswith("images")}, "pixel_values": flat}
    )["loss"]
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_prompt_and_images_of_different_settings_are_refused(tiny_batch):
    recipe = get_recipe("gr00t_n1_6_tiny")
    model = recipe.build_model(recipe.options({"image.short_edge": 84}), 0)
    with pytest.raises(ConfigError, match="tokens a sample but the prompt has places for"):
        model(tiny_batch)


@pytest.mark.parametrize("name", ["gr00t_n1_6_tiny", "multimodal_tiny"])
def test_a_collate_function_travels_to_another_process(tiny_dataset, name):
    recipe = get_recipe(name)
    options = recipe.options({"series": "", "image_size": [56, 56]} if name == "multimodal_tiny" else {})
    collate = recipe.build_collate(tiny_dataset, None, options)
    first = collate(tiny_dataset.samples)
    again = pickle.loads(pickle.dumps(collate))(tiny_dataset.samples)
    assert set(first) == set(again)
    for key, value in first.items():
        assert torch.equal(value, again[key]), key


def test_a_sample_without_its_view_is_refused(tiny_dataset):
    recipe = get_recipe("gr00t_n1_6_tiny")
    collate = recipe.build_collate(tiny_dataset, None, recipe.options())
    sample = {k: v for k, v in tiny_dataset.samples[0].items() if "wrist" not in k}
    with pytest.raises(ConfigError, match=r"no view 'observation\.images\.wrist'"):
        collate([sample])
    wrong = {**tiny_dataset.samples[0], "observation.images.wrist": np.zeros((4, 4, 3), np.float32)}
    with pytest.raises(ConfigError, match="must be uint8"):
        collate([wrong])


def test_an_instruction_column_of_numbers_is_looked_up_in_the_tasks(tiny_dataset, tiny_samples):
    """GR00T-flavoured recordings keep annotations as numbers of the task table."""
    recipe = get_recipe("gr00t_n1_6_tiny")
    options = recipe.options({"embodiment.language": "annotation.human.task_description"})
    column = "annotation.human.task_description"
    dataset = SimpleNamespace(
        features={**tiny_dataset.features, column: SimpleNamespace(dtype="int64", shape=(1,))},
        stats=tiny_dataset.stats,
        modality=None,
        tasks={3: "Pick up the red cube.", 4: "Open the drawer!"},
    )
    numbered = [{**s, column: np.int64(3 + i % 2), "task": "unused"} for i, s in enumerate(tiny_samples)]
    collate = recipe.build_collate(dataset, None, options)
    plain = recipe.build_collate(tiny_dataset, None, recipe.options())
    assert torch.equal(collate(numbered)["input_ids"], plain(tiny_samples)["input_ids"])
    assert collate.instruction({column: np.array([4])}) == "Open the drawer!"
    with pytest.raises(ConfigError, match=r"names task 9, the data set's task table has 3, 4"):
        collate.instruction({column: np.int64(9)})
    with pytest.raises(ConfigError, match="has no instruction"):
        collate.instruction({"task": "x"})


def test_the_first_resize_can_be_the_originals(tmp_path):
    """By area averages like the original, or while decoding: nearly the same pictures."""
    synthetic = pytest.importorskip("loongforge_data.synthetic")
    synthetic.write_dataset(tmp_path / "d", episodes=1, frames=6, cameras=1, size=(120, 160), seed=1)
    recipe = get_recipe("gr00t_n1_6_tiny")
    pictures = []
    for way in ("decoder", "area"):
        options = recipe.options({"image.first_resize": way})
        dataset = recipe.build_dataset(str(tmp_path / "d"), options)
        collate = recipe.build_collate(dataset, None, options)
        size = dataset[0]["observation.images.front"].shape[:2]
        assert size == ((56, 75) if way == "decoder" else (120, 160))
        pictures.append(collate([dataset[2]])["images"].float())
    assert pictures[0].shape == pictures[1].shape
    assert (pictures[0] - pictures[1]).abs().mean() < 6
