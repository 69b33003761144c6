"""Proof of equality: toggles pass, a planted difference is found, the table says what was compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loongforge.config import TrainConfig
from loongforge.errors import ConfigError
from loongforge.ranks import Ranks
from loongforge.rng import seed_rank
from loongforge.runs import build_loader
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate
from loongforge.verify import TOGGLES, Toggle, parse_toggles, plot, verdict_rows, verify
from torch import nn


def build(config: TrainConfig, ranks: Ranks) -> tuple[nn.Module, Callable[[], object]]:
    model = ToyModel()
    seed_rank(config.seed, ranks.rank)
    source = BatchSource(build_loader(ToyData(128), collate, config, ranks))
    session = Session(config, build_parts(config, model, source, ranks))
    return model, session.train


def setting(tmp_path: Path) -> tuple[TrainConfig, Ranks]:
    config = TrainConfig(
        steps=30,
        batch_size=4,
        accumulation=4,
        learning_rate=1e-2,
        output=str(tmp_path),
        workers=0,
        shuffle=False,
        log_interval=30,
    )
    return config, Ranks(rank=0, world_size=1, device=torch.device("cpu"))


@pytest.mark.parametrize("name", ["mem", "data", "fuse", "precision", "comm"])
def test_a_pillar_changes_nothing(tmp_path: Path, name: str) -> None:
    config, ranks = setting(tmp_path)
    _, results = verify(config, parse_toggles(name), ranks=ranks, build=build, folder=tmp_path)
    verdict = results[0][0]
    assert verdict.passed, verdict
    if name in {"mem", "data", "fuse"}:
        assert verdict.active


def test_a_real_difference_is_found_and_shown(tmp_path: Path) -> None:
    config, ranks = setting(tmp_path)

    def wrong(settings: TrainConfig) -> TrainConfig:
        return dataclasses.replace(settings, learning_rate=1.2e-2)

    toggle = Toggle(name="wrong", kind="reordered", change=wrong)
    reference, results = verify(config, [toggle, TOGGLES["fuse"]], ranks=ranks, build=build, folder=tmp_path)
    rows = verdict_rows([verdict for verdict, _ in results])
    assert [row[1] for row in rows] == ["verdict", "DIFFERS", "equal"]
    pytest.importorskip("matplotlib")
    plot(reference, results, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text().count("<path") > 3


def test_unknown_toggles_are_refused() -> None:
    with pytest.raises(ConfigError, match="toggle is magic: allowed are mem, data"):
        parse_toggles("mem,magic")
    with pytest.raises(ConfigError, match="toggle is empty"):
        parse_toggles(" ")
