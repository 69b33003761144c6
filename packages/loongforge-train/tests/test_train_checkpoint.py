"""Checkpoints: whole or not there, and found again with reasons."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loongforge.checkpoint import CheckpointWriter, find_newest, inspect, validate_checkpoint
from loongforge.checkpoint import write as writing
from loongforge.checkpoint.layout import COMPLETE, checkpoint_folders, read_manifest
from loongforge.checkpoint.state import take_snapshot
from loongforge.checkpoint.write import Snapshot
from loongforge.config import CheckpointConfig
from loongforge.errors import CheckpointError
from loongforge.session import Session
from loongforge.testing import ToyModel

Make = Callable[..., Session]


def snapshot(step: int, *, size: int = 1000, loss: float | None = None) -> Snapshot:
    generator = torch.Generator().manual_seed(step)
    return Snapshot(
        step=step,
        epoch=0,
        loss=loss,
        tensors={
            "model.pt": {"w": torch.randn(size, generator=generator)},
            "optimizer.pt": {"format": 1, "state": {}, "param_groups": []},
            "loongforge_state/rank_00000.pt": {"rng": {}, "data": {}},
        },
        texts={"loongforge_state/trainer.json": "{}"},
    )


def writer(run: Path, attempt: str = "a", **settings: object) -> CheckpointWriter:
    config = CheckpointConfig(background=False, **settings)
    return CheckpointWriter(run, rank=0, world_size=1, attempt=attempt, config=config)


def in_child(work: Callable[[], int]) -> int:
    """Run ``work`` in a forked child and return its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at(count: int) -> None:
    """End this process at the ``count``-th call that changes the disk."""
    left = [count]

    def wrap(module: object, name: str) -> None:
        real = getattr(module, name)

        def call(*arguments: object, **named: object) -> object:
            left[0] -= 1
            if left[0] <= 0:
                os._exit(42)
            return real(*arguments, **named)

        setattr(module, name, call)

    for name in ("write", "rename", "replace", "fsync", "mkdir"):
        wrap(os, name)
    wrap(writing, "_exchange")
    wrap(shutil, "rmtree")


@pytest.mark.parametrize("second", [2, 1], ids=["a new step", "the same step again"])
def test_a_kill_at_any_call_leaves_a_usable_checkpoint(tmp_path: Path, second: int) -> None:
    # Fault T01.
    reached = 0
    for count in range(1, 200):
        run = tmp_path / str(count)
        writer(run).write(snapshot(1))

        def work(count: int = count, run: Path = run) -> int:
            kill_at(count)
            writer(run, "b", keep_last=1).write(snapshot(second))
            return 0

        code = in_child(work)
        found = find_newest(run)
        assert found.folder is not None, f"killed at call {count}"
        assert read_manifest(found.folder).step in {1, second}
        weights = torch.load(found.folder / "model.pt", weights_only=True)["w"]
        assert torch.equal(weights, snapshot(read_manifest(found.folder).step).tensors["model.pt"]["w"])
        again = writer(run, "c", keep_last=1)
        again.clean()
        again.write(snapshot(3))
        assert [path.name for path in sorted(run.iterdir())] == ["epoch_0_step_3"]
        if code == 0:
            reached = count
            break
        assert code == 42
    assert reached > 20, "the write ended before enough kill points were tried"


def test_a_full_disk_says_no_space_and_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    # Fault T01: a file-size limit stands in for the full disk.
    writer(tmp_path).write(snapshot(1))

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            writer(tmp_path, "b").write(snapshot(2, size=1_000_000))
        except CheckpointError as error:
            return 0 if "no space" in str(error) and "intact" in str(error) else 1
        return 2

    assert in_child(work) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_0_step_1"]
    assert inspect(tmp_path / "epoch_0_step_1", checksums=True) is None


def test_search_takes_the_newest_complete_one_and_says_why_others_were_passed_over(tmp_path: Path) -> None:
    # Fault T02.
    for step in (10, 20, 30, 40):
        writer(tmp_path, keep_last=9).write(snapshot(step))
    (tmp_path / "epoch_0_step_20" / "optimizer.pt").unlink()
    model = tmp_path / "epoch_0_step_30" / "model.pt"
    model.write_bytes(model.read_bytes()[:-100])
    (tmp_path / "epoch_0_step_40" / COMPLETE).unlink()
    (tmp_path / "ckpt-abc").write_text("stray")
    (tmp_path / ".tmp_epoch_0_step_50_x").mkdir()
    found = find_newest(tmp_path)
    assert found.folder == tmp_path / "epoch_0_step_10"
    reasons = {path.name: reason for path, reason in found.passed_over}
    assert "optimizer.pt is missing" in reasons["epoch_0_step_20"]
    assert "bytes instead of" in reasons["epoch_0_step_30"]
    assert "no completeness marker" in reasons["epoch_0_step_40"]
    assert "a file" in reasons["ckpt-abc"]
    assert "unfinished" in reasons[".tmp_epoch_0_step_50_x"]


def test_one_flipped_bit_is_found_by_its_checksum(tmp_path: Path) -> None:
    writer(tmp_path).write(snapshot(1))
    path = tmp_path / "epoch_0_step_1" / "model.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert inspect(tmp_path / "epoch_0_step_1") is None
    assert "another checksum" in (inspect(tmp_path / "epoch_0_step_1", checksums=True) or "")


def test_an_explicit_path_to_a_bad_checkpoint_is_an_error_that_names_a_good_one(
    tmp_path: Path, session: Make
) -> None:
    # Fault T02.
    one = session(tmp_path, steps=4, checkpoint=CheckpointConfig(every=2, background=False))
    one.train()
    (tmp_path / "epoch_0_step_4" / "scheduler.pt").unlink()
    with pytest.raises(CheckpointError, match=r"scheduler.pt is missing.*epoch_0_step_2"):
        session(tmp_path, steps=6, resume=str(tmp_path / "epoch_0_step_4")).train()
    with pytest.raises(CheckpointError, match="does not exist"):
        session(tmp_path, steps=6, resume=str(tmp_path / "nowhere")).train()


def test_a_moved_run_resumes_and_finishes(tmp_path: Path, session: Make) -> None:
    # Fault T05: nothing in a checkpoint is an absolute path.
    session(tmp_path / "old", steps=4, checkpoint=CheckpointConfig(every=2, keep_best=1)).train()
    (tmp_path / "old").rename(tmp_path / "new")
    result = session(tmp_path / "new", steps=8).train()
    assert (result.steps, result.resumed_from) == (8, tmp_path / "new" / "epoch_0_step_4")


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, loss in enumerate([5.0, 1.0, 4.0, 3.0, 2.0, 9.0], start=1):
        writer(tmp_path, keep_last=2, keep_best=1).write(snapshot(step, loss=loss))
    assert [step for step, _, _ in sorted(checkpoint_folders(tmp_path))] == [2, 5, 6]


def test_retention_leaves_incomplete_ones_to_the_user(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        writer(tmp_path, keep_last=9).write(snapshot(step))
    (tmp_path / "epoch_0_step_3" / "model.pt").unlink()
    writer(tmp_path, keep_last=1).write(snapshot(4))
    assert [step for step, _, _ in sorted(checkpoint_folders(tmp_path))] == [3, 4]


def test_background_write_holds_the_state_of_its_step(tmp_path: Path, session: Make) -> None:
    one = session(tmp_path, steps=1)
    one.train()
    before = {name: value.clone() for name, value in one.parts.model.state_dict().items()}
    taken = take_snapshot(one.engine, one.config, loss=None)
    with torch.no_grad():
        for parameter in one.parts.model.parameters():
            parameter.fill_(77.0)
    out = CheckpointWriter(tmp_path / "b", rank=0, world_size=1, attempt="x", config=CheckpointConfig())
    out.write(taken)
    out.wait()
    stored = torch.load(tmp_path / "b" / "epoch_0_step_1" / "model.pt", weights_only=True)
    assert all(torch.equal(stored[name], value) for name, value in before.items())


def test_background_failure_is_raised_at_the_next_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = CheckpointWriter(tmp_path, rank=0, world_size=1, attempt="x", config=CheckpointConfig())

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "save_tensors", full)
    out.write(snapshot(1))
    with pytest.raises(CheckpointError, match="no space"):
        out.wait()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_never_writes_is_named(tmp_path: Path) -> None:
    config = CheckpointConfig(background=False, timeout_s=0.2)
    lonely = CheckpointWriter(tmp_path, rank=0, world_size=2, attempt="x", config=config)
    with pytest.raises(CheckpointError, match="rank 1 did not write its part"):
        lonely.write(snapshot(1))
    assert find_newest(tmp_path).folder is None


def test_a_write_whose_ranks_are_lost_ends_soon_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CheckpointConfig(timeout_s=600.0)
    left = CheckpointWriter(tmp_path, rank=0, world_size=2, attempt="x", config=config)
    left.write(snapshot(1))
    assert left.busy()
    left.hurry(0.2)
    with pytest.raises(CheckpointError, match="rank 1 did not write its part"):
        left.wait()
    assert "rank 1 did not write its part" in caplog.text
    assert not left.busy()


def test_validate_reports_files_model_and_what_to_do(tmp_path: Path, session: Make) -> None:
    session(tmp_path, steps=2).train()
    folder = tmp_path / "epoch_0_step_2"
    good = validate_checkpoint(folder, model=ToyModel())
    assert all(finding.ok for finding in good), good
    wrong = validate_checkpoint(folder, model=ToyModel(hidden=32))
    assert any(not f.ok and "of another shape" in f.detail and f.remedy for f in wrong)
    (folder / "scheduler.pt").write_bytes(b"")
    bad = validate_checkpoint(folder)
    assert any(not f.ok and "scheduler.pt has 0 bytes" in f.detail and "delete" in f.remedy for f in bad)
    assert not validate_checkpoint(tmp_path / "none")[0].ok
