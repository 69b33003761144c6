"""The autotuner: the first alternative must be beaten, decisions survive, patched modules use them."""

from __future__ import annotations

import json

import pytest
import torch
from loongforge_fuse import Autotuner, TuneConfig, apply_fused_ops
from torch import nn


def fake_timer(times):
    """A timer that runs the work and returns the seconds its result is listed with."""
    return lambda work: times[work()]


def tuner(path, times, **options):
    return Autotuner(TuneConfig(path=path, **options), timer=fake_timer(times))


def test_a_clear_winner_is_chosen_and_remembered(tmp_path):
    path = tmp_path / "tuned.json"
    ways = {"eager": lambda: "eager", "ours": lambda: "ours"}
    decision = tuner(path, {"eager": 2.0, "ours": 1.0}).decide("op", ways)
    assert decision.winner == "ours"
    assert decision.micros == {"eager": 2e6, "ours": 1e6}
    again = tuner(path, {}).decide("op", ways)
    assert again == decision


def test_the_first_alternative_stays_unless_beaten_by_the_margin(tmp_path):
    ways = {"eager": lambda: "eager", "ours": lambda: "ours"}
    assert tuner(tmp_path / "a", {"eager": 1.0, "ours": 0.99}).decide("op", ways).winner == "eager"
    assert tuner(tmp_path / "b", {"eager": 1.0, "ours": 0.97}).decide("op", ways).winner == "ours"


def test_an_alternative_that_fails_is_left_out_but_the_first_must_work(tmp_path):
    def broken():
        raise RuntimeError("no kernel")

    decision = tuner(tmp_path / "a", {"eager": 1.0}).decide("op", {"eager": lambda: "eager", "ours": broken})
    assert decision.winner == "eager"
    assert decision.micros["ours"] == float("inf")
    with pytest.raises(RuntimeError, match="no kernel"):
        tuner(tmp_path / "b", {}).decide("op", {"eager": broken})
    with pytest.raises(ValueError, match="at least one alternative"):
        tuner(tmp_path / "b", {}).decide("op", {})


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"format_version": 99, "decisions": {}})])
def test_a_damaged_or_foreign_file_counts_as_empty(tmp_path, content):
    path = tmp_path / "tuned.json"
    path.write_text(content)
    assert tuner(path, {"eager": 1.0}).decide("op", {"eager": lambda: "eager"}).winner == "eager"


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        TuneConfig(rounds=0)


@pytest.mark.parametrize("winner", ["original", "fused"])
def test_a_tuned_module_uses_the_winner_and_leaves_gradients_alone(tmp_path, winner):

    model = nn.Sequential(nn.LayerNorm(16))
    order = iter([1.0, 2.0] * 100 if winner == "original" else [2.0, 1.0] * 100)

    def timer(work):
        work()
        return next(order)

    report = apply_fused_ops(
        model, "tuned", tuner=Autotuner(TuneConfig(path=tmp_path / "t.json"), timer=timer)
    )
    assert report.patched == 1
    x = torch.randn(3, 16, requires_grad=True)
    torch.manual_seed(4)
    want = torch.rand(1)
    torch.manual_seed(4)
    y = model(x)
    assert torch.equal(torch.rand(1), want)
    assert x.grad is None
    assert model[0].weight.grad is None
    assert torch.allclose(y, nn.functional.layer_norm(x, (16,)), atol=1e-5)
    (decision,) = report.tuner.decisions().values()
    assert decision.winner == winner
    name = type(y.grad_fn).__name__
    assert ("NativeLayerNorm" in name) == (winner == "original")
