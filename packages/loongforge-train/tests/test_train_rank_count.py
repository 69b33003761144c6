"""Resume with another number of ranks or workers: the rest of the epoch exactly once, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from loongforge.rank_testing import RankOutcome
from loongforge.records import read_metrics

pytest.importorskip("loongforge_data")

SCRIPT = """
import json, sys
import torch
torch.set_num_threads(1)
from loongforge.config import CheckpointConfig, PillarConfig, TrainConfig
from loongforge.errors import LoongForgeError
from loongforge.ranks import join
from loongforge.rng import seed_rank
from loongforge.runs import build_loader
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate

settings = json.loads(sys.argv[1])
data_on = settings.pop("data", "on")
unequal = settings.pop("unequal_draws", False)
length = settings.pop("length", 64)
ranks = join("cpu", timeout_s=60)
config = TrainConfig(
    **settings, learning_rate=1e-2, schedule="constant", control=False, log_interval=1000, probe_interval=0,
    pillars=PillarConfig(comm="off", data=data_on), checkpoint=CheckpointConfig(every=0),
)
seed_rank(0, ranks.rank)
if unequal:
    torch.rand(3 + 5 * ranks.rank)
data = ToyData(length)
source = BatchSource(build_loader(data, collate, config, ranks), fingerprint=data.fingerprint)
session = Session(config, build_parts(config, ToyModel(dropout=0.3), source, ranks))
seen, drawn = [], []
session.parts.recorder.listeners.append(lambda record, ids: seen.extend(i for group in ids for i in group))
resume = session.resume
def resumed():
    found = resume()
    drawn.extend(torch.get_rng_state()[:64].tolist())
    return found
session.resume = resumed
try:
    session.train()
    print(json.dumps({"ids": seen, "rng": drawn}))
except LoongForgeError as error:
    print(json.dumps({"error": str(error)}))
    ranks.close()
    sys.exit(error.exit_code)
ranks.close()
"""

Start = Callable[..., list[RankOutcome]]


def go(run_ranks: Start, run: Path, ranks: int, **settings: object) -> list[dict[str, list[int]]]:
    done = run_ranks(SCRIPT, json.dumps({"output": str(run), "epochs": 1, **settings}), ranks=ranks)
    assert {p.returncode for p in done} <= {0, 74}, done[0].stderr[-3000:]
    return [json.loads(p.stdout) for p in done]


def together(outcomes: list[dict[str, list[int]]]) -> list[int]:
    return [index for outcome in outcomes for index in outcome["ids"]]


@pytest.mark.parametrize(
    ("ranks", "batch_size", "workers", "steps"),
    [(1, 8, 3, 8), (4, 2, 0, 8), (2, 4, 1, 8), (1, 4, 2, 11), (3, 3, 0, 8), (2, 1, 0, 17)],
)
def test_the_rest_of_the_epoch_is_covered_once_by_other_ranks_and_workers(
    tmp_path: Path, run_ranks: Start, ranks: int, batch_size: int, workers: int, steps: int
) -> None:
    # Fault T21: 64 samples, 2 ranks x 2 workers stop at step 5, others go on; also with other batches.
    first = together(go(run_ranks, tmp_path, 2, steps=5, batch_size=4, workers=2))
    assert len(first) == 40
    rest = together(go(run_ranks, tmp_path, ranks, batch_size=batch_size, workers=workers))
    assert set(first + rest) == set(range(64))
    assert len(first + rest) - 64 < ranks, "the last batch is filled up to equal shares, nothing else repeats"
    assert [r["step"] for r in read_metrics(tmp_path, rank=0)] == list(range(1, steps + 1))


def test_data_that_changed_are_refused_on_other_ranks_with_the_way_out(
    tmp_path: Path, run_ranks: Start
) -> None:
    go(run_ranks, tmp_path, 2, steps=5, batch_size=4, workers=0)
    for outcome in go(run_ranks, tmp_path, 1, batch_size=4, workers=0, length=60):
        error = str(outcome["error"])
        assert "2 rank(s) wrote the checkpoint, 1 resume" in error
        assert "number of samples" in error
        assert "--allow-mismatch" in error
    afresh = together(go(run_ranks, tmp_path, 1, batch_size=4, workers=0, length=60, allow_mismatch=True))
    assert sorted(afresh) == list(range(60)), "the epoch starts afresh, and says so in the log"


def test_a_loader_without_a_position_is_refused_in_mid_epoch(tmp_path: Path, run_ranks: Start) -> None:
    go(run_ranks, tmp_path, 2, steps=5, batch_size=4, workers=0, data="off")
    refused = go(run_ranks, tmp_path, 1, batch_size=8, workers=0, data="off")
    assert "samples would repeat or be lost" in str(refused[0]["error"])


def test_every_rank_gets_its_own_random_state_back_and_new_ranks_get_others(
    tmp_path: Path, run_ranks: Start
) -> None:
    # Fault T15: ranks draw unequal numbers before the stop.
    settings = {"workers": 0, "unequal_draws": True}
    go(run_ranks, tmp_path / "a", 2, steps=5, batch_size=4, **settings)
    two = go(run_ranks, tmp_path / "a", 2, steps=6, batch_size=4, **settings)
    go(run_ranks, tmp_path / "b", 2, steps=5, batch_size=4, **settings)
    four = go(run_ranks, tmp_path / "b", 4, steps=6, batch_size=2, **settings)
    assert [o["rng"] for o in four[:2]] == [o["rng"] for o in two]
    assert len({tuple(o["rng"]) for o in four}) == 4
    go(run_ranks, tmp_path / "c", 2, steps=5, batch_size=4, **settings)
    again = go(run_ranks, tmp_path / "c", 4, steps=6, batch_size=2, **settings)
    assert [o["rng"] for o in again] == [o["rng"] for o in four], "new ranks' seeds are reproducible"
