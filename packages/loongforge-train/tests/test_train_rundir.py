"""A run directory never mixes two runs: it goes on, refuses, or moves the earlier files aside."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from loongforge.checkpoint import find_newest
from loongforge.config import CheckpointConfig, TrainConfig
from loongforge.errors import ConfigError
from loongforge.ranks import Ranks
from loongforge.records import read_metrics
from loongforge.session import Result, Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate
from torch.utils.data import DataLoader


def train(run: Path, *, steps: int, seed: int = 0, **settings: object) -> Result:
    config = TrainConfig(
        **{
            "output": str(run),
            "steps": steps,
            "batch_size": 8,
            "seed": seed,
            "control": False,
            "log_interval": 1000,
            "checkpoint": CheckpointConfig(every=2, keep_last=9, background=False),
            **settings,
        }
    )
    loader = DataLoader(ToyData(64), batch_size=8, collate_fn=collate)
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    return Session(config, build_parts(config, ToyModel(seed=seed), BatchSource(loader), ranks)).train()


def losses(run: Path) -> list[object]:
    return [record["loss"] for record in read_metrics(run)]


def test_a_fresh_run_in_a_used_directory_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    train(tmp_path, steps=6)
    before = losses(tmp_path)
    with pytest.raises(ConfigError) as caught:
        train(tmp_path, steps=3, seed=1, resume="never")
    text = str(caught.value)
    assert "3 checkpoint(s) (epoch_0_step_2, epoch_0_step_4, epoch_0_step_6) and 6 step record(s)" in text
    for way_out in ("--resume auto", "--output", "--earlier-run move"):
        assert way_out in text
    assert losses(tmp_path) == before
    assert train(tmp_path, steps=8).resumed_from == tmp_path / "epoch_0_step_6"


def test_the_earlier_run_can_be_moved_aside_whole(tmp_path: Path) -> None:
    train(tmp_path, steps=6)
    before = losses(tmp_path)
    for number in (1, 2):
        train(tmp_path, steps=3, seed=1, resume="never", earlier_run="move")
        assert len(losses(tmp_path)) == 3
        newest = find_newest(tmp_path).folder
        assert newest is not None
        assert newest.name == "epoch_0_step_3"
        assert (tmp_path / f"earlier-{number}" / "metrics.jsonl").exists()
    assert losses(tmp_path / "earlier-1") == before
    assert find_newest(tmp_path / "earlier-1").folder == tmp_path / "earlier-1" / "epoch_0_step_6"
    assert train(tmp_path, steps=5, seed=1).resumed_from == tmp_path / "epoch_0_step_3"


def test_records_of_a_run_that_died_before_its_first_checkpoint_are_kept_beside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, steps=4)
    for folder in tmp_path.glob("epoch_*"):
        (folder / "model.pt").unlink()
    with caplog.at_level(logging.WARNING):
        result = train(tmp_path, steps=2)
    assert result.resumed_from is None
    assert len(losses(tmp_path)) == 2
    assert len((tmp_path / "metrics.1.jsonl").read_text().splitlines()) == 4
    assert "4 earlier records are kept in metrics.1.jsonl" in caplog.text


def test_a_damaged_later_checkpoint_does_not_stop_a_resume_and_is_written_again(tmp_path: Path) -> None:
    train(tmp_path, steps=6)
    (tmp_path / "epoch_0_step_6" / "model.pt").unlink()
    result = train(tmp_path, steps=8)
    assert result.resumed_from == tmp_path / "epoch_0_step_4"
    assert (tmp_path / "epoch_0_step_6" / "model.pt").exists()
    assert len(losses(tmp_path)) == 8


def test_going_back_to_an_older_checkpoint_does_not_leave_the_newer_ones_in_the_way(tmp_path: Path) -> None:
    train(tmp_path, steps=6)
    older = str(tmp_path / "epoch_0_step_2")
    with pytest.raises(ConfigError, match=r"2 checkpoint\(s\) \(epoch_0_step_4, epoch_0_step_6\)"):
        train(tmp_path, steps=3, resume=older)
    train(tmp_path, steps=3, resume=older, earlier_run="move")
    assert sorted(path.name for path in (tmp_path / "earlier-1").iterdir()) == [
        "epoch_0_step_4", "epoch_0_step_6",
    ]  # fmt: skip
    assert train(tmp_path, steps=4).resumed_from == tmp_path / "epoch_0_step_3"


def test_a_run_that_starts_from_another_runs_checkpoint_does_not_mix_either(tmp_path: Path) -> None:
    train(tmp_path / "first", steps=2)
    train(tmp_path / "second", steps=2, seed=1)
    start = str(tmp_path / "first" / "epoch_0_step_2")
    with pytest.raises(ConfigError, match="would mix with it"):
        train(tmp_path / "second", steps=4, resume=start)
    result = train(tmp_path / "third", steps=4, resume=start)
    assert (result.steps, result.resumed_from) == (4, tmp_path / "first" / "epoch_0_step_2")
