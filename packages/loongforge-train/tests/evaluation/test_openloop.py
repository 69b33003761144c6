"""Open-loop errors, plots and the command, on made-up and on recorded episodes."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from loongforge.errors import CheckpointError, ConfigError
from loongforge.evaluation import evaluate_open_loop
from loongforge.evaluation.command import evaluate, export, run_evaluation, training_data
from loongforge.evaluation.curves import write_curve
from loongforge.evaluation.plots import write_html, write_png
from loongforge.evaluation.policies import Policy, load_policy
from typer.testing import CliRunner


class Line:
    """Episodes whose action is the frame number (and its negative)."""

    def __init__(self, lengths, steps):
        self.episodes = [SimpleNamespace(index=i, length=n) for i, n in enumerate(lengths)]
        self.steps = steps
        self.starts = np.cumsum([0, *lengths])

    def __getitem__(self, i):
        episode = int(np.searchsorted(self.starts, i, side="right") - 1)
        frame = i - self.starts[episode]
        last = self.episodes[episode].length - 1
        steps = frame + np.arange(self.steps)
        action = np.minimum(steps, last).astype(np.float32)
        return {"frame": frame, "action": np.stack([action, -action], -1), "action_is_pad": steps > last}


class Offset:
    """Predicts the recorded action plus a constant."""

    names = ("forward", "back")

    def __init__(self, steps, offset):
        self.steps, self.offset = steps, offset
        self.calls = []

    def predict(self, samples, generator=None):
        self.calls.append([s["frame"] for s in samples])
        return np.stack([s["action"] for s in samples]) + np.float32(self.offset)

    def truth(self, samples):
        return np.stack([s["action"] for s in samples]), ~np.stack([s["action_is_pad"] for s in samples])


def test_chunks_cover_each_episode_once():
    dataset, predictor = Line([7, 4, 1], 3), Offset(3, 0.0)
    report = evaluate_open_loop(predictor, dataset, batch_size=2)
    assert [len(trace.predicted) for trace in report.traces] == [7, 4, 1]
    for trace in report.traces:
        np.testing.assert_array_equal(trace.recorded[:, 0], np.arange(len(trace.recorded)))
    assert predictor.calls == [[0, 3], [6], [0, 3], [0]]
    assert report.to_json()["mse"] == 0


def test_errors_are_per_dimension_and_in_all():
    report = evaluate_open_loop(Offset(3, [0.5, -2.0]), Line([7, 4], 3))
    rows = report.per_dimension()
    assert [row["mse"] for row in rows] == pytest.approx([0.25, 4.0])
    assert [row["l1"] for row in rows] == pytest.approx([0.5, 2.0])
    summary = report.to_json()
    assert summary["mse"] == pytest.approx(2.125)
    assert (summary["episodes"], summary["frames"]) == (2, 11)
    assert summary["per_episode"][1]["l1"] == pytest.approx(1.25)


def test_only_so_many_episodes_and_at_least_one():
    report = evaluate_open_loop(Offset(3, 0.0), Line([7, 4], 3), episodes=1)
    assert [trace.episode for trace in report.traces] == [0]
    with pytest.raises(ConfigError, match="no episode to evaluate"):
        evaluate_open_loop(Offset(3, 0.0), Line([], 3))
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        evaluate_open_loop(Offset(3, 0.0), Line([3], 3), batch_size=0)


def test_reports_are_readable_files(tmp_path):
    report = evaluate_open_loop(Offset(3, 0.5), Line([7, 4], 3))
    page = write_html(report, tmp_path / "a" / "report.html", title="x < y").read_text()
    assert "x &lt; y" in page and page.count("<svg") == 4 and "forward" in page
    pytest.importorskip("matplotlib")
    picture = write_png(report, tmp_path / "episode.png", title="x")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_curves_have_axes_and_numbers(tmp_path):
    curves = {"seed <0>": [(0, 1.5), (10, 0.5)], "seed 1": [(0, 1.25), (5, 1.0), (10, 0.25)]}
    page = write_curve(tmp_path / "curve.html", curves, title="curve", goal=1.05).read_text()
    assert "<td>10</td><td>0.5000</td><td>0.2500</td>" in page
    assert "<td>5</td><td></td><td>1.0000</td>" in page
    assert "seed &lt;0&gt;" in page and page.count("<polyline") == 2 and "goal 1.05" in page
    assert ">0.4</text>" in page and ">10</text>" in page and "validation loss" in page
    with pytest.raises(ValueError, match="at least one curve"):
        write_curve(tmp_path / "none.html", {}, title="none")


# ---- with the tiny recipe on a recording of our own ------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    synthetic = pytest.importorskip("loongforge_data.synthetic")
    root = tmp_path_factory.mktemp("data") / "moving"
    synthetic.write_dataset(root, episodes=3, frames=24, cameras=2, size=(64, 80), seed=1)
    return root


@pytest.fixture(scope="module")
def published(tmp_path_factory, recording):
    from loongforge.recipes import get_recipe

    recipe = get_recipe("gr00t_n1_6_tiny")
    options = recipe.options({"frozen_dtype": "float32"})
    folder = tmp_path_factory.mktemp("published")
    model = recipe.build_model(options, 0)
    recipe.export(model, recipe.build_dataset(str(recording), options), options, folder)
    return folder


def invoke(*arguments, command=evaluate):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_the_command_evaluates_held_out_episodes(recording, published, tmp_path):
    policy = ["--checkpoint", published, "--recipe", "gr00t_n1_6_tiny", "--option", "frozen_dtype=float32"]
    data = ["--dataset", recording, "--option", "held_out=2", "--samples", 8]
    result = invoke(*policy, *data, "--output", tmp_path)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.strip().splitlines()[-1])
    assert summary["held_out"] is True
    assert (summary["episodes"], summary["frames"]) == (1, 24)
    assert summary["per_episode"][0]["episode"] == 2
    assert np.isfinite(summary["validation_loss"])
    assert len(summary["per_dimension"]) == 3
    assert (tmp_path / "report.html").is_file()
    assert json.loads((tmp_path / "report.json").read_text())["mse"] == summary["mse"]


def test_what_cannot_be_evaluated_is_said(recording, published, tmp_path):
    with pytest.raises(ConfigError, match="pass --recipe NAME"):
        load_policy(str(published))
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        load_policy(str(tmp_path))
    with pytest.raises(ConfigError, match="no moving average"):
        load_policy(str(published), recipe="gr00t_n1_6_tiny", average=True)
    result = invoke("--checkpoint", published, "--recipe", "gr00t_n1_6_tiny")
    assert isinstance(result.exception, ConfigError) and "pass --dataset" in str(result.exception)
    result = invoke("--checkpoint", published, "--recipe", "gr00t_n1_6_tiny", "--option", "held_out")
    assert "must be NAME=VALUE" in str(result.exception)


def test_a_run_is_evaluated_by_its_folder(recording, tmp_path):
    from loongforge.config import build_config
    from loongforge.runs import build_run

    config = build_config(
        {
            "dataset": str(recording),
            "recipe": "gr00t_n1_6_tiny",
            "recipe_options": {"held_out": [1]},
            "output": str(tmp_path / "run"),
            "steps": 2,
            "batch_size": 2,
            "workers": 1,
            "control": False,
            "device": "cpu",
            "ema_decay": 0.5,
            "pillars": {"comm": "off"},
        }
    )
    run = build_run(config)
    run.session.train()
    for average in (False, True):
        policy = load_policy(str(tmp_path / "run"), average=average)
        assert policy.dataset == str(recording)
        assert policy.options.held_out == (1,)
        trained, loaded = run.model.state_dict(), policy.model.state_dict()
        assert all(torch.equal(value, trained[name]) for name, value in loaded.items()) != average
    result = invoke("--checkpoint", tmp_path / "run", "--output", tmp_path / "eval", "--ema", "--samples", 0)
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout.strip().splitlines()[-1])["per_episode"][0]["episode"] == 1
    result = invoke("--checkpoint", tmp_path / "run", "--output", tmp_path / "out", command=export)
    assert result.exit_code == 0, result.exception
    exported = load_policy(
        str(tmp_path / "out"), recipe="gr00t_n1_6_tiny", overrides={"frozen_dtype": "float32"}
    )
    trained = run.model.state_dict()
    for name, value in exported.model.state_dict().items():
        assert torch.equal(value, trained[name]), name
    assert (tmp_path / "out" / "processor_config.json").is_file()


def test_a_prediction_does_not_depend_on_its_batch(recording):
    from loongforge.recipes import get_recipe

    recipe = get_recipe("gr00t_n1_6_tiny")
    options = recipe.options()
    model = recipe.build_model(options, 0)
    dataset = recipe.build_dataset(str(recording), options)
    predictor = recipe.predictor(model, recipe.build_collate(dataset, model, options))
    reports = [evaluate_open_loop(predictor, dataset, episodes=2, batch_size=n) for n in (1, 2)]
    for one, other in zip(*(report.traces for report in reports), strict=True):
        np.testing.assert_allclose(one.predicted, other.predicted, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="2 generators for 1 samples"):
        predictor.predict([dataset[0]], [torch.Generator(), torch.Generator()])


class Recorded:
    """A recipe that notes which episodes statistics and samples come from; its policy predicts zeros."""

    name = "recorded"

    def __init__(self):
        self.opened, self.collated = [], None

    def build_dataset(self, root, options, *, episodes=None):
        chosen = range(3) if episodes is None else episodes
        kept = [i for i in chosen if episodes is not None or i not in options.held_out]
        dataset = Line([6, 6, 6], 3)
        dataset.episodes = [e for e in dataset.episodes if e.index in kept]
        dataset.root, dataset.kept = str(root), kept
        self.opened.append((str(root), kept))
        return dataset

    def build_collate(self, dataset, model, options):
        self.collated = (dataset.root, dataset.kept)

    def predictor(self, model, collate):
        return Offset(3, 0.5)


@dataclass(frozen=True)
class HeldOut:
    held_out: tuple[int, ...] = (2,)


@pytest.mark.parametrize(
    ("dataset", "samples_from", "statistics_from"),
    [
        # The run's own data: held-out episodes, normalised by those it trained on.
        (None, [2], ("own", [0, 1])),
        # Other data: all of it is unseen; the numbers are still those of the training data.
        ("other", [0, 1, 2], ("own", [0, 1])),
    ],
)
def test_values_are_normalised_by_the_episodes_that_trained(tmp_path, dataset, samples_from, statistics_from):
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
    recipe = Recorded()
    policy = Policy(
        recipe=recipe, options=HeldOut(), model=None, dataset=str(tmp_path / "own"), source=tmp_path
    )
    root = None if dataset is None else str(tmp_path / dataset)
    settings = {"chosen": None, "limit": 9, "batch_size": 2, "seed": 0, "samples": 0}
    summary = run_evaluation(policy, dataset=root, output=tmp_path / "out", **settings)
    where, kept = recipe.collated
    assert (where, kept) == (str(tmp_path / statistics_from[0]), statistics_from[1])
    assert [row["episode"] for row in summary["per_episode"]] == samples_from
    assert summary["held_out"] is True


def test_training_data_that_is_gone_is_told(tmp_path, caplog):
    (tmp_path / "other").mkdir()
    policy = Policy(
        recipe=Recorded(), options=HeldOut(), model=None, dataset=str(tmp_path / "gone"), source=tmp_path
    )
    with caplog.at_level(logging.WARNING, logger="loongforge"):
        found = training_data(policy, str(tmp_path / "other"))
    assert found.kept == [0, 1, 2]
    assert "is not here" in caplog.text and "--option statistics=DIR" in caplog.text
