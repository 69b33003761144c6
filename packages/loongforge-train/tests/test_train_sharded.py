"""Sharded checkpoints of two Gloo ranks: every rank writes its part, and any strategy reads them again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loongforge.checkpoint import find_newest, inspect, validate_checkpoint
from loongforge.checkpoint.layout import read_manifest
from loongforge.checkpoint.sharded import read_whole, stored_tensors
from loongforge.checkpoint.state import load_average, load_weights
from loongforge.config import CheckpointConfig, TrainConfig
from loongforge.errors import ConfigError
from loongforge.rank_testing import RankOutcome
from loongforge.records import read_metrics
from loongforge.testing import ToyModel

Start = Callable[..., list[RankOutcome]]

SCRIPT = """
import json, logging, os, sys
logging.basicConfig(level=logging.INFO)
import torch
torch.set_num_threads(1)
from loongforge.checkpoint import sharded
from loongforge.config import CheckpointConfig, PillarConfig, TrainConfig
from loongforge.errors import LoongForgeError
from loongforge.ranks import join
from loongforge.rng import seed_rank
from loongforge.runs import build_loader
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate

plan = json.loads(sys.argv[1])
ranks = join("cpu", timeout_s=60)


def die(*arguments, **named):
    os._exit(9)


def full(*arguments, **named):
    raise OSError(28, "No space left on device")


def spoil(session, step):
    if step in (plan.get("die_at"), plan.get("full_at")):
        session.writer.wait()
    from torch.distributed.checkpoint import FileSystemWriter
    if plan.get("die_at") == step and ranks.rank == 1:
        sharded.checksum = die
    if plan.get("full_at") == step and ranks.rank == 1:
        FileSystemWriter.write_data = full


for settings in plan["runs"]:
    fuse, graph = settings.pop("fuse", "off"), settings.pop("graph", False)
    pillars = PillarConfig(comm="off", data=settings.pop("data", "off"), fuse=fuse, graph=graph)
    every = settings.pop("every", 0)
    layout = settings.pop("layout", "sharded" if settings["strategy"] in {"fsdp2", "hsdp"} else "whole")
    checkpoint = CheckpointConfig(every=every, layout=layout, keep_last=9, timeout_s=20, failures_allowed=9)
    config = TrainConfig(
        **settings, batch_size=4, accumulation=2, learning_rate=1e-2, control=False, probe_interval=0,
        ema_decay=0.9, schedule="constant", epochs=9, pillars=pillars, workers=0, checkpoint=checkpoint,
    )
    seed_rank(0, ranks.rank)
    data = ToyData(80)
    model = ToyModel(hidden=17)
    source = BatchSource(build_loader(data, collate, config, ranks), fingerprint=data.fingerprint)
    session = Session(config, build_parts(config, model, source, ranks))
    session.parts.recorder.listeners.append(lambda record, ids: spoil(session, record.step))
    try:
        session.train()
    except LoongForgeError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        ranks.close()
        sys.exit(error.exit_code)
ranks.close()
"""


def setting(run: Path, strategy: str, steps: int, **more: object) -> dict[str, object]:
    return {"output": str(run), "strategy": strategy, "steps": steps, **more}


def go(run_ranks: Start, *runs: dict[str, object], ranks: int = 2, **plan: object) -> list[RankOutcome]:
    return run_ranks(SCRIPT, json.dumps({"runs": list(runs), **plan}), ranks=ranks)


def fine(outcomes: list[RankOutcome]) -> None:
    assert {p.returncode for p in outcomes} == {0}, "\n".join(p.stderr[-2500:] for p in outcomes)


def newest(run: Path) -> Path:
    folder = find_newest(run).folder
    assert folder is not None
    return folder


def curve(run: Path) -> list[object]:
    return [record["loss"] for record in read_metrics(run, rank=0)]


def test_sharded_ranks_fuse_their_micro_batches_and_leave_graphs_aside(
    tmp_path: Path, run_ranks: Start
) -> None:
    plain, fused = tmp_path / "plain", tmp_path / "fused"
    done = go(
        run_ranks,
        setting(plain, "fsdp2", 5),
        setting(fused, "fsdp2", 5, fuse="auto", graph=True),
    )
    fine(done)
    assert "strategy fsdp2 gathers weights anew" in done[0].stderr
    assert curve(fused) == pytest.approx(curve(plain), rel=1e-5)
    assert all(record["fused"] for record in read_metrics(fused, rank=0))


@pytest.mark.parametrize("strategy", ["fsdp2", "hsdp"])
def test_shards_resume_exactly_and_under_ddp(tmp_path: Path, run_ranks: Start, strategy: str) -> None:
    names = ("ddp", "whole", "part", "back")
    ddp, whole, part, back = (tmp_path / name for name in names)
    fine(
        go(
            run_ranks,
            setting(ddp, "ddp", 10),
            setting(whole, strategy, 10),
            setting(part, strategy, 6),
            setting(part, strategy, 10),
            setting(back, strategy, 6),
            setting(back, "ddp", 10),
        )
    )
    assert curve(whole) == pytest.approx(curve(ddp), rel=1e-5)
    assert curve(part) == curve(whole)
    assert curve(back) == pytest.approx(curve(ddp), rel=1e-5)
    folder = newest(whole)
    files = read_manifest(folder).files
    assert {"sharded/.metadata", "sharded/__0_0.distcp", "sharded/__1_0.distcp"} <= set(files)
    assert "model.pt" not in files
    assert inspect(folder, checksums=True) is None
    reference = newest(ddp)
    for name, value in load_weights(reference).items():
        assert torch.allclose(load_weights(folder)[name], value, atol=1e-5), name
    averages, expected = load_average(folder), load_average(reference)
    assert averages is not None
    assert expected is not None
    for name, value in expected.items():
        assert torch.allclose(averages[name], value, atol=1e-5), name
    assert all(finding.ok for finding in validate_checkpoint(folder, model=ToyModel(hidden=17)))
    wrong = validate_checkpoint(folder, model=ToyModel(hidden=32))
    assert any(not finding.ok and "of another shape" in finding.detail for finding in wrong)


def test_shards_of_two_ranks_go_on_with_three_and_with_one(tmp_path: Path, run_ranks: Start) -> None:
    # Three ranks of four samples are another global batch than two: the rest of the epoch is dealt anew.
    def moved(before: Path) -> float:
        old, new = load_weights(before), load_weights(newest(tmp_path))
        return max(float((old[name] - new[name]).abs().max()) for name in old)

    fine(go(run_ranks, setting(tmp_path, "fsdp2", 10, data="on")))
    by_two = newest(tmp_path)
    fine(go(run_ranks, setting(tmp_path, "fsdp2", 11, data="on"), ranks=3))
    assert [r["step"] for r in read_metrics(tmp_path, rank=2)] == [11]
    assert 0 < moved(by_two) < 0.02, "one step of Adam at rate 0.01 from the weights of two ranks"
    by_three = newest(tmp_path)
    assert {"sharded/__2_0.distcp"} <= set(read_manifest(by_three).files)
    fine(go(run_ranks, setting(tmp_path, "ddp", 12, data="on"), ranks=1))
    assert 0 < moved(by_three) < 0.02
    assert [r["step"] for r in read_metrics(tmp_path, rank=0)] == list(range(1, 13))


def test_only_tensors_are_stored_and_a_plain_tool_reads_them(tmp_path: Path, run_ranks: Start) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    fine(go(run_ranks, setting(tmp_path, "fsdp2", 2)))
    folder = tmp_path / "epoch_0_step_2"
    names = stored_tensors(folder)
    assert {name.split("/")[0] for name in names} == {"model", "optimizer", "average"}
    assert names["model/body.0.weight"][0] == (17, 6)
    dcp_to_torch_save(folder / "sharded", tmp_path / "one.pt")
    plain = torch.load(tmp_path / "one.pt", weights_only=True)
    whole = read_whole(folder)
    assert set(plain) == set(whole)
    assert all(torch.equal(plain[name], whole[name]) for name in whole)


def test_a_rank_killed_in_the_write_leaves_the_checkpoint_before(tmp_path: Path, run_ranks: Start) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    fine(go(run_ranks, setting(whole, "fsdp2", 10)))
    killed = go(run_ranks, setting(part, "fsdp2", 10, every=3), die_at=5)
    assert killed[1].returncode == 9
    found = find_newest(part)
    assert found.folder == part / "epoch_0_step_3"
    fine(go(run_ranks, setting(part, "fsdp2", 10, every=3)))
    assert curve(part) == curve(whole)
    assert not list(part.glob(".tmp_*"))


def test_a_full_disk_on_one_rank_is_told_by_all_and_older_ones_stay(tmp_path: Path, run_ranks: Start) -> None:
    done = go(run_ranks, setting(tmp_path, "fsdp2", 10, every=3), full_at=4)
    assert {p.returncode for p in done} == {74}, done[0].stderr[-2000:]
    for outcome in done:
        assert "no space for checkpoint" in json.loads(outcome.stdout)["error"]
        assert "intact" in outcome.stdout
    assert find_newest(tmp_path).folder == tmp_path / "epoch_0_step_3"
    assert [r["step"] for r in read_metrics(tmp_path, rank=0)] == list(range(1, 11))


def test_the_layout_needs_a_sharded_strategy() -> None:
    with pytest.raises(ConfigError, match=r"layout is sharded with strategy ddp.*allowed is whole"):
        TrainConfig(steps=1, checkpoint=CheckpointConfig(layout="sharded"))
