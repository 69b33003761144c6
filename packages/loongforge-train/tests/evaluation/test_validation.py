"""Validation loss: fixed samples and draws; it stands in the record of its own step, also of the last."""

from __future__ import annotations

import pytest
import torch
from loongforge.config import build_config
from loongforge.errors import ConfigError
from loongforge.evaluation import Validation
from loongforge.records import read_metrics
from loongforge.runs import build_run


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


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    synthetic = pytest.importorskip("loongforge_data.synthetic")
    root = tmp_path_factory.mktemp("data") / "moving"
    synthetic.write_dataset(root, episodes=3, frames=16, cameras=1, size=(64, 80), seed=1)
    return root


def settings(recording, tmp_path, **more):
    return build_config(
        {
            "dataset": str(recording),
            "recipe": "gr00t_n1_6_tiny",
            "recipe_options": {"held_out": [1]},
            "output": str(tmp_path / "run"),
            "steps": 4,
            "batch_size": 4,
            "workers": 0,
            "control": False,
            "device": "cpu",
            "checkpoint": {"every": 0},
            "pillars": {"comm": "off"},
            "validate_every": 2,
            **more,
        }
    )


def test_validation_stands_in_the_record_of_its_step_the_last_included(recording, tmp_path):
    run = build_run(settings(recording, tmp_path))
    run.session.train()
    losses = [record["validation_loss"] for record in read_metrics(tmp_path / "run")]
    assert [loss is not None for loss in losses] == [False, True, False, True]
    # The weights did not change after the last step, and the draws are fixed: measured again it is the same.
    assert run.session.validation() == pytest.approx(losses[-1], rel=1e-6)
    assert losses[1] != losses[3]


def test_steps_that_are_driven_by_hand_validate_too(recording, tmp_path):
    run = build_run(settings(recording, tmp_path))
    records = []
    run.session.parts.recorder.listeners.append(lambda record, _ids: records.append(record))
    try:
        for _ in range(4):
            assert run.session.engine.run_step()
        run.session.parts.recorder.flush()
    finally:
        run.session.close()
    assert [r.validation_loss is not None for r in records] == [False, True, False, True]
    assert run.model.training


def test_validation_without_held_out_episodes_is_refused(recording, tmp_path):
    with pytest.raises(ConfigError, match=r"set recipe_options\.held_out"):
        build_run(settings(recording, tmp_path, recipe_options={}))
