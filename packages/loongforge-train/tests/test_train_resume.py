"""Resume: sample ids, losses and weights equal the uninterrupted run for every stop point."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from loongforge.config import CheckpointConfig, PillarConfig, TrainConfig
from loongforge.ranks import Ranks
from loongforge.records import read_metrics
from loongforge.rng import seed_rank
from loongforge.session import Result, Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate
from torch.utils.data import DataLoader


def one_rank() -> Ranks:
    return Ranks(rank=0, world_size=1, device=torch.device("cpu"))


def loader_for(data: ToyData, kind: str, batch_size: int, workers: int) -> object:
    if kind == "adfe":
        adfe = pytest.importorskip("loongforge_data")
        return adfe.ADFEDataLoader(
            data, batch_size=batch_size, shuffle=True, seed=3, collate_fn=collate, num_workers=workers
        )
    return DataLoader(data, batch_size=batch_size, shuffle=True, collate_fn=collate)


def run(
    out: Path,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    kind: str = "torch",
    length: int = 52,
    batch_size: int = 2,
    accumulation: int = 4,
    dropout: float = 0.3,
    fuse: int | str = "off",
    seen: list[list[int]] | None = None,
    sigterm_at: int | None = None,
    workers: int = 0,
    **more: object,
) -> tuple[Result, ToyModel]:
    config = TrainConfig(
        output=str(out),
        steps=steps,
        epochs=epochs,
        accumulation=accumulation,
        learning_rate=1e-2,
        schedule=str(more.pop("schedule", "constant")),
        control=False,
        ema_decay=0.9,
        pillars=PillarConfig(fuse=fuse),
        checkpoint=CheckpointConfig(every=0, background=False),
        **more,
    )
    model = ToyModel(dropout=dropout)
    seed_rank(0, 0)
    source = BatchSource(loader_for(ToyData(length), kind, batch_size, workers), fingerprint="toy")
    parts = build_parts(config, model, source, one_rank())
    session = Session(config, parts)
    if seen is not None:
        parts.recorder.listeners.append(lambda record, ids: seen.append([i for group in ids for i in group]))
    if sigterm_at is not None:
        parts.recorder.listeners.append(
            lambda record, ids: os.kill(os.getpid(), signal.SIGTERM) if record.step == sigterm_at else None
        )
    return session.train(), model


def losses(out: Path) -> list[tuple[int, object, object]]:
    return [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(out)]


@pytest.mark.parametrize("kind", ["torch", "adfe"])
def test_every_stop_point_over_three_epochs_equals_the_uninterrupted_run(tmp_path: Path, kind: str) -> None:
    # Faults T07, T08, T09, T10: 26 micro-batches an epoch, accumulation 4, so every 7th window holds 2.
    whole_ids: list[list[int]] = []
    whole, model = run(tmp_path / "whole", epochs=3, kind=kind, seen=whole_ids)
    assert whole.steps == 21
    assert [len(ids) for ids in whole_ids[:7]] == [8, 8, 8, 8, 8, 8, 4]
    for epoch in range(3):
        ids = [i for window in whole_ids[7 * epoch : 7 * epoch + 7] for i in window]
        assert sorted(ids) == list(range(52))
    for stop in range(1, 21):
        out = tmp_path / f"stop{stop}"
        ids: list[list[int]] = []
        run(out, steps=stop, epochs=3, kind=kind, seen=ids)
        result, resumed = run(out, epochs=3, kind=kind, seen=ids)
        assert result.resumed_from is not None
        assert ids == whole_ids, f"stopped after step {stop}"
        assert losses(out) == losses(tmp_path / "whole"), f"stopped after step {stop}"
        for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("fuse", ["off", 2, 4])
@pytest.mark.parametrize("kind", ["torch", "adfe"])
def test_sigterm_at_step_7_of_20_and_resume_gives_bit_equal_losses(
    tmp_path: Path, kind: str, fuse: int | str
) -> None:
    if fuse != "off":
        pytest.importorskip("loongforge_fuse")
    settings = {
        "steps": 20, "epochs": 9, "schedule": "cosine", "warmup_ratio": 0.2, "kind": kind, "fuse": fuse,
        "dropout": 0.3 if fuse == "off" else 0.0,
        "workers": 2 if kind == "adfe" and fuse == 2 else 0,
    }  # fmt: skip
    run(tmp_path / "whole", **settings)
    stopped, _ = run(tmp_path / "part", sigterm_at=7, **settings)
    assert (stopped.steps, stopped.exit_code) == (7, 143)
    resumed, _ = run(tmp_path / "part", **settings)
    assert (resumed.steps, resumed.exit_code) == (20, 0)
    assert losses(tmp_path / "whole") == losses(tmp_path / "part")
    assert [r["step"] for r in read_metrics(tmp_path / "part")] == list(range(1, 21))
