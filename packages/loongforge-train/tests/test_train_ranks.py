"""Two ranks: same weights as one rank with twice the batch, one decision about everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loongforge.rank_testing import RankOutcome
from loongforge.records import read_metrics

Start = Callable[..., list[RankOutcome]]

SCRIPT = """
import json, logging, os, signal, sys
logging.basicConfig(level=logging.INFO)
import torch
torch.set_num_threads(1)
from loongforge.config import CheckpointConfig, GuardConfig, PillarConfig, TrainConfig
from loongforge.ranks import join
from loongforge.rng import seed_rank
from loongforge.runs import build_loader
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate

settings = json.loads(sys.argv[1])
extra = settings.pop("extra", {})
pillars = PillarConfig(**settings.pop("pillars", {}))
config = TrainConfig(
    pillars=pillars, checkpoint=CheckpointConfig(**settings.pop("checkpoint", {"every": 0})),
    guards=GuardConfig(**settings.pop("guards", {})), control=False, **settings
)
ranks = join("cpu", timeout_s=60)
seed_rank(config.seed, ranks.rank)
data = ToyData(extra.get("length", 80))
if "nan_at" in extra and ranks.rank == extra.get("nan_rank", 1):
    data._x[extra["nan_at"]] = float("nan")
model = ToyModel(dropout=extra.get("dropout", 0.0))
loader = build_loader(data, collate, config, ranks)
parts = build_parts(config, model, BatchSource(loader, fingerprint=data.fingerprint), ranks)
session = Session(config, parts)
if "kill" in extra and ranks.rank == extra["kill"][0]:
    parts.recorder.listeners.append(
        lambda r, ids: os.kill(os.getpid(), extra["kill"][2]) if r.step == extra["kill"][1] else None
    )
result = session.train()
if ranks.rank == 0:
    torch.save(model.state_dict(), config.output + "/final.pt")
print(json.dumps({"steps": result.steps, "skipped": parts.guard.skipped_total}))
ranks.close()
sys.exit(result.exit_code)
"""


def start(run_ranks: Start, out: Path, ranks: int, **settings: object) -> list[RankOutcome]:
    arguments = {"workers": 0, "output": str(out), "learning_rate": 1e-2, "schedule": "constant", **settings}
    return run_ranks(SCRIPT, json.dumps(arguments), ranks=ranks)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "final.pt", weights_only=True)


@pytest.mark.parametrize(
    "pillars", [{"comm": "off"}, {"comm": "hybrid"}, {"comm": "simple"}, {"comm": "off", "data": "off"}]
)
def test_two_ranks_equal_one_rank_with_twice_the_batch(
    tmp_path: Path, run_ranks: Start, pillars: dict[str, str]
) -> None:
    if pillars["comm"] != "off":
        comm = pytest.importorskip("loongforge_comm")
        if not hasattr(comm, "GradientScheduler"):
            pytest.skip("loongforge_comm has no GradientScheduler yet")
    both = start(run_ranks, tmp_path / "two", 2, steps=10, batch_size=4, accumulation=2, pillars=pillars)
    assert [p.returncode for p in both] == [0, 0], both[0].stderr + both[1].stderr
    one = start(run_ranks, tmp_path / "one", 1, steps=10, batch_size=8, accumulation=2, pillars=pillars)
    assert one[0].returncode == 0, one[0].stderr
    for name, value in weights(tmp_path / "one").items():
        assert torch.allclose(value, weights(tmp_path / "two")[name], atol=1e-5, rtol=0), name
    single = [r["loss"] for r in read_metrics(tmp_path / "one")]
    for rank in (0, 1):
        records = read_metrics(tmp_path / "two", rank=rank)
        assert [r["loss"] for r in records] == pytest.approx(single, abs=1e-5)
        assert [r["lr"] for r in records] == [r["lr"] for r in read_metrics(tmp_path / "one")]


def test_sigterm_to_one_rank_stops_all_at_one_step_and_resume_equals_uninterrupted(
    tmp_path: Path, run_ranks: Start
) -> None:
    settings = {"steps": 14, "batch_size": 4, "accumulation": 2, "pillars": {"comm": "off"}}
    whole = start(run_ranks, tmp_path / "whole", 2, **settings, extra={"dropout": 0.3})
    assert [p.returncode for p in whole] == [0, 0], whole[0].stderr
    part = start(run_ranks, tmp_path / "part", 2, **settings, extra={"kill": [1, 5, 15], "dropout": 0.3})
    assert [p.returncode for p in part] == [143, 143], part[0].stderr
    stopped = {json.loads(p.stdout)["steps"] for p in part}
    assert len(stopped) == 1
    assert 5 <= stopped.pop() <= 7
    rest = start(run_ranks, tmp_path / "part", 2, **settings, extra={"dropout": 0.3})
    assert [p.returncode for p in rest] == [0, 0], rest[0].stderr
    for rank in (0, 1):
        expected = [
            (r["step"], r["loss"], r["micro_losses"]) for r in read_metrics(tmp_path / "whole", rank=rank)
        ]
        assert [
            (r["step"], r["loss"], r["micro_losses"]) for r in read_metrics(tmp_path / "part", rank=rank)
        ] == expected


def test_nan_on_one_rank_is_skipped_by_all_and_weights_stay_equal(tmp_path: Path, run_ranks: Start) -> None:
    # Fault T19.
    done = start(
        run_ranks, tmp_path, 2, steps=12, batch_size=4, accumulation=2, pillars={"comm": "off"},
        extra={"nan_at": 13, "nan_rank": 1},
    )  # fmt: skip
    assert [p.returncode for p in done] == [0, 0], done[0].stderr
    counts = [json.loads(p.stdout)["skipped"] for p in done]
    assert counts[0] == counts[1] > 0
    assert all(torch.isfinite(value).all() for value in weights(tmp_path).values())
    first, second = (read_metrics(tmp_path, rank=rank) for rank in (0, 1))
    assert [r["skipped"] for r in first] == [r["skipped"] for r in second]
    assert [r["grad_norm"] for r in first] == [r["grad_norm"] for r in second]


def test_missing_shard_of_one_rank_is_passed_over_by_all(tmp_path: Path, run_ranks: Start) -> None:
    # Fault T03.
    settings = {"batch_size": 4, "pillars": {"comm": "off"}, "checkpoint": {"every": 2, "keep_last": 5}}
    done = start(run_ranks, tmp_path, 2, steps=6, **settings)
    assert [p.returncode for p in done] == [0, 0], done[0].stderr
    (tmp_path / "epoch_0_step_6" / "loongforge_state" / "rank_00001.pt").unlink()
    again = start(run_ranks, tmp_path, 2, steps=8, **settings)
    assert [p.returncode for p in again] == [0, 0], again[0].stderr
    assert "passed over epoch_0_step_6: loongforge_state/rank_00001.pt is missing" in again[0].stderr
    assert "epoch_0_step_4 at step 4" in again[0].stderr
    assert {json.loads(p.stdout)["steps"] for p in again} == {8}


def test_ranks_with_other_settings_are_refused_with_both_values(tmp_path: Path, run_ranks: Start) -> None:
    script = """
import os, sys
from loongforge.ranks import join
from loongforge.errors import LoongForgeError
ranks = join("cpu", timeout_s=30)
try:
    ranks.require_equal("the seed", str(ranks.rank))
except LoongForgeError as error:
    print(error); ranks.close(); sys.exit(error.exit_code)
"""
    done = run_ranks(script)
    assert [p.returncode for p in done] == [76, 76]
    assert "rank 0 has '0', rank 1 has '1'" in done[1].stdout
