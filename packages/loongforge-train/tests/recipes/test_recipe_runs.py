"""Every robot's recipe trains and is evaluated on a recording of its layout, with the model in miniature."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path

import numpy as np
import pytest
from loongforge.cli import run
from loongforge.errors import ConfigError
from loongforge.recipes import get_recipe, recipe_text

synthetic = pytest.importorskip("loongforge_data.synthetic")
parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")
NAMES = ("observation.images.front", "observation.images.wrist")


def write_robot(root: Path, *, cameras: tuple[str, ...], state: int, action: int) -> Path:
    """Write a recording whose cameras and vectors are those of a robot, by changing a synthetic one."""
    synthetic.write_dataset(root, episodes=3, frames=20, cameras=len(cameras), size=(64, 64), seed=2)
    renamed = dict(zip(NAMES, cameras, strict=False))
    info = json.loads((root / "meta/info.json").read_text())
    features = {renamed.get(name, name): value for name, value in info["features"].items()}
    widths = {"observation.state": state, "action": action}
    for name, width in widths.items():
        features[name] = {"dtype": "float32", "shape": [width], "names": None}
    (root / "meta/info.json").write_text(json.dumps({**info, "features": features}))
    for old, new in renamed.items():
        (root / "videos/chunk-000" / old).rename(root / "videos/chunk-000" / new)
    lines = []
    for text in (root / "meta/episodes_stats.jsonl").read_text().splitlines():
        row = json.loads(text)
        rng = np.random.default_rng(row["episode_index"])
        path = root / f"data/chunk-000/episode_{row['episode_index']:06d}.parquet"
        table = parquet.read_table(path)
        row["stats"] = {renamed.get(name, name): value for name, value in row["stats"].items()}
        for name, width in widths.items():
            values = np.cumsum(rng.normal(0, 0.1, (table.num_rows, width)), 0).astype(np.float32)
            column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), width)
            table = table.set_column(table.column_names.index(name), name, column)
            moments = {
                "min": values.min(0),
                "max": values.max(0),
                "mean": values.mean(0),
                "std": values.std(0),
            }
            row["stats"][name] = {
                **{key: value.tolist() for key, value in moments.items()},
                "count": [len(values)],
            }
        parquet.write_table(table, path)
        lines.append(json.dumps(row))
    (root / "meta/episodes_stats.jsonl").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="module")
def libero(tmp_path_factory) -> Path:
    cameras = ("observation.images.image", "observation.images.wrist_image")
    return write_robot(tmp_path_factory.mktemp("libero") / "d", cameras=cameras, state=8, action=7)


@pytest.fixture(scope="module")
def so100(tmp_path_factory) -> Path:
    cameras = ("observation.images.front", "observation.images.wrist")
    return write_robot(tmp_path_factory.mktemp("so100") / "d", cameras=cameras, state=6, action=6)


def miniature(name: str, folder: Path) -> str:
    """Write a copy of a recipe with the sizes of the tiny model, as a user changes one; return its path."""
    sizes = tomllib.loads(recipe_text("gr00t_n1_6_tiny"))["options"]
    lines = [f'base = "{name}"', 'description = "in miniature"', "[options]", 'frozen_dtype = "float32"']
    lines += ["pad_multiple = 8", 'pad_to = "none"', "[options.image]", "short_edge = 56"]
    for part, values in sizes["config"].items():
        lines.append(f"[options.config.{part}]")
        lines += [f"{key} = {value}" for key, value in values.items()]
    lines += ["[training]", 'precision = "fp32"', "learning_rate = 1e-3"]
    path = folder / f"{name}_mini.toml"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def train_and_evaluate(recipe: str, dataset: Path, folder: Path, capsys) -> dict[str, object]:
    """Train two steps and evaluate the held-out episode, by the command line; return the summary."""
    code = run(
        [
            *("train", "--recipe", recipe, "--dataset", str(dataset), "--output", str(folder / "run")),
            *("--steps", "2", "--batch-size", "3", "--workers", "0", "--device", "cpu"),
            *("--set", "control=false", "--set", "pillars.comm=off", "--set", "recipe_options.held_out=2"),
            *("--set", "validate_every=2"),
        ]
    )
    assert code == 0
    records = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert len(records) == 2 and all(math.isfinite(record["loss"]) for record in records)
    assert math.isfinite(records[-1]["validation_loss"])
    capsys.readouterr()
    arguments = ["--checkpoint", str(folder / "run"), "--output", str(folder / "eval"), "--samples", "4"]
    assert run(["eval", *arguments]) == 0
    summary = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert summary["validation_loss"] == pytest.approx(records[-1]["validation_loss"], rel=0.5)
    assert (folder / "eval/report.html").is_file()
    return summary


def test_libero_trains_and_is_evaluated(libero, tmp_path, capsys):
    summary = train_and_evaluate(miniature("libero", tmp_path), libero, tmp_path, capsys)
    names = [row["name"] for row in summary["per_dimension"]]
    assert names == [f"{key}[0]" for key in ("x", "y", "z", "roll", "pitch", "yaw", "gripper")]
    assert summary["per_episode"][0]["episode"] == 2


def test_so100_with_relative_actions_trains_and_is_evaluated(so100, tmp_path, capsys):
    recipe = miniature("so100", tmp_path)
    summary = train_and_evaluate(recipe, so100, tmp_path, capsys)
    assert len(summary["per_dimension"]) == 6
    # Joint targets are the state plus a difference of training size: an untrained policy stays near it.
    assert summary["mse"] < 10 * max(row["recorded_std"] for row in summary["per_dimension"]) ** 2


def test_unitree_g1_trains_and_is_evaluated_on_a_real_recording(g1_pick, tmp_path, capsys):
    summary = train_and_evaluate(miniature("unitree_g1", tmp_path), g1_pick, tmp_path, capsys)
    assert len(summary["per_dimension"]) == 26 and summary["frames"] > 100


def test_the_multimodal_recipe_trains_on_a_recording(so100, tmp_path):
    code = run(
        [
            *("train", "--recipe", "multimodal_tiny", "--dataset", str(so100), "--output", str(tmp_path)),
            *("--steps", "2", "--batch-size", "3", "--workers", "0", "--device", "cpu"),
            *("--set", "control=false", "--set", "pillars.comm=off"),
        ]
    )
    assert code == 0
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(math.isfinite(record["loss"]) for record in records)


def test_a_policy_without_predictions_is_not_evaluated(so100, tmp_path, capsys):
    test_the_multimodal_recipe_trains_on_a_recording(so100, tmp_path)
    assert run(["eval", "--checkpoint", str(tmp_path), "--output", str(tmp_path / "eval")]) == 2
    assert "predicts no actions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "change", "words"),
    [
        ("libero", {}, r"no view 'image'; it has .*front.*Set embodiment\.views"),
        (
            "libero",
            {"embodiment.views": ["front"]},
            r"takes 6:8 of column 'observation\.state', which has 6 values; give ranges inside it",
        ),
        (
            "so100",
            {"embodiment.action": [{"name": "arm", "column": "action.arm"}]},
            r"reads column 'action\.arm', which the data set lacks; it has .*Set the key's column",
        ),
        (
            "so100",
            {"embodiment.action": [{"name": "wrist", "start": 0, "end": 2, "relative": True}]},
            r"refers to state key 'wrist', which is not among single_arm, gripper; set reference",
        ),
        (
            "so100",
            {"embodiment.action": [{"name": "gripper", "end": 5, "relative": True}]},
            r"key 'gripper' has 5 values, its state key 'gripper' has 1",
        ),
        ("so100", {"embodiment.action_steps": 17}, r"action_steps 17 exceeds .* 16; set .* to at most 16"),
        ("so100", {"embodiment.action_steps": 30}, r"has 30 steps, but no episode is longer than 20; set"),
        (
            "so100",
            {"embodiment.language": "speech"},
            r"no text 'speech'; it has .*leave embodiment\.language",
        ),
    ],
)
def test_a_recording_of_another_robot_is_refused_with_the_way_out(so100, tmp_path, recipe, change, words):
    built = get_recipe(miniature(recipe, tmp_path))
    options = built.options(change)
    with pytest.raises(ConfigError, match=words):  # noqa: PT012 - either of the two may find it
        dataset = built.build_dataset(str(so100), options)
        built.build_collate(dataset, None, options)
