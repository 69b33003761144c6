"""The multimodal recipe: every modality arrives, padding does not leak, sizes from tiny to 12 B."""

from __future__ import annotations

import wave
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loongforge.errors import ConfigError
from loongforge.recipes import get_recipe
from loongforge.recipes.multimodal.audio import mel_filters
from loongforge.recipes.multimodal.config import AudioConfig, MultimodalConfig, SeriesConfig


def sample(number, *, sound=True, pad_sound=0, steps_padded=0, text="Pick up the cube"):
    rng = np.random.default_rng(number)
    result = {
        "observation.images.front": rng.integers(0, 256, (56, 56, 3), dtype=np.uint8),
        "imu": rng.uniform(-1, 1, (32, 6)).astype(np.float32),
        "imu_is_pad": np.arange(32) < 8 * (number % 2),
        "action": rng.uniform(-1, 1, (4, 3)).astype(np.float32),
        "action_is_pad": np.arange(4) >= 4 - steps_padded,
        "task": text,
        "index": np.int64(number),
    }
    if sound:
        result["audio"] = rng.standard_normal((1, 16_000)).astype(np.float32) * 0.1
        result["audio_is_pad"] = np.arange(16_000) < pad_sound
    return result


@pytest.fixture(scope="module")
def tiny():
    recipe = get_recipe("multimodal_tiny")
    options = recipe.options({"series": "imu", "audio_file": "audio/{episode_index}.wav"})
    model = recipe.build_model(options, 0)
    vector = SimpleNamespace
    dataset = SimpleNamespace(
        features={
            "observation.images.front": vector(dtype="video", shape=(56, 56, 3)),
            "imu": vector(dtype="float32", shape=(6,)),
            "action": vector(dtype="float32", shape=(3,)),
        },
        stats={
            "imu": {"min": -np.ones(6), "max": np.ones(6)},
            "action": {"min": -np.ones(3), "max": np.ones(3)},
        },
    )
    return recipe, options, model, recipe.build_collate(dataset, model, options)


def test_every_modality_changes_the_loss(tiny):
    _, _, model, collate = tiny
    base = collate([sample(0), sample(1)])
    loss = model(base)["loss"]
    for name in ("images", "audio", "series", "input_ids"):
        changed = dict(base)
        value = base[name].clone()
        if name == "input_ids":
            value[:, 1] += 1
        elif value.dtype == torch.uint8:
            value = 255 - value
        else:
            value = -2 * value
        changed[name] = value
        assert model(changed)["loss"] != loss, name
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    model.zero_grad()


def test_a_batch_is_the_sum_of_its_samples(tiny):
    """Samples of unequal length, sound and text share a batch without touching each other."""
    _, _, model, collate = tiny
    samples = [
        sample(0),
        sample(1, sound=False),
        sample(2, pad_sound=9_000, text="Go"),
        sample(3, steps_padded=2, text="A longer instruction for this one"),
    ]
    together = model(collate(samples))
    for i, one in enumerate(samples):
        alone = model(collate([one]))
        assert alone["loss_count"][0] == together["loss_count"][i]
        torch.testing.assert_close(alone["loss_sum"][0], together["loss_sum"][i], rtol=1e-5, atol=1e-5)
    assert together["loss_count"].tolist() == [12, 12, 12, 6]
    total = together["loss_sum"].sum() / together["loss_count"].sum()
    torch.testing.assert_close(together["loss"], total)
    assert torch.equal(model.loss_count(collate(samples)), together["loss_count"])


def test_what_is_marked_as_padding_is_not_heard(tiny):
    _, _, model, collate = tiny
    one = sample(2, pad_sound=8_000)
    loud = dict(one)
    noise = one["audio"].copy()
    # The last padded frames lie inside the window of the first valid token; earlier ones must not matter.
    noise[:, :7_000] = 5.0
    loud["audio"] = noise
    assert torch.equal(model(collate([one]))["loss"], model(collate([loud]))["loss"])


def test_tokens_lie_valid_first_and_in_order(tiny):
    _, options, _, collate = tiny
    batch = collate([sample(0), sample(1, sound=False, steps_padded=1)])
    config = options.config
    counts = [4, config.audio.tokens, config.series.tokens, options.text_tokens, 12]
    starts = np.cumsum([0, *counts])
    order = batch["order"][1].tolist()
    assert sorted(order) == list(range(starts[-1]))
    valid_count = 4 + 0 + (config.series.tokens - 1) + len("Pick up the cube") + 2 + 9
    assert order[:valid_count] == sorted(order[:valid_count])
    # Each valid action token is predicted by the row before it.
    for i in range(9):
        place = batch["target_place"][1, i].item()
        assert order[place + 1] == starts[4] + i


def test_actions_become_bins_of_their_range(tiny):
    _, options, _, collate = tiny
    one = sample(0)
    one["action"] = np.array([[-1, 0, 1]] * 4, np.float32)
    bins = options.config.action_bins
    assert collate([one])["target"][0, :3].tolist() == [0, bins // 2, bins - 1]


def test_it_learns_its_actions(tiny):
    recipe, options, _, collate = tiny
    model = recipe.build_model(options, 1)
    batch = collate([sample(i) for i in range(4)])
    groups = recipe.param_groups(model, 1e-2)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    losses = []
    for _ in range(30):
        loss = model(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_recomputation_changes_nothing(tiny):
    recipe, _, model, collate = tiny
    options = recipe.options({"series": "imu", "audio_file": "x", "config.recompute": True})
    other = recipe.build_model(options, 0)
    batch = collate([sample(0), sample(1)])
    for m in (model, other):
        m.zero_grad()
        m(batch)["loss"].backward()
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    model.zero_grad()


def test_sizes_reach_from_tiny_to_twelve_billion():
    counts = {}
    for name in ("multimodal_tiny", "multimodal_small", "multimodal", "multimodal_12b"):
        recipe = get_recipe(name)
        model = recipe.build_model(recipe.options(), 0, device="meta")
        counts[name] = sum(p.numel() for p in model.parameters())
    assert counts["multimodal_tiny"] < 2e6
    assert 11.5e9 < counts["multimodal_12b"] < 12.5e9
    assert list(counts.values()) == sorted(counts.values())


def test_the_whole_model_runs_on_meta(tiny):
    recipe, options, _, collate = tiny
    model = recipe.build_model(options, 0, device="meta")
    batch = {n: v.to("meta") for n, v in collate([sample(0)]).items()}
    out = model(batch)
    out["loss"].backward()
    assert out["loss"].device.type == "meta"


def test_mel_filters_cover_the_band():
    filters = mel_filters(40, 201, 16_000)
    assert filters.shape == (40, 201)
    assert (filters >= 0).all() and (filters.sum(1) > 0).all()
    assert filters.max() <= 1
    peaks = filters.argmax(1)
    assert (peaks[1:] >= peaks[:-1]).all()


def test_a_recording_with_sound_trains(tmp_path):
    synthetic = pytest.importorskip("loongforge_data.synthetic")
    root = tmp_path / "moving"
    synthetic.write_dataset(root, episodes=1, frames=12, cameras=1, size=(56, 56), seed=0)
    (root / "audio").mkdir()
    with wave.open(str(root / "audio" / "episode_000000.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8_000)
        tone = (np.sin(np.arange(8_000) * 0.3) * 8_000).astype("<i2")
        file.writeframes(tone.tobytes())
    recipe = get_recipe("multimodal_tiny")
    options = recipe.options({"audio_file": "audio/episode_{episode_index:06d}.wav"})
    dataset = recipe.build_dataset(str(root), options)
    model = recipe.build_model(options, 0)
    batch = recipe.build_collate(dataset, model, options)([dataset[0], dataset[11]])
    assert batch["audio_valid"].any() and batch["series_valid"].any()
    assert torch.isfinite(model(batch)["loss"])


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: AudioConfig(kernel=4), "kernel 4 must be odd"),
        (lambda: SeriesConfig(rows=10, patch=3), "rows 10 must divide by patch 3"),
        (lambda: MultimodalConfig(action_bins=1), "action_bins must lie in"),
    ],
)
def test_impossible_sizes_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_what_the_data_set_lacks_is_named(tiny):
    recipe, _, model, collate = tiny
    features = {"observation.images.front": SimpleNamespace(dtype="video", shape=(56, 56, 3))}
    dataset = SimpleNamespace(features=features, stats={})
    for change, words in (
        ({"views": ["rear"]}, "no view 'rear'"),
        ({"series": "imu"}, "no column 'imu'"),
        ({"series": "", "image_size": [50, 56]}, "positive multiples of 28"),
        ({"series": ""}, "no minimum and maximum of 'action'"),
    ):
        with pytest.raises(ConfigError, match=words):
            recipe.build_collate(dataset, model, recipe.options(change))
    with pytest.raises(ConfigError, match="no view"):
        collate([{**{k: v for k, v in sample(0).items() if "images" not in k}}])
    wide = {**sample(0), "imu": np.zeros((32, 99), np.float32)}
    with pytest.raises(ConfigError, match="at most 64"):
        collate([wide])
    with pytest.raises(ConfigError, match="no tensor 'input_ids'"):
        model({})
