"""States and actions: normalisation both ways, relative actions, padding; robots matched with data sets."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loongforge.errors import ConfigError
from loongforge.recipes.gr00t_n1_6.processing.embodiment import (
    EmbodimentConfig,
    KeyConfig,
    resolve_embodiment,
)
from loongforge.recipes.gr00t_n1_6.processing.normalise import StateActionProcessor
from loongforge.recipes.gr00t_n1_6.processing.poses import absolute_pose, relative_pose
from loongforge.recipes.gr00t_n1_6.processing.relative import relative_statistics


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


# ---- against independent arithmetic ----------------------------------------------------------------------


def plain_normal(kind, value, low, high, mean, std, *, clip):
    """One number by the rules of the published processor, in plain floats."""
    if kind == "none":
        return value
    if kind == "mean_std":
        y = (value - mean) / std if std != 0 else value
    else:
        y = 0.0 if np.isclose(low, high) else 2 * (value - low) / (high - low) - 1
    return min(1.0, max(-1.0, y)) if clip else y


def plain_raw(kind, y, low, high, mean, std, *, clip):
    """The way back."""
    if kind == "none":
        return y
    if kind == "mean_std":
        return y * std + mean if std != 0 else y
    y = min(1.0, max(-1.0, y)) if clip else y
    return low if np.isclose(low, high) else (y + 1) / 2 * (high - low) + low


@given(
    st.sampled_from(["min_max", "q01_q99", "mean_std", "none"]),
    st.lists(st.floats(-8, 8, width=32), min_size=5, max_size=5),
    st.lists(st.floats(-3, 3, width=32), min_size=5, max_size=5),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_every_normalisation_agrees_with_plain_arithmetic(kind, raw, predicted, clip):
    out = processor(robot(normalization=kind, clip=clip))
    value, answer = np.array([raw], np.float32), np.array(predicted, np.float32)
    state = out.states({"observation.state": value})[0, 0, :5]
    action = out.actions({"action": value[None]}, {}, np.zeros((1, 1), bool)).values[0, 0, :5]
    model = np.zeros((1, 4, 6), np.float32)
    model[0, 0, :5] = answer
    decoded = out.decode(model, {})["action"][0, 0]
    low, high = ("q01", "q99") if kind == "q01_q99" else ("min", "max")
    for i in range(5):
        numbers = [float(STATS["action"][name][i]) for name in (low, high, "mean", "std")]
        clipped = clip and kind != "mean_std"
        assert state[i] == pytest.approx(plain_normal(kind, raw[i], *numbers, clip=clipped), abs=2e-6)
        assert action[i] == pytest.approx(plain_normal(kind, raw[i], *numbers, clip=True), abs=2e-6)
        # Ranges are clipped on the way back; mean and deviation are not.
        back = plain_raw(kind, predicted[i], *numbers, clip=True)
        assert decoded[i] == pytest.approx(back, abs=2e-5), (kind, i)


def test_a_nearly_constant_channel_never_explodes():
    """Fault D24: dimension 3 is always 3; values a little off stay small in both directions."""
    for kind in ("min_max", "q01_q99", "mean_std"):
        out = processor(robot(normalization=kind))
        value = np.array([[0, 2, 0, 3.001, 0]], np.float32)
        state = out.states({"observation.state": value})
        action = out.actions({"action": value[None]}, {}, np.zeros((1, 1), bool)).values
        decoded = out.decode(np.pad(action, ((0, 0), (0, 0), (0, 0))), {})["action"]
        for found in (state, action, decoded):
            assert np.isfinite(found).all() and np.abs(found).max() < 4
        if kind != "mean_std":
            assert decoded[0, 0, 3] == 3.0


def test_relative_keys_take_minimum_and_maximum_even_with_percentiles():
    keys = (KeyConfig(name="all", relative=True, normalization="q01_q99"),)
    per_step = {"min": -np.ones((3, 5)), "max": 3 * np.ones((3, 5))}
    out = processor(robot(action=keys, state=(KeyConfig(name="all"),)), relative={"all": per_step})
    states = {"observation.state": np.full((1, 5), 0.5, np.float32)}
    encoded = out.actions({"action": np.full((1, 3, 5), 2.5, np.float32)}, states, np.zeros((1, 3), bool))
    # 2.5 - 0.5 = 2 inside [-1, 3] is 0.5 inside [-1, 1].
    np.testing.assert_allclose(encoded.values[0, :3, :5], 0.5, atol=1e-6)
    assert (encoded.values[0, 3] == 0).all() and (encoded.values[..., 5] == 0).all()


def homogeneous(pose):
    """Four by four matrix of a pose, in float64."""
    a, b = pose[3:6].astype(np.float64), pose[6:9].astype(np.float64)
    x = a / np.linalg.norm(a)
    y = b - (b @ x) * x
    y /= np.linalg.norm(y)
    matrix = np.eye(4)
    matrix[:3, :3] = np.stack((x, y, np.cross(x, y)), 1)
    matrix[:3, 3] = pose[:3]
    return matrix


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_relative_poses_are_inverse_times_pose(seed):
    rng = np.random.default_rng(seed)
    reference, target = rng.standard_normal((2, 9)).astype(np.float32)
    found = relative_pose(target[None, None], reference[None, None])[0, 0]
    expected = np.linalg.inv(homogeneous(reference)) @ homogeneous(target)
    np.testing.assert_allclose(found[:3], expected[:3, 3], atol=1e-4)
    np.testing.assert_allclose(homogeneous(found)[:3, :3], expected[:3, :3], atol=1e-4)
    np.testing.assert_allclose(
        homogeneous(found)[:3, :3].T @ homogeneous(found)[:3, :3], np.eye(3), atol=1e-6
    )


def test_padding_of_steps_and_dimensions_weighs_nothing():
    keys = (KeyConfig(name="a", end=2), KeyConfig(name="b", start=2, end=4))
    out = processor(robot(action=keys, action_steps=2), action_horizon=4, max_action_dim=6)
    pad = np.array([[False, True], [False, False]])
    actions = out.actions({"action": np.ones((2, 2, 5), np.float32)}, {}, pad)
    expected = np.zeros((2, 4, 6))
    expected[0, 0, :4] = expected[1, :2, :4] = 1
    np.testing.assert_array_equal(actions.mask, expected)
    assert (actions.values[actions.mask == 0][8:] == 0).all()


def test_two_cameras_of_one_short_name_must_be_told_apart():
    cameras = {
        f"{side}.images.hand": SimpleNamespace(dtype="video", shape=(48, 64, 3)) for side in ("left", "right")
    }
    features = {**FEATURES, **cameras}
    with pytest.raises(ConfigError, match=r"may be left\.images\.hand or right\.images\.hand"):
        resolve_embodiment(EmbodimentConfig(views=("hand",)), features, None, slots=32)
    chosen = resolve_embodiment(EmbodimentConfig(views=("right.images.hand",)), features, None, slots=32)
    assert chosen.views == ("right.images.hand",)
