"""Text, images, states and actions on their way into the model and back."""

from __future__ import annotations

import json
import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge.errors import ConfigError
from loongforge.recipes import get_recipe
from loongforge.recipes.gr00t_n1_6.layout import canonical_batch, layout_tokens
from loongforge.recipes.gr00t_n1_6.processing import images as im
from loongforge.recipes.gr00t_n1_6.processing.embodiment import (
    EmbodimentConfig,
    KeyConfig,
    resolve_embodiment,
)
from loongforge.recipes.gr00t_n1_6.processing.normalise import StateActionProcessor
from loongforge.recipes.gr00t_n1_6.processing.poses import absolute_pose, relative_pose
from loongforge.recipes.gr00t_n1_6.processing.relative import relative_statistics
from loongforge.recipes.gr00t_n1_6.processing.text import (
    ByteTokenizer,
    FolderTokenizer,
    PromptBuilder,
    chat_prompt,
    formalise,
)

# ---- text ------------------------------------------------------------------------------------------------


def test_instructions_lose_case_and_punctuation():
    assert formalise("Pick up the RED block, please!") == "pick up the red block please"
    assert formalise("Öffne_die Tür (2x)") == "öffne_die tür 2x"


def test_the_prompt_has_the_published_form():
    text = chat_prompt("go", [2, 1])
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\ngo<image 1><img><IMG_CONTEXT><IMG_CONTEXT></img>"
        "<image 2><img><IMG_CONTEXT></img><|im_end|>\n"
    )


def test_the_byte_tokenizer_has_one_id_per_byte_and_special_token():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [98, 0xC3 + 1, 0xA9 + 1]
    assert tokenizer.encode("<img><IMG_CONTEXT></img><|im_start|><|im_end|>") == [301, 300, 302, 303, 304]
    prompt = PromptBuilder(tokenizer).ids("Go!", [3])
    assert prompt.count(300) == 3
    assert max(prompt) < tokenizer.vocab_size


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A small tokenizer folder with the special tokens of the published one."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<IMG_CONTEXT>", "<img>", "</img>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=alphabet
    )
    inner.train_from_iterator(["pick up the red block please", "system user image"] * 20, trainer)
    inner.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizer_folder_keeps_special_tokens_whole(tokenizer_folder):
    tokenizer = FolderTokenizer(tokenizer_folder)
    ids = PromptBuilder(tokenizer).ids("Pick up the red block, please", [4, 4])
    assert ids.count(tokenizer.image_token_id) == 8
    assert ids[0] == tokenizer.encode("<|im_start|>")[0]
    assert tokenizer.pad_token_id == tokenizer.encode("<|endoftext|>")[0]


def test_the_wrong_tokenizer_is_refused(tokenizer_folder, tmp_path):
    with pytest.raises(ValueError, match="model expects 151669"):
        FolderTokenizer(tokenizer_folder, image_token_id=151669)
    with pytest.raises(ValueError, match="does not exist"):
        FolderTokenizer(tmp_path / "absent")


def test_golden_prompt_ids_of_the_published_tokenizer():
    folder = os.environ.get("LOONGFORGE_GROOT_TOKENIZER")
    if not folder:
        pytest.skip("set LOONGFORGE_GROOT_TOKENIZER to a folder with the published tokenizer files")
    ids = PromptBuilder(FolderTokenizer(folder)).ids("pick up the red block please", [81, 81])
    head = [151644, 8948, 198, 2610, 525, 264, 10950, 17847, 13, 151645, 198, 151644, 872, 198]
    text = [29245, 705, 279, 2518, 2504, 4486]
    first = [27, 1805, 220, 16, 29, 151670, *[151669] * 81, 151671]
    second = [27, 1805, 220, 17, 29, 151670, *[151669] * 81, 151671]
    assert ids == [*head, *text, *first, *second, 151645, 198]


# ---- layout ----------------------------------------------------------------------------------------------

rows_of_tokens = st.lists(
    st.lists(st.integers(1, 9), min_size=2, max_size=30).map(lambda row: [7, *row, 1]), min_size=1, max_size=4
)


@given(rows_of_tokens, st.sampled_from([None, 64]))
@settings(max_examples=50, deadline=None)
def test_index_tensors_find_every_token_once(rows, pad_to):
    layout = layout_tokens(rows, image_token_id=7, pad_token_id=0, pad_to=pad_to)
    assert layout.input_ids.shape[1] % 8 == 0
    assert layout.text_index.shape[1] % 8 == 0
    for i, row in enumerate(rows):
        assert layout.input_ids[i, : len(row)].tolist() == row
        assert layout.attention_mask[i].sum() == len(row)
        valid = (
            layout.image_valid[i]
            if layout.image_valid is not None
            else torch.ones_like(layout.image_index[i]).bool()
        )
        images = layout.image_index[i][valid].tolist()
        texts = layout.text_index[i][layout.text_valid[i]].tolist()
        assert images == [k for k, token in enumerate(row) if token == 7]
        assert sorted(images + texts) == list(range(len(row)))


def test_padding_on_the_left_becomes_padding_on_the_right():
    batch = {
        "input_ids": torch.tensor([[0, 0, 5, 7, 6], [5, 7, 7, 6, 6]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    }
    ours = canonical_batch(batch, image_token_id=7, pad_token_id=0)
    assert ours["input_ids"][0].tolist() == [5, 7, 6, 0, 0, 0, 0, 0]
    assert ours["image_valid"].tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(
    ("rows", "pad_to", "words"),
    [
        ([], None, "at least one row"),
        ([[1, 2]], None, "no image token"),
        ([[7, 7]], None, "no text token"),
        ([[7, 1, 2]], 2, "3 tokens but pad_to is 2"),
    ],
)
def test_impossible_rows_are_refused(rows, pad_to, words):
    with pytest.raises(ValueError, match=words):
        layout_tokens(rows, image_token_id=7, pad_token_id=0, pad_to=pad_to)


# ---- images ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "resized", "grid", "tokens"),
    [((256, 256), (256, 256), (252, 252), 81), ((480, 640), (256, 340), (252, 336), 108)],
)
def test_golden_image_sizes(source, resized, grid, tokens):
    plan = im.plan_image(*source, im.ImageOptions())
    assert plan.resized == resized
    assert plan.grid == grid
    assert plan.tokens == tokens


@given(st.integers(10, 3000), st.integers(10, 3000))
@settings(max_examples=100, deadline=None)
def test_every_grid_is_whole_and_bounded(height, width):
    if max(height, width) > 200 * min(height, width):
        return
    rows, columns = im.grid_size(height, width)
    assert rows % 28 == 0 and columns % 28 == 0
    assert 4 <= rows * columns // 784 <= 4096


def test_the_last_resize_is_that_of_pillow():
    """Pillow rounds between its two passes, we round once: one level of difference, seldom."""
    image_module = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    smooth = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
    picture = image_module.fromarray(smooth).resize((340, 256), image_module.Resampling.BICUBIC)
    theirs = np.asarray(picture.resize((336, 252), image_module.Resampling.BICUBIC))
    ours = im.resize_uint8(
        torch.from_numpy(np.asarray(picture).copy()).permute(2, 0, 1)[None].float(),
        (252, 336),
        mode="bicubic",
    )
    difference = np.abs(ours[0].permute(1, 2, 0).numpy() - theirs)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.25


def test_jitter_agrees_with_a_plain_implementation():
    colorsys = pytest.importorskip("colorsys")
    rng = np.random.default_rng(1)
    pixels = torch.from_numpy(rng.integers(0, 256, (1, 1, 3, 4, 4)).astype(np.float32))
    factors = torch.tensor([[1.2, 0.7, 1.3, 0.06]])
    ours = im.jitter_colours(pixels.clone(), factors)[0, 0].permute(1, 2, 0).numpy()

    def grey(x):
        return x @ np.array([0.299, 0.587, 0.114])

    x = pixels[0, 0].permute(1, 2, 0).numpy().astype(np.float64)
    x = np.clip(x * 1.2, 0, 255).round()
    x = np.clip(x * 0.7 + np.round(grey(x).mean()) * 0.3, 0, 255).round()
    x = np.clip(x * 1.3 + grey(x)[..., None] * -0.3, 0, 255).round()
    for row in x:
        for pixel in row:
            hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
            pixel[:] = np.round(np.array(colorsys.hsv_to_rgb((hue + 0.06) % 1, saturation, value)) * 255)
    assert np.abs(ours - x).max() <= 1


def test_all_views_of_a_sample_get_the_same_change():
    options = im.ImageOptions(short_edge=64)
    view = torch.randint(
        0, 256, (3, 1, 64, 80, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    images = view.expand(-1, 2, -1, -1, -1)
    drawn = im.draw_augmentation(3, options, torch.device("cpu"), torch.Generator().manual_seed(2))
    plan = im.plan_decoded(64, 80, options)
    out = im.prepare_images(images, plan, options, drawn)
    assert torch.equal(out[:, 0], out[:, 1])
    assert out.shape == (3, 2, 3, *plan.grid)
    assert out.min() >= -1 and out.max() <= 1


def test_no_change_drawn_is_the_plain_picture():
    options = im.ImageOptions(short_edge=56, crop_fraction=1.0)
    images = torch.randint(0, 256, (2, 1, 56, 84, 3), dtype=torch.uint8)
    still = torch.tensor([[0.3, 0.7, 1.0, 1.0, 1.0, 0.0]] * 2)
    plan = im.plan_decoded(56, 84, options)
    plain = im.prepare_images(images, plan, options, None)
    assert torch.equal(plain, images.permute(0, 1, 4, 2, 3).float() / 127.5 - 1)
    # The hue goes through another colour space and back: half a level of rounding.
    torch.testing.assert_close(
        im.prepare_images(images, plan, options, still), plain, rtol=0, atol=1.01 / 127.5
    )


@given(st.floats(0, 0.999), st.floats(0, 0.999))
@settings(max_examples=30, deadline=None)
def test_a_crop_is_a_window_of_the_picture(down, right):
    images = torch.arange(2 * 10 * 12 * 3, dtype=torch.int64).reshape(1, 2, 10, 12, 3)
    cut = im.crop_images(images, (7, 9), torch.tensor([[down, right]]))
    top, left = int(down * 4), int(right * 4)
    assert torch.equal(cut, images[:, :, top : top + 7, left : left + 9])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"crop_fraction": 0.0}, "crop_fraction must lie in"),
        ({"short_edge": 2}, "short_edge must be at least 8"),
    ],
)
def test_impossible_image_options_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        im.ImageOptions(**values)
    with pytest.raises(ValueError, match="too narrow"):
        im.grid_size(1, 500)


# ---- states and actions ----------------------------------------------------------------------------------


def feature(width):
    return SimpleNamespace(dtype="float32", shape=(width,))


FEATURES = {
    "observation.images.front": SimpleNamespace(dtype="video", shape=(48, 64, 3)),
    "observation.images.wrist": SimpleNamespace(dtype="video", shape=(48, 64, 3)),
    "observation.state": feature(5),
    "action": feature(5),
    "annotation.note": SimpleNamespace(dtype="string", shape=(1,)),
}
STATS = {
    name: {
        "min": np.array([-2.0, 0, -1, 3, -1]),
        "max": np.array([2.0, 4, 1, 3, 1]),
        "mean": np.array([0.0, 2, 0, 3, 0]),
        "std": np.array([1.0, 2, 0.5, 0, 1]),
        "q01": np.array([-1.0, 1, -0.5, 3, -0.5]),
        "q99": np.array([1.0, 3, 0.5, 3, 0.5]),
    }
    for name in ("observation.state", "action")
}


def robot(**values):
    values.setdefault("action_steps", 3)
    return resolve_embodiment(EmbodimentConfig(**values), FEATURES, None, slots=32)


def processor(embodiment, **values):
    sizes = {"max_state_dim": 12, "max_action_dim": 6, "action_horizon": 4}
    return StateActionProcessor(embodiment, STATS, **{**sizes, **values})


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # value 1, 1, 1, 3 (constant), 1 of columns with the statistics above
        ("min_max", [0.5, -0.5, 1.0, 0.0, 1.0]),
        ("q01_q99", [1.0, -1.0, 1.0, 0.0, 1.0]),
        ("mean_std", [1.0, -0.5, 2.0, 3.0, 1.0]),
        ("none", [1.0, 1.0, 1.0, 3.0, 1.0]),
    ],
)
def test_golden_state_normalisation(kind, expected):
    out = processor(robot(normalization=kind, action=(KeyConfig(name="a", normalization="none"),)))
    state = out.states({"observation.state": np.array([[1, 1, 1, 3, 1]], np.float32)})
    np.testing.assert_allclose(state[0, 0, :5], expected, rtol=1e-6)
    assert (state[0, 0, 5:] == 0).all()


def test_sines_and_cosines_double_the_width():
    keys = (KeyConfig(name="angle", end=2, normalization="sin_cos"), KeyConfig(name="rest", start=2))
    out = processor(robot(state=keys))
    state = out.states({"observation.state": np.array([[0, np.pi / 2, 1, 3, 1]], np.float32)})
    np.testing.assert_allclose(state[0, 0, :7], [0, 1, 1, 0, 1, 0, 1], atol=1e-6)
    assert out.state_dim == 7


@pytest.mark.parametrize("kind", ["min_max", "q01_q99", "mean_std", "none"])
@pytest.mark.parametrize("relative", [False, True])
def test_decoding_undoes_encoding(kind, relative):
    rng = np.random.default_rng(0)
    keys = tuple(
        KeyConfig(name=name, start=a, end=b, relative=relative, normalization=kind)
        for name, a, b in (("left", 0, 3), ("right", 3, 5))
    )
    plain = tuple(KeyConfig(name=key.name, start=key.start, end=key.end) for key in keys)
    embodiment = robot(action=keys, state=plain)
    per_step = {
        key.name: {
            "min": -2 * np.ones((3, key.end - key.start)),
            "max": 2 * np.ones((3, key.end - key.start)),
            "mean": np.zeros((3, key.end - key.start)),
            "std": 4 * np.ones((3, key.end - key.start)),
        }
        for key in keys
    }
    # Values stay inside what each normalisation keeps; the constant channel keeps its value.
    action = rng.uniform(-0.4, 0.4, (2, 3, 5)).astype(np.float32)
    action[..., 1] += 2
    action[..., 3] = 3
    states = {"observation.state": rng.uniform(-0.1, 0.1, (2, 5)).astype(np.float32)}
    if relative:
        states["observation.state"][:, 3] = 2.5
        states["observation.state"][:, 1] += 2
    out = processor(embodiment, relative=per_step)
    if kind == "mean_std" and not relative:
        action[..., 3] = 0.5  # a constant channel is clipped to [-1, 1] like every other
    encoded = out.actions({"action": action}, states, np.zeros((2, 3), bool))
    decoded = out.decode(encoded.values, states)
    np.testing.assert_allclose(np.concatenate([decoded["left"], decoded["right"]], -1), action, atol=2e-6)


def test_steps_past_the_episode_are_masked():
    out = processor(robot())
    pad = np.array([[False, False, True]])
    actions = out.actions({"action": np.zeros((1, 3, 5), np.float32)}, {}, pad)
    assert actions.mask.shape == (1, 4, 6)
    assert actions.mask[0].sum(1).tolist() == [5, 5, 0, 0]


def test_relative_statistics_come_from_the_rows_inside_the_episode():
    rng = np.random.default_rng(2)
    states = rng.standard_normal((6, 5)).astype(np.float32)
    actions = rng.standard_normal((6, 3, 5)).astype(np.float32)
    pads = np.array([[False] * 3] * 4 + [[False, False, True]] * 2)
    rows = [
        {"observation.state": states[i], "action": actions[i], "action_is_pad": pads[i]} for i in range(6)
    ]
    source = SimpleNamespace(tabular=lambda i: rows[i])
    source = type("Rows", (), {"__len__": lambda self: 6, "tabular": lambda self, i: rows[i]})()
    embodiment = robot(action=(KeyConfig(name="all", relative=True),), state=(KeyConfig(name="all"),))
    found = relative_statistics(source, embodiment)["all"]
    moved = actions - states[:, None]
    np.testing.assert_allclose(found["min"][0], moved[:, 0].min(0), rtol=1e-6)
    np.testing.assert_allclose(found["max"][2], moved[:4, 2].max(0), rtol=1e-6)
    np.testing.assert_allclose(found["mean"][2], moved[:4, 2].mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["std"][1], moved[:, 1].std(0), rtol=1e-5)


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_relative_poses_compose_back(seed):
    rng = np.random.default_rng(seed)

    def pose(*shape):
        return rng.standard_normal((*shape, 9)).astype(np.float32)

    reference, target = pose(4, 1), pose(4, 3)
    back = absolute_pose(relative_pose(target, reference), reference)
    np.testing.assert_allclose(back[..., :3], target[..., :3], atol=1e-4)
    again = absolute_pose(relative_pose(back, reference), reference)
    np.testing.assert_allclose(again, back, atol=1e-4)
    same = relative_pose(reference, reference)
    np.testing.assert_allclose(same[..., 0, :], [0, 0, 0, 1, 0, 0, 0, 1, 0] * np.ones((4, 1)), atol=1e-5)


# ---- robots ----------------------------------------------------------------------------------------------


def test_a_new_robot_needs_modality_json_alone():
    group = SimpleNamespace
    modality = SimpleNamespace(
        state={"arm": group(column="observation.state", start=0, stop=4)},
        action={
            "arm": group(column="action", start=0, stop=4),
            "grip": group(column="action", start=4, stop=5),
        },
        video={"ego": "observation.images.wrist"},
        annotation={"human.note": "annotation.note"},
    )
    found = resolve_embodiment(
        EmbodimentConfig(views=("ego",), language="human.note"), FEATURES, modality, slots=32
    )
    assert found.views == ("observation.images.wrist",)
    assert [(k.name, k.column, k.start, k.end) for k in found.action] == [
        ("arm", "action", 0, 4),
        ("grip", "action", 4, 5),
    ]
    assert found.language == "annotation.note"
    assert found.slot == 10


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"tag": "strange"}, "no known slot"),
        ({"slot": 32}, r"outside the model's slots 0\.\.31"),
        ({"views": ("rear",)}, "no view 'rear'; it has front"),
        ({"state": (KeyConfig(name="x", column="nope"),)}, "reads column 'nope'"),
        ({"action": (KeyConfig(name="x", start=3, end=9),)}, r"3:9 of column 'action', which has 5"),
        ({"language": "speech"}, "no text 'speech'"),
    ],
)
def test_a_robot_that_does_not_match_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        robot(**values)


@pytest.mark.parametrize(
    ("embodiment", "sizes", "words"),
    [
        ({}, {"max_state_dim": 4}, "state has 5 values but the model takes at most 4"),
        ({"action_steps": 5}, {}, "action_steps 5 exceeds"),
        ({"action": (KeyConfig(name="a", normalization="sin_cos"),)}, {}, "cannot use sin_cos"),
        ({"action": (KeyConfig(name="a", relative=True),)}, {}, "no relative statistics"),
    ],
)
def test_a_robot_too_large_for_the_model_is_refused(embodiment, sizes, words):
    with pytest.raises(ConfigError, match=words):
        processor(robot(**embodiment), **sizes)


def test_missing_statistics_are_named():
    poor = {name: {"min": 0 * STATS[name]["min"]} for name in STATS}
    with pytest.raises(ConfigError, match="needs the statistic 'max'"):
        StateActionProcessor(robot(), poor, max_state_dim=12, max_action_dim=6, action_horizon=4)


# ---- batches ---------------------------------------------------------------------------------------------


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


def test_a_prompt_is_remembered_but_does_not_travel():
    prompts = PromptBuilder(ByteTokenizer())
    prompts.CACHED = 2
    ids = prompts.ids("go", [2])
    ids.append(0)
    assert prompts.ids("go", [2]) == ids[:-1]
    assert len(pickle.loads(pickle.dumps(prompts))._known) == 0
    for text in "abc":
        prompts.ids(text, [1])
    assert len(prompts._known) <= 2


def test_a_sample_without_its_view_is_refused(tiny_dataset):
    recipe = get_recipe("gr00t_n1_6_tiny")
    collate = recipe.build_collate(tiny_dataset, None, recipe.options())
    sample = {k: v for k, v in tiny_dataset.samples[0].items() if "wrist" not in k}
    with pytest.raises(ConfigError, match=r"no view 'observation\.images\.wrist'"):
        collate([sample])
    wrong = {**tiny_dataset.samples[0], "observation.images.wrist": np.zeros((4, 4, 3), np.float32)}
    with pytest.raises(ConfigError, match="must be uint8"):
        collate([wrong])
