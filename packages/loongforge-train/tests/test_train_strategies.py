"""ZeRO-1, FSDP2 and HSDP on two Gloo ranks: the same numbers as DDP, the same checkpoint files, exact
resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loongforge.rank_testing import RankOutcome
from loongforge.records import read_metrics

SCRIPT = """
import json, logging, sys
logging.basicConfig(level=logging.INFO)
import torch
torch.set_num_threads(1)
from loongforge.config import CheckpointConfig, PillarConfig, TrainConfig
from loongforge.ranks import join
from loongforge.rng import seed_rank
from loongforge.runs import build_loader
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate

ranks = join("cpu", timeout_s=60)
for settings in json.loads(sys.argv[1]):
    config = TrainConfig(
        **settings, batch_size=4, accumulation=2, learning_rate=1e-2, control=False, probe_interval=0,
        pillars=PillarConfig(comm="off", data="off"), workers=0, checkpoint=CheckpointConfig(every=0),
    )
    seed_rank(0, ranks.rank)
    data = ToyData(80)
    model = ToyModel()
    source = BatchSource(build_loader(data, collate, config, ranks), fingerprint=data.fingerprint)
    Session(config, build_parts(config, model, source, ranks)).train()
ranks.close()
"""


@pytest.mark.parametrize("strategy", ["zero1", "fsdp2", "hsdp"])
def test_a_strategy_gives_the_numbers_of_ddp_and_resumes_exactly(
    tmp_path: Path, run_ranks: Callable[..., list[RankOutcome]], strategy: str
) -> None:
    def setting(name: str, kind: str, steps: int) -> dict[str, object]:
        return {
            "output": str(tmp_path / name),
            "strategy": kind,
            "steps": steps,
            "epochs": 9,
            "schedule": "constant",
        }

    runs = [
        setting("ddp", "ddp", 10),
        setting("whole", strategy, 10),
        setting("part", strategy, 6),
        setting("part", strategy, 10),
        setting("back", strategy, 6),
        setting("back", "ddp", 10),
    ]
    done = run_ranks(SCRIPT, json.dumps(runs))
    assert [p.returncode for p in done] == [0, 0], done[0].stderr[-3000:] + done[1].stderr[-3000:]

    def curve(name: str) -> list[object]:
        return [record["loss"] for record in read_metrics(tmp_path / name, rank=0)]

    assert curve("whole") == pytest.approx(curve("ddp"), rel=1e-5)
    assert curve("part") == curve("whole")
    assert curve("back") == pytest.approx(curve("ddp"), rel=1e-5)
    folder = sorted((tmp_path / "whole").glob("epoch_*"))[-1]
    reference = sorted((tmp_path / "ddp").glob("epoch_*"))[-1]
    ours = torch.load(folder / "model.pt", weights_only=True)
    theirs = torch.load(reference / "model.pt", weights_only=True)
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, atol=1e-5), name
    moments = [torch.load(f / "optimizer.pt", weights_only=True)["state"] for f in (folder, reference)]
    assert set(moments[0]) == set(moments[1])
    for name, values in moments[1].items():
        assert torch.allclose(moments[0][name]["exp_avg"], values["exp_avg"], atol=1e-5), name


@pytest.mark.parametrize("strategy", ["fsdp2", "hsdp"])
def test_sharding_in_bf16_leaves_the_numbers_of_a_batch_as_they_are(
    tmp_path: Path, run_ranks: Callable[..., list[RankOutcome]], strategy: str
) -> None:
    # Rounded to bfloat16, a flow time or a crop offset just below 1 becomes 1, which is out of range.
    script = SCRIPT.replace(
        "    model = ToyModel()\n",
        "    class Seen(ToyModel):\n"
        "        def forward(self, batch):\n"
        "            assert batch['noise'].dtype == batch['x'].dtype == torch.float32, batch['noise'].dtype\n"
        "            assert self.head.weight.dtype == torch.bfloat16, self.head.weight.dtype\n"
        "            return super().forward(batch)\n"
        "    model = Seen()\n",
    )
    setting = {"output": str(tmp_path), "strategy": strategy, "steps": 2, "precision": "bf16"}
    done = run_ranks(script, json.dumps([setting]))
    assert [p.returncode for p in done] == [0, 0], done[0].stderr[-3000:] + done[1].stderr[-3000:]
