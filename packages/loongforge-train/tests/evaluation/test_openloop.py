"""Open-loop errors, plots, validation loss and the command, on made-up and on recorded episodes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import typer
from loongforge.errors import CheckpointError, ConfigError
from loongforge.evaluation import Validation, evaluate_open_loop
from loongforge.evaluation.command import evaluate, export
from loongforge.evaluation.plots import write_curve, write_html, write_png
from loongforge.evaluation.policies import load_policy
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
    curve = write_curve(tmp_path / "curve.html", [(0, 1.5), (10, 0.5)], title="curve")
    assert "<td>10</td><td>0.5000</td>" in curve.read_text()


class Echo(torch.nn.Module):
    """Loss = drawn number + weight; counts its draws."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))

    def draw(self, batch, generator=None):
        assert not self.training
        return {**batch, "noise": torch.rand(len(batch["x"]), generator=generator)}

    def forward(self, batch):
        return {"loss_sum": batch["noise"] + self.weight, "loss_count": torch.ones(len(batch["x"]))}


def test_validation_repeats_its_draws_and_restores_the_mode():
    dataset = [{"x": i} for i in range(10)]

    def collate(samples):
        return {"x": torch.tensor([s["x"] for s in samples])}

    validation = Validation(dataset, collate, samples=6, batch_size=4)
    assert validation.samples == 6
    model = Echo().train()
    first = validation.loss(model)
    assert validation.loss(model) == first
    assert model.training
    model.weight.data += 1
    assert validation.loss(model) == pytest.approx(first + 1)
    assert Validation(dataset, collate, samples=6, batch_size=4, seed=1).loss(model) != pytest.approx(
        first + 1
    )
    assert torch.cat([b["x"] for b in validation.batches()]).tolist() == [0, 1, 3, 5, 6, 8]
    with pytest.raises(ConfigError, match="has no sample"):
        Validation([], collate)
    with pytest.raises(ConfigError, match="at least 1, got 0 and 16"):
        Validation(dataset, collate, samples=0)


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
