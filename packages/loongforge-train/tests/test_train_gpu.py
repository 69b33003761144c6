"""The trainer on a GPU: no host sync in a step, skips on the device, late records, verification of every
pillar."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loongforge.config import CheckpointConfig, PillarConfig, TrainConfig
from loongforge.ranks import Ranks
from loongforge.records import read_metrics
from loongforge.rng import seed_rank
from loongforge.runs import build_loader
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.staging import stage
from loongforge.testing import ToyData, ToyModel, collate
from loongforge.verify import parse_toggles, verify
from torch import nn
from torch.utils.data import DataLoader

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def session(run: Path, *, data: ToyData | None = None, hidden: int = 512, **settings: object) -> Session:
    base: dict[str, object] = {
        "output": str(run),
        "steps": 20,
        "epochs": 50,
        "accumulation": 4,
        "learning_rate": 1e-3,
        "schedule": "constant",
        "checkpoint": CheckpointConfig(every=0),
        "log_interval": 1000,
    }
    config = TrainConfig(**{**base, **settings})
    torch.manual_seed(0)
    loader = DataLoader(data or ToyData(256), batch_size=8, shuffle=True, collate_fn=collate)
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cuda", 0))
    return Session(config, build_parts(config, ToyModel(hidden=hidden), BatchSource(loader), ranks))


@pytest.mark.parametrize("fused_optimizer", [False, True])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_step_never_waits_for_the_device(tmp_path: Path, schedule: str, fused_optimizer: bool) -> None:
    pillars = PillarConfig(fused_optimizer=fused_optimizer)
    one = session(tmp_path, probe_interval=0, schedule=schedule, pillars=pillars)
    for _ in range(5):
        one.engine.run_step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            one.engine.run_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_records_hold_device_times_and_memory(tmp_path: Path) -> None:
    session(tmp_path).train()
    records = read_metrics(tmp_path)
    assert [r["step"] for r in records] == list(range(1, 21))
    for record in records[2:]:
        assert record["forward_ms"] > 0
        assert record["backward_ms"] > 0
        assert record["mem_peak_bytes"] > 0
        parts = ("forward_ms", "backward_ms", "optimizer_ms", "h2d_ms")
        assert sum(record[name] for name in parts) <= record["step_ms"] * 1.05 + 0.1
    probed = [r for r in records if r["ops"] is not None]
    assert [r["step"] for r in probed] == [6]
    assert probed[0]["sync_count"] == 0, "the trainer itself makes no host sync"


def test_a_bad_step_is_skipped_on_the_device(tmp_path: Path) -> None:
    data = ToyData(256)
    data._x[17] = float("inf")
    one = session(tmp_path, data=data, epochs=1, steps=None)
    one.train()
    records = read_metrics(tmp_path)
    assert sum(bool(r["skipped"]) for r in records) == 1
    assert all(torch.isfinite(p).all() for p in one.parts.model.parameters())


def test_resume_on_the_gpu_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    whole = session(tmp_path / "whole")
    whole.train()
    session(tmp_path / "part", steps=9).train()
    rest = session(tmp_path / "part")
    assert rest.train().steps == 20
    first = [r["loss"] for r in read_metrics(tmp_path / "whole")]
    assert [r["loss"] for r in read_metrics(tmp_path / "part")] == pytest.approx(first, rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("pillars", [{"fuse": 4}, {"graph": True}, {"fuse": 4, "graph": True}])
def test_fusion_and_graphs_keep_the_losses(
    tmp_path: Path, pillars: dict[str, object], precision: str
) -> None:
    plain = session(tmp_path / "plain", precision=precision, steps=30)
    plain.train()
    fast = session(tmp_path / "fast", precision=precision, steps=30, pillars=PillarConfig(**pillars))
    fast.train()
    losses = [[r["loss"] for r in read_metrics(tmp_path / name)] for name in ("plain", "fast")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3 if precision == "fp32" else 3e-2)
    last = read_metrics(tmp_path / "fast")[-1]
    if "fuse" in pillars:
        assert last["fused"] is True, last["fusion_reason"]
    if "graph" in pillars:
        assert last["graph"] is True, last["graph_reason"]


@pytest.mark.parametrize("name", ["mem", "data", "fuse", "graph", "optimizer", "precision"])
def test_every_pillar_is_proven_equal(tmp_path: Path, name: str) -> None:
    def build(config: TrainConfig, ranks: Ranks) -> tuple[nn.Module, Callable[[], object]]:
        model = ToyModel(hidden=512)
        seed_rank(config.seed, ranks.rank)
        source = BatchSource(build_loader(ToyData(512), collate, config, ranks))
        return model, Session(config, build_parts(config, model, source, ranks)).train

    config = TrainConfig(
        steps=40,
        batch_size=4,
        accumulation=4,
        learning_rate=1e-3,
        workers=0,
        shuffle=False,
        log_interval=1000,
        output=str(tmp_path),
    )
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cuda", 0))
    _, results = verify(config, parse_toggles(name), ranks=ranks, build=build, folder=tmp_path)
    verdict = results[0][0]
    assert verdict.passed, verdict
    if name in {"fuse", "graph"}:
        assert verdict.active, verdict


def test_batches_copied_ahead_keep_the_losses_and_a_step_still_waits_for_nothing(tmp_path: Path) -> None:
    adfe = pytest.importorskip("loongforge_data")
    device = torch.device("cuda", 0)

    def run(name: str, depth: int) -> list[dict[str, object]]:
        model = ToyModel(hidden=512)
        seed_rank(0, 0)
        loader = adfe.ADFEDataLoader(
            ToyData(256), batch_size=8, shuffle=True, seed=3, collate_fn=collate, pin_memory=True
        )
        staged = stage(loader, model, device, seed=0, depth=depth)
        config = TrainConfig(
            output=str(tmp_path / name), steps=30, epochs=50, accumulation=4, schedule="constant",
            checkpoint=CheckpointConfig(every=0), log_interval=1000, probe_interval=0,
        )  # fmt: skip
        ranks = Ranks(rank=0, world_size=1, device=device)
        one = Session(config, build_parts(config, model, BatchSource(staged), ranks))
        if depth:
            for _ in range(5):
                one.engine.run_step()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                one.engine.run_step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        one.train()
        return read_metrics(tmp_path / name)

    plain, ahead = run("plain", 0), run("ahead", 2)
    known = {record["step"]: record["loss"] for record in plain}
    for record in ahead:
        assert record["loss"] == pytest.approx(known[record["step"]], rel=1e-5)
    assert ahead[-1]["data"]["device_batches"] >= 20
    assert ahead[-1]["data"]["device_prefetch"] == 2
    assert "device_prefetch" not in plain[-1]["data"]
