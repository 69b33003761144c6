"""Checkpoints: whole or not there, found again with reasons, restored part by part."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from loongforge.checkpoint import CheckpointWriter, find_newest, inspect, validate_checkpoint
from loongforge.checkpoint import write as writing
from loongforge.checkpoint.layout import COMPLETE, checkpoint_folders, load_tensors, read_manifest
from loongforge.checkpoint.state import PARTS, host_copy, take_snapshot
from loongforge.checkpoint.write import Snapshot, load_safetensors
from loongforge.config import CheckpointConfig, TrainConfig
from loongforge.errors import CheckpointError
from loongforge.optim import load_named_state, named_state
from loongforge.ranks import Ranks
from loongforge.rng import capture_rng, mix, restore_rng, sample_generators
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate
from torch import nn
from torch.utils.data import DataLoader


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


def session(run: Path, *, model: nn.Module | None = None, length: int = 64, **settings: object) -> Session:
    config = TrainConfig(
        **{
            "output": str(run),
            "epochs": 2,
            "batch_size": 8,
            "schedule": "cosine",
            "control": False,
            **settings,
        }
    )
    torch.manual_seed(0)
    data = ToyData(length)
    loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate)
    source = BatchSource(loader, fingerprint=data.fingerprint)
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    return Session(config, build_parts(config, model or ToyModel(), source, ranks))


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


def test_an_explicit_path_to_a_bad_checkpoint_is_an_error_that_names_a_good_one(tmp_path: Path) -> None:
    # Fault T02.
    one = session(tmp_path, steps=4, checkpoint=CheckpointConfig(every=2, background=False))
    one.train()
    (tmp_path / "epoch_0_step_4" / "scheduler.pt").unlink()
    with pytest.raises(CheckpointError, match=r"scheduler.pt is missing.*epoch_0_step_2"):
        session(tmp_path, steps=6, resume=str(tmp_path / "epoch_0_step_4")).train()
    with pytest.raises(CheckpointError, match="does not exist"):
        session(tmp_path, steps=6, resume=str(tmp_path / "nowhere")).train()


def test_a_moved_run_resumes_and_finishes(tmp_path: Path) -> None:
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


def test_every_file_loads_with_plain_torch_load(tmp_path: Path) -> None:
    # Fault T06: torch.load refuses numpy and Python objects by default.
    np.random.seed(7)  # noqa: NPY002
    session(tmp_path, steps=3, ema_decay=0.9).train()
    folder = tmp_path / "epoch_0_step_3"
    files = sorted(folder.rglob("*.pt"))
    assert {"model.pt", "optimizer.pt", "scheduler.pt", "rank_00000.pt", "average.pt"} == {
        f.name for f in files
    }
    for path in files:
        torch.load(path, weights_only=True)
    model = ToyModel(seed=5)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))


def test_random_state_of_torch_numpy_and_python_comes_back(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float, float]:
        return (
            float(torch.rand(())),
            float(np.random.standard_normal()),  # noqa: NPY002
            random.gauss(0, 1),
            random.random(),
        )

    draw()
    torch.save(capture_rng(), tmp_path / "rng.pt")
    first = [draw() for _ in range(5)]
    draw()
    restore_rng(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert [draw() for _ in range(5)] == first
    with pytest.raises(CheckpointError, match="lacks python"):
        restore_rng({"torch": torch.get_rng_state()})


class Pair(nn.Module):
    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(3)))


def test_optimizer_state_follows_names_not_positions() -> None:
    # Fault T13.
    first, second = Pair("ab"), Pair("ba")
    one = torch.optim.AdamW(first.parameters(), lr=0.1)
    first.a.grad, first.b.grad = torch.ones(3), torch.full((3,), 2.0)
    one.step()
    two = torch.optim.AdamW(second.parameters(), lr=0.5)
    load_named_state(two, second, named_state(one, first))
    assert torch.equal(two.state[second.a]["exp_avg"], one.state[first.a]["exp_avg"])
    assert torch.equal(two.state[second.b]["exp_avg"], one.state[first.b]["exp_avg"])
    assert two.param_groups[0]["lr"] == 0.1
    third = Pair("axb")
    with pytest.raises(CheckpointError, match=r"not in the checkpoint x; only in the checkpoint none"):
        load_named_state(torch.optim.AdamW(third.parameters()), third, named_state(one, first))


def test_moments_return_into_a_fresh_optimizer_bit_for_bit(tmp_path: Path) -> None:
    # Fault T14: a fresh Adam has no state yet.
    whole = session(tmp_path / "whole", steps=6)
    whole.train()
    session(
        tmp_path / "part", steps=6, epochs=None, checkpoint=CheckpointConfig(every=5, keep_last=9)
    ).train()
    shutil.rmtree(tmp_path / "part" / "epoch_0_step_6")
    again = session(tmp_path / "part", steps=6, epochs=None)
    result = again.train()
    assert result.resumed_from == tmp_path / "part" / "epoch_0_step_5"
    for a, b in zip(whole.parts.model.parameters(), again.parts.model.parameters(), strict=True):
        assert torch.equal(a, b)
        state, other = whole.parts.optimizer.state[a], again.parts.optimizer.state[b]
        assert {k: v.tolist() for k, v in state.items()} == {k: v.tolist() for k, v in other.items()}


def test_draws_are_keyed_by_sample_and_distinct() -> None:
    # Fault T16.
    values = [torch.randn((), generator=g).item() for g in sample_generators(0, 0, range(100))]
    assert len(set(values)) == 100
    assert values[7] == torch.randn((), generator=sample_generators(0, 0, [7])[0]).item()
    assert values[7] != torch.randn((), generator=sample_generators(0, 1, [7])[0]).item()
    assert values[7] != torch.randn((), generator=sample_generators(1, 0, [7])[0]).item()
    assert len({mix(0, rank, 1) for rank in range(1000)}) == 1000


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = self.body(self.embed(batch["index"] % 10))
        return {"loss": nn.functional.cross_entropy(self.head(hidden), batch["index"] % 10)}


def test_tied_weights_stay_tied_in_both_formats(tmp_path: Path) -> None:
    # Fault T18.
    settings = {"checkpoint": CheckpointConfig(model_format="both", background=False)}
    session(tmp_path, model=Tied(), steps=3, **settings).train()
    folder = tmp_path / "epoch_0_step_3"
    state = load_safetensors(folder / "model.safetensors")
    assert set(state) == {"embed.weight", "body.weight", "body.bias", "head.weight"}
    fresh = Tied()
    fresh.load_state_dict(state)
    (folder / "model.pt").unlink()
    manifest = json.loads((folder / COMPLETE).read_text())
    del manifest["files"]["model.pt"]
    (folder / COMPLETE).write_text(json.dumps(manifest))
    model = Tied()
    session(tmp_path, model=model, steps=4, **settings).train()
    assert model.head.weight is model.embed.weight
    with torch.no_grad():
        model.head.weight[0, 0] = 123.0
    assert model.embed.weight[0, 0] == 123.0


def test_another_data_set_is_refused_or_starts_the_epoch_afresh(tmp_path: Path) -> None:
    # Fault T20.
    session(tmp_path, steps=5, length=64).train()
    with pytest.raises(CheckpointError, match=r"belongs to data set toy-64-4-0, this run reads toy-80-4-0"):
        session(tmp_path, steps=7, length=80).train()
    result = session(tmp_path, steps=7, length=80, allow_mismatch=True).train()
    assert result.steps == 7


def test_every_part_of_the_list_is_in_a_checkpoint(tmp_path: Path) -> None:
    # Fault T22.
    session(tmp_path, steps=3, ema_decay=0.9, precision="fp16").train()
    folder = tmp_path / "epoch_0_step_3"
    rank = load_tensors(folder / "loongforge_state" / "rank_00000.pt")
    where = {
        "model": folder / "model.pt",
        "optimizer": folder / "optimizer.pt",
        "scheduler": folder / "scheduler.pt",
        "average": folder / "loongforge_state" / "average.pt",
        "scaler": folder / "loongforge_state" / "scaler.pt",
        "step": folder / "loongforge_state" / "trainer.json",
    }
    for part in PARTS:
        if part in {"memory", "plans"}:
            continue  # empty with these pillars off; their own tests cover them
        assert part in rank or where[part].exists(), part


def test_state_keeps_its_dtype_and_follows_the_parameter() -> None:
    # Fault T23: torch casts moments to the parameter's dtype when it loads.
    model = Pair("ab").to(torch.bfloat16)
    one = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        one.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.full((3,), 1 / 3),
            "exp_avg_sq": torch.full((3,), 1 / 7),
            "history": [1, 2, 3],
        }
    other = Pair("ab").to(torch.bfloat16)
    two = torch.optim.AdamW(other.parameters())
    load_named_state(two, other, named_state(one, model))
    state = two.state[other.a]
    assert state["exp_avg"].dtype == torch.float32
    assert state["exp_avg"].tolist() == [pytest.approx(1 / 3)] * 3
    assert (state["step"].item(), state["history"]) == (3.0, [1, 2, 3])


def test_views_of_one_slab_are_saved_compactly(tmp_path: Path) -> None:
    # Fault M14.
    slab = torch.zeros(1_000_000)
    copy = host_copy({"a": slab[:10], "b": slab[10:20], "tied": slab[:10]}, {})
    torch.save(copy, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 5000
    assert copy["a"].data_ptr() == copy["tied"].data_ptr()


def test_background_write_holds_the_state_of_its_step(tmp_path: Path) -> None:
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


def test_validate_reports_files_model_and_what_to_do(tmp_path: Path) -> None:
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
