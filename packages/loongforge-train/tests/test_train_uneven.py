"""Ranks whose loaders give different numbers of micro-batches: one decision, no hang, right weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loongforge.config import TrainConfig
from loongforge.engine import StepEngine
from loongforge.errors import DataExhaustedError
from loongforge.rank_testing import RankOutcome
from loongforge.ranks import Agreement, Ranks, Vote
from loongforge.records import read_metrics
from loongforge.session import build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate

SCRIPT = """
import json, sys
import torch
torch.set_num_threads(1)
from loongforge.config import CheckpointConfig, PillarConfig, TrainConfig
from loongforge.errors import LoongForgeError
from loongforge.ranks import join
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate

settings = json.loads(sys.argv[1])
batches = settings.pop("batches")
ranks = join("cpu", timeout_s=20)
data = ToyData(80)
loader = [collate([data[i] for i in ids]) for ids in batches[ranks.rank]]
config = TrainConfig(
    pillars=PillarConfig(comm="off"), checkpoint=CheckpointConfig(every=0), control=False,
    learning_rate=1e-2, schedule="constant", **settings
)
model = ToyModel()
try:
    result = Session(config, build_parts(config, model, BatchSource(loader), ranks)).train()
except LoongForgeError as error:
    print(json.dumps({"error": str(error)}))
    ranks.close()
    sys.exit(error.exit_code)
if ranks.rank == 0:
    torch.save(model.state_dict(), config.output + "/final.pt")
print(json.dumps({"steps": result.steps}))
ranks.close()
"""


def micro_batches(rank: int, count: int) -> list[list[int]]:
    return [[40 * rank + 4 * number + i for i in range(4)] for number in range(count)]


def test_seven_and_eight_micro_batches_give_the_weights_of_the_kept_samples(
    tmp_path: Path, run_ranks: Callable[..., list[RankOutcome]]
) -> None:
    first, second = micro_batches(0, 7), micro_batches(1, 8)
    two = {"output": str(tmp_path / "two"), "epochs": 2, "accumulation": 4, "batches": [first, second]}
    done = run_ranks(SCRIPT, json.dumps(two), timeout=90)
    assert [p.returncode for p in done] == [0, 0], done[0].stderr[-2000:] + done[1].stderr[-2000:]
    assert {json.loads(p.stdout)["steps"] for p in done} == {4}
    # The rank with eight drops its last one: an epoch is a window of 4 + 4 and one of 3 + 3.
    kept = [*first[:4], *second[:4], *first[4:7], *second[4:7]]
    one = {"output": str(tmp_path / "one"), "epochs": 2, "accumulation": 8, "batches": [kept]}
    alone = run_ranks(SCRIPT, json.dumps(one), ranks=1)
    assert alone[0].returncode == 0, alone[0].stderr
    reference = torch.load(tmp_path / "one" / "final.pt", weights_only=True)
    for name, value in torch.load(tmp_path / "two" / "final.pt", weights_only=True).items():
        assert torch.allclose(value, reference[name], atol=1e-5, rtol=0), name
    expected = [record["loss"] for record in read_metrics(tmp_path / "one")]
    for rank in (0, 1):
        losses = [record["loss"] for record in read_metrics(tmp_path / "two", rank=rank)]
        assert losses == pytest.approx(expected, abs=1e-5)


def test_a_rank_without_any_data_ends_all_ranks_with_the_same_error(
    tmp_path: Path, run_ranks: Callable[..., list[RankOutcome]]
) -> None:
    settings = {"output": str(tmp_path), "steps": 5, "batches": [micro_batches(0, 3), []]}
    done = run_ranks(SCRIPT, json.dumps(settings), timeout=90)
    assert [p.returncode for p in done] == [66, 66], done[0].stderr[-2000:] + done[1].stderr[-2000:]
    assert all("no optimizer step could ever happen" in json.loads(p.stdout)["error"] for p in done)


class Scripted(Ranks):
    """One rank that hears what it is told about the others."""

    def __init__(self, told: list[Agreement]) -> None:
        super().__init__(rank=0, world_size=1, device=torch.device("cpu"))
        self.told, self.votes_cast = told, []

    def agree(self, vote: Vote) -> Agreement:
        self.votes_cast.append(vote)
        return self.told.pop(0)


def test_stop_and_command_survive_the_second_vote(tmp_path: Path) -> None:
    def agreement(least: int, most: int, valid: float) -> Agreement:
        return Agreement(
            micro_batches=least, most=most, valid=valid, stop=True, failed=False, command=3, slowest_rank=1
        )

    data = ToyData(8)
    loader = [collate([data[i]]) for i in range(8)]
    config = TrainConfig(output=str(tmp_path), steps=1, accumulation=4, control=False)
    ranks = Scripted([agreement(2, 4, 99.0), agreement(2, 2, 16.0)])
    engine = StepEngine(build_parts(config, ToyModel(), BatchSource(loader), ranks))
    engine.at.commands.append(3)
    assert engine.run_step()
    first, second = ranks.votes_cast
    assert (first.micro_batches, second.micro_batches) == (4, 2)
    assert (second.stop, second.command) == (True, 3)
    assert engine.at.agreed is not None
    assert engine.at.agreed.valid == 16.0
    assert not engine.at.commands, "the command is carried by this step, not kept for the next"


def test_the_rank_with_fewest_votes_again_too(tmp_path: Path) -> None:
    def agreement(least: int, most: int) -> Agreement:
        return Agreement(
            micro_batches=least, most=most, valid=8.0, stop=False, failed=False, command=0, slowest_rank=0
        )

    data = ToyData(2)
    config = TrainConfig(output=str(tmp_path), steps=1, accumulation=4, control=False)
    ranks = Scripted([agreement(2, 4), agreement(2, 2)])
    source = BatchSource([collate([data[i]]) for i in range(2)])
    engine = StepEngine(build_parts(config, ToyModel(), source, ranks))
    assert engine.run_step()
    assert len(ranks.votes_cast) == 2


def test_no_window_in_two_epochs_is_an_error_on_one_rank_too(tmp_path: Path) -> None:
    config = TrainConfig(output=str(tmp_path), steps=1, accumulation=4, drop_ragged=True, control=False)
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    data = ToyData(3)
    source = BatchSource([collate([data[i]]) for i in range(3)])
    engine = StepEngine(build_parts(config, ToyModel(), source, ranks))
    with pytest.raises(DataExhaustedError, match="3 micro-batches on this rank and a step needs 4"):
        engine.run_step()
