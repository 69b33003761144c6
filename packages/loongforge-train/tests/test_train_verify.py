"""Proof of equality: toggles pass, a planted difference is found, the table says what was compared."""

from __future__ import annotations

import dataclasses
import inspect
import json
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loongforge.cli.verify import verify as verify_command
from loongforge.config import TrainConfig
from loongforge.errors import ConfigError
from loongforge.ranks import Ranks
from loongforge.rng import seed_rank
from loongforge.runs import build_loader
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate
from loongforge.verify import TOGGLES, Toggle, Verdict, parse_toggles, plot, verdict_rows, verify
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
    if name in {"mem", "data"}:
        assert (verdict.rule, verdict.loss, verdict.weights) == ("bit-exact", 0.0, 0.0)


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


def test_the_command_proves_every_pillar_unless_told_otherwise() -> None:
    asked = inspect.signature(verify_command).parameters["toggle"].default
    assert [toggle.name for toggle in parse_toggles(asked)] == list(TOGGLES)


class NoisyGpu:
    """A reference that differs from itself by about ``noise``, as atomic additions make it on a GPU."""

    def __init__(self, *, noise: float, shift: float = 0.0) -> None:
        self.noise, self.shift, self.runs = noise, shift, []

    def __call__(self, config: TrainConfig, ranks: Ranks) -> tuple[nn.Module, Callable[[], object]]:
        name = Path(config.output).name
        self.runs.append(name)
        generator = torch.Generator().manual_seed(len(self.runs))
        model = nn.Linear(3, 3, bias=False)

        def wobble() -> float:
            away = self.shift if name in TOGGLES else 0.0
            return 1.0 + away + self.noise * float(torch.rand((), generator=generator))

        def train() -> None:
            with torch.no_grad():
                model.weight.fill_(wobble())
            folder = Path(config.output)
            folder.mkdir(parents=True)
            rows = [
                {"step": step, "rank": 0, "loss": wobble(), "grad_norm": wobble(), "lr": 1e-2, "step_ms": 1.0}
                for step in range(1, 21)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

        return model, train


def on_gpu(tmp_path: Path, build: NoisyGpu, toggles: str = "mem,data,fuse") -> list[Verdict]:
    config, ranks = setting(tmp_path)
    ranks.device = types.SimpleNamespace(type="cuda")  # type: ignore[assignment]
    _, results = verify(config, parse_toggles(toggles), ranks=ranks, build=build, folder=tmp_path)
    return [verdict for verdict, _ in results]


def test_a_reference_that_does_not_repeat_is_the_measure_of_an_exact_pillar(tmp_path: Path) -> None:
    build = NoisyGpu(noise=1e-7)
    mem, data, fuse = on_gpu(tmp_path, build)
    assert build.runs == ["reference", "repeat_1", "repeat_2", "mem", "data", "fuse"]
    for verdict in (mem, data):
        assert verdict.passed, verdict
        assert verdict.rule == "3 x the difference of 3 runs of the reference"
        assert 0 < verdict.loss <= verdict.allowed_loss < 1e-6
    assert fuse.rule == "tolerance for reordered fp32"
    assert "3 x the difference" in verdict_rows([mem])[1][3]


def test_a_difference_beyond_the_repeats_is_found(tmp_path: Path) -> None:
    mem, data, fuse = on_gpu(tmp_path, NoisyGpu(noise=1e-7, shift=1e-5))
    assert not mem.passed
    assert not data.passed
    assert fuse.passed, "another order of sums may differ that much"


def test_a_reference_that_repeats_is_judged_bit_for_bit_on_any_device(tmp_path: Path) -> None:
    exact = on_gpu(tmp_path / "same", NoisyGpu(noise=0.0), "mem")
    assert (exact[0].passed, exact[0].rule) == (True, "bit-exact")
    off_by_a_bit = on_gpu(tmp_path / "other", NoisyGpu(noise=0.0, shift=1e-9), "mem")
    assert (off_by_a_bit[0].passed, off_by_a_bit[0].rule) == (False, "bit-exact")


def test_a_second_verification_in_the_same_folder_starts_afresh(tmp_path: Path) -> None:
    config, ranks = setting(tmp_path)
    for _ in range(2):
        reference, results = verify(config, parse_toggles("data"), ranks=ranks, build=build, folder=tmp_path)
        assert results[0][0].passed
        assert results[0][0].rule == "bit-exact"
        assert len(reference.losses) == 30
    (tmp_path / "kept.txt").write_text("not of a verification")


def test_runs_of_unequal_length_are_never_equal(tmp_path: Path) -> None:
    config, ranks = setting(tmp_path)
    short = Toggle(name="short", kind="rounded", change=lambda c: dataclasses.replace(c, steps=29))
    _, results = verify(config, [short], ranks=ranks, build=build, folder=tmp_path)
    assert not results[0][0].passed
    assert results[0][0].note == "29 steps instead of 30"
