"""The data position: the right batch comes next, and everything else comes back with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loongforge.config import CheckpointConfig, PillarConfig, TrainConfig
from loongforge.errors import CheckpointError
from loongforge.ranks import Ranks
from loongforge.records import read_metrics
from loongforge.rng import seed_rank
from loongforge.runs import build_loader
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate


def source(rank: int, data: str) -> BatchSource:
    config = TrainConfig(
        steps=1,
        batch_size=2,
        workers=0,
        seed=5,
        pillars=PillarConfig(data=data),  # type: ignore[arg-type]
    )
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    ranks.rank, ranks.world_size = rank, 2  # a loader of one of two ranks; nothing is sent here
    return BatchSource(build_loader(ToyData(10), collate, config, ranks), fingerprint="toy")


def take(of: BatchSource, count: int) -> list[list[int]]:
    """Take micro-batches over epoch borders."""
    taken: list[list[int]] = []
    while len(taken) < count:
        batch = of.next_micro_batch()
        if batch is None:
            of.next_epoch()
            continue
        taken.append(batch["index"].tolist())  # type: ignore[index]
    return taken


@pytest.mark.parametrize("data", ["on", "off"])
def test_ids_of_two_ranks_equal_the_uninterrupted_run_for_every_stop_point(data: str) -> None:
    # Fault T07: 10 samples, batch 2, 2 ranks: an epoch has 3 micro-batches a rank, the last one of 1 sample.
    if data == "on":
        pytest.importorskip("loongforge_data")
    whole = [take(source(rank, data), 9) for rank in (0, 1)]
    for epoch in range(3):
        ids = [i for rank in (0, 1) for batch in whole[rank][3 * epoch : 3 * epoch + 3] for i in batch]
        assert sorted(ids) == list(range(10)), "each sample once an epoch"
    for rank in (0, 1):
        for stop in range(1, 9):
            first = source(rank, data)
            begun = take(first, stop)
            state = first.state_dict()
            rest = source(rank, data)
            rest.load_state_dict(state)
            assert begun + take(rest, 9 - stop) == whole[rank], f"rank {rank} stopped after {stop}"


def run(out: Path, *, accumulation: int, steps: int | None = None, **settings: object) -> list[list[int]]:
    config = TrainConfig(
        **{
            "output": str(out),
            "steps": steps,
            "epochs": 2,
            "accumulation": accumulation,
            "learning_rate": 1e-2,
            "schedule": "cosine",
            "control": False,
            "log_interval": 1000,
            "checkpoint": CheckpointConfig(every=0, background=False),
            **settings,
        }
    )
    seed_rank(0, 0)
    data = ToyData(52)
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, collate_fn=collate)
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    parts = build_parts(config, ToyModel(dropout=0.2), BatchSource(loader, fingerprint="toy"), ranks)
    seen: list[list[int]] = []
    parts.recorder.listeners.append(lambda record, ids: seen.append([i for group in ids for i in group]))
    Session(config, parts).train()
    return seen


@pytest.mark.parametrize("stop", [5, 9])
def test_a_changed_accumulation_goes_on_with_the_right_micro_batch(
    tmp_path: Path, stop: int, caplog: pytest.LogCaptureFixture
) -> None:
    # Fault T08: 26 micro-batches an epoch, accumulation 4, then 2.
    whole = [i for window in run(tmp_path / "whole", accumulation=4) for i in window]
    begun = run(tmp_path / "part", accumulation=4, steps=stop)
    rest = run(tmp_path / "part", accumulation=2)
    assert [i for window in begun + rest for i in window] == whole
    assert {len(window) for window in rest} <= {4, 2}
    assert "accumulation was 4, is 2" in caplog.text


def test_scaler_schedule_and_average_come_back_with_the_rest(tmp_path: Path) -> None:
    # Fault T22: 10 steps against 5 and 5, with loss scale, cosine rate and moving average.
    settings = {"accumulation": 2, "precision": "fp16", "ema_decay": 0.9, "epochs": None}
    run(tmp_path / "whole", steps=10, **settings)
    run(tmp_path / "part", steps=10, checkpoint=CheckpointConfig(every=5, keep_last=9), **settings)
    for entry in (tmp_path / "part").glob("epoch_*_step_10"):
        entry.rename(tmp_path / entry.name)
    run(tmp_path / "part", steps=10, **settings)
    names = ("step", "loss", "grad_norm", "lr", "skipped")
    curves = [
        [tuple(r[n] for n in names) for r in read_metrics(tmp_path / run_)] for run_ in ("whole", "part")
    ]
    assert curves[0] == curves[1]
    folders = [next((tmp_path / name).glob("epoch_*_step_10")) for name in ("whole", "part")]
    for file in ("model.pt", "loongforge_state/average.pt", "loongforge_state/scaler.pt", "scheduler.pt"):
        one, two = (torch.load(folder / file, weights_only=True) for folder in folders)
        assert one.keys() == two.keys()
        for key, value in one.items():
            same = torch.equal(value, two[key]) if isinstance(value, torch.Tensor) else value == two[key]
            assert same, f"{file}: {key}"


def test_a_position_that_is_damaged_is_refused_by_name() -> None:
    state = source(0, "off").state_dict()
    del state["taken"]
    with pytest.raises(CheckpointError, match="lacks 'taken'"):
        source(0, "off").load_state_dict(state)
