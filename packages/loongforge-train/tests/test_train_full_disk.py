"""A disk that is full for a while costs records and checkpoints of that time, never the run."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from loongforge.checkpoint import find_newest
from loongforge.config import CheckpointConfig, TrainConfig
from loongforge.errors import CheckpointError
from loongforge.ranks import Ranks
from loongforge.records import StepRecord, read_metrics
from loongforge.session import Session, build_parts
from loongforge.sinks.jsonl import JsonlSink
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("mounting a small tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


def fill(folder: Path) -> Path:
    """Take all that is left of a disk."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as stream:
        for size in (65_536, 4096, 512, 1):
            try:
                while True:
                    stream.write(b"x" * size)
            except OSError:
                continue
    return filler


def session(run: Path, **checkpoint: object) -> Session:
    data = ToyData(64)
    loader = [collate([data[8 * n + i] for i in range(8)]) for n in range(8)]
    config = TrainConfig(
        output=str(run),
        steps=24,
        control=False,
        log_interval=1000,
        checkpoint=CheckpointConfig(**{"every": 4, "background": False, "failures_allowed": 9, **checkpoint}),
    )
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    return Session(config, build_parts(config, ToyModel(hidden=256), BatchSource(loader), ranks))


def test_a_run_outlives_a_disk_that_is_full_for_a_while(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = session(small_disk / "run")
    filler: list[Path] = []

    def disturb(record: StepRecord, ids: object) -> None:
        if record.step == 9:
            filler.append(fill(small_disk))
        if record.step == 18:
            filler.pop().unlink()

    one.parts.recorder.listeners.append(disturb)
    with caplog.at_level(logging.WARNING):
        result = one.train()
    assert result.steps == 24
    assert result.checkpoint == small_disk / "run" / "epoch_2_step_24"
    assert "no space for checkpoint" in caplog.text
    assert "step records are dropped until there is room" in caplog.text
    for line in (small_disk / "run" / "metrics.jsonl").read_text().splitlines():
        if line.strip():
            try:
                json.loads(line)
            except ValueError:
                assert caplog.text.count("no space for a whole line") >= 1
    steps = [record["step"] for record in read_metrics(small_disk / "run")]
    assert set(range(1, 9)) <= set(steps)
    assert set(range(20, 25)) <= set(steps)
    assert not {12, 16} & set(steps)


def test_a_disk_that_stays_full_ends_the_run_with_its_reason_and_the_older_checkpoint(
    small_disk: Path,
) -> None:
    one = session(small_disk / "run", failures_allowed=1)
    one.parts.recorder.listeners.append(lambda record, ids: fill(small_disk) if record.step == 9 else None)
    with pytest.raises(CheckpointError, match=r"no space for checkpoint epoch_\d_step_16.*0 MiB are free"):
        one.train()
    assert find_newest(small_disk / "run").folder == small_disk / "run" / "epoch_0_step_8"
    assert not list((small_disk / "run").glob(".tmp_*"))


def test_a_line_that_was_cut_does_not_spoil_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JsonlSink(tmp_path)
    real = os.write

    def cut(descriptor: int, data: bytes) -> int:
        return real(descriptor, data[: len(data) // 2])

    for step in (1, 2, 3):
        with monkeypatch.context() as patch:
            if step == 2:
                patch.setattr(os, "write", cut)
            sink.write(StepRecord(step=step, epoch=0, rank=0, time_unix=0.0))
    sink.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 3]
    assert sink.dropped == 1
