"""An epoch's last, shorter window: filled to the shape of the others it replays their graph, exactly."""

from __future__ import annotations

import functools
import itertools
from dataclasses import asdict

import pytest
import torch
from loongforge.config import build_config
from loongforge.filling import WindowFiller, joined
from loongforge.recipes import get_recipe
from loongforge.runs import build_run

fuse = pytest.importorskip("loongforge_fuse")
synthetic = pytest.importorskip("loongforge_data.synthetic")
FULL, BORDER = 16, 6  # samples of a full window; the step that holds the epoch's last 10


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """90 samples: five windows of 4 x 4, and one of 4 + 4 + 2."""
    root = tmp_path_factory.mktemp("data") / "moving"
    synthetic.write_dataset(root, episodes=3, frames=30, cameras=1, size=(64, 80), seed=1)
    return root


@pytest.fixture
def _stand_in_graphs(monkeypatch):
    """Graphs on a CPU: the same keys, captures and fall-backs, replays re-execute."""
    emulated = functools.partial(fuse.GraphConfig, mode="emulated")
    monkeypatch.setattr(fuse, "GraphConfig", emulated)


def train(recording, tmp_path, *, steps=10, **pillars):
    """Return (records by step, final weights, the graph runner's counters)."""
    values = {
        "dataset": str(recording),
        "recipe": "gr00t_n1_6_tiny",
        "output": str(tmp_path / "run"),
        "steps": steps,
        "batch_size": 4,
        "accumulation": 4,
        "workers": 0,
        "device": "cpu",
        "control": False,
        "resume": "never",
        "checkpoint": {"every": 0},
        "pillars": {"comm": "off", "mem": "off", "fuse": 4, "graph": True, **pillars},
    }
    run = build_run(build_config(values))
    records = []
    run.session.parts.recorder.listeners.append(lambda record, _ids: records.append(record))
    try:
        while run.session.engine.at.step < steps and run.session.engine.run_step():
            pass
        run.session.parts.recorder.flush()
        executor = getattr(getattr(run.session.parts.runner, "fuser", None), "_executor", None)
        counters = asdict(executor.stats()) if executor is not None else {}
    finally:
        run.session.close()
    weights = {name: value.clone() for name, value in run.model.state_dict().items()}
    return records, weights, counters


@pytest.mark.usefixtures("_stand_in_graphs")
def test_the_last_window_of_an_epoch_replays_the_graph_of_the_others(recording, tmp_path):
    records, _, counters = train(recording, tmp_path)
    # Two warm-up runs of the one shape, one capture; nothing else ever runs eagerly.
    assert counters["captures"] == 1 and counters["recaptures"] == 0 and counters["moved"] == {}
    assert counters["eager"] == {"warm_up": 2} and counters["replays"] == 8
    assert [r.graph for r in records] == [False, False] + [True] * 8
    border = records[BORDER - 1]
    assert border.epoch == 0 and records[BORDER].epoch == 1
    assert (border.samples, border.filled_samples) == (10, 6)
    assert len(border.micro_losses) == 3
    assert sum(r.filled_samples for r in records) == 6


@pytest.mark.usefixtures("_stand_in_graphs")
def test_without_filling_every_epoch_has_an_eager_step_of_its_own_shape(recording, tmp_path):
    records, _, counters = train(recording, tmp_path, fill_windows=False)
    assert counters["eager"] == {"warm_up": 3}
    border = records[BORDER - 1]
    assert border.graph is False and border.graph_reason == "warm_up" and border.filled_samples == 0


@pytest.mark.usefixtures("_stand_in_graphs")
def test_filling_changes_neither_losses_nor_weights(recording, tmp_path):
    filled, weights, _ = train(recording, tmp_path / "a")
    plain, other, _ = train(recording, tmp_path / "b", fill_windows=False)
    eager, eager_weights, _ = train(recording, tmp_path / "c", graph=False, fuse="off")
    for one, two, three in zip(filled, plain, eager, strict=True):
        assert one.samples == two.samples == three.samples
        assert one.loss == pytest.approx(two.loss, rel=2e-6)
        assert one.loss == pytest.approx(three.loss, rel=1e-4)
        assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-4)
        assert one.micro_losses == pytest.approx(two.micro_losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(value, other[name], rtol=1e-3, atol=2e-5, msg=name)
        torch.testing.assert_close(value, eager_weights[name], rtol=1e-2, atol=2e-4, msg=name)


def gradients(model, batch, divisor):
    model.zero_grad(set_to_none=True)
    out = model(batch)
    (out["loss_sum"].sum() / divisor).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return out["loss_sum"].detach(), found


def test_added_samples_have_no_weight_in_loss_and_gradients(tiny_batch):
    model = get_recipe("gr00t_n1_6_tiny").build_model(get_recipe("gr00t_n1_6_tiny").options(), 0)
    divisor = float(model.loss_count(tiny_batch).sum())
    blank = model.blank(tiny_batch, 3)
    assert float(model.loss_count(blank).sum()) == 0
    whole = joined(tiny_batch, blank)
    assert all(value.shape[0] == 7 for value in whole.values() if isinstance(value, torch.Tensor))
    sums, plain = gradients(model, tiny_batch, divisor)
    more, with_blank = gradients(model, whole, divisor)
    torch.testing.assert_close(more[:4], sums, rtol=1e-5, atol=1e-5)
    assert (more[4:] == 0).all()
    for name, gradient in plain.items():
        torch.testing.assert_close(with_blank[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def parts(batch, sizes):
    ends = list(itertools.accumulate(sizes))
    return [
        {n: v[end - size : end] if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
        for size, end in zip(sizes, ends, strict=True)
    ]


def test_a_window_is_filled_only_after_a_full_one_and_never_cut(tiny_batch):
    model = get_recipe("gr00t_n1_6_tiny").build_model(get_recipe("gr00t_n1_6_tiny").options(), 0)
    filler = WindowFiller(model, batch_size=2, accumulation=2)
    short = parts(tiny_batch, [2, 1])
    assert filler.fill(short) == (short, 0)
    full = parts(tiny_batch, [2, 2])
    assert filler.fill(full) == (full, 0)
    window, added = filler.fill(short)
    assert added == 1 and [b["index"].shape[0] for b in window] == [2, 2]
    window, added = filler.fill(short[:1])
    assert added == 2 and len(window) == 2 and filler.windows == 2
    larger = [tiny_batch]
    assert filler.fill(larger) == (larger, 0)
    other = WindowFiller(torch.nn.Linear(1, 1), batch_size=2, accumulation=2)
    other.fill(full)
    assert other.fill(short) == (short, 0)
