"""What stands in a checkpoint and comes back: weights, moments, random state, ties, types."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from loongforge.checkpoint.layout import COMPLETE, load_tensors
from loongforge.checkpoint.state import PARTS, host_copy
from loongforge.checkpoint.write import load_safetensors
from loongforge.config import CheckpointConfig
from loongforge.errors import CheckpointError
from loongforge.optim import load_named_state, named_state
from loongforge.rng import capture_rng, mix, restore_rng, sample_generators
from loongforge.session import Session
from loongforge.testing import ToyModel
from torch import nn

Make = Callable[..., Session]


def test_every_file_loads_with_plain_torch_load(tmp_path: Path, session: Make) -> None:
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


def test_moments_return_into_a_fresh_optimizer_bit_for_bit(tmp_path: Path, session: Make) -> None:
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


def test_tied_weights_stay_tied_in_both_formats(tmp_path: Path, session: Make) -> None:
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


def test_another_data_set_is_refused_or_starts_the_epoch_afresh(tmp_path: Path, session: Make) -> None:
    # Fault T20.
    session(tmp_path, steps=5, length=64).train()
    with pytest.raises(CheckpointError, match=r"belongs to data set toy-64-4-0, this run reads toy-80-4-0"):
        session(tmp_path, steps=7, length=80).train()
    result = session(tmp_path, steps=7, length=80, allow_mismatch=True).train()
    assert result.steps == 7


def test_every_part_of_the_list_is_in_a_checkpoint(tmp_path: Path, session: Make) -> None:
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


def test_a_tensor_made_at_the_address_of_a_freed_one_is_not_taken_for_it() -> None:
    # State gathered for a snapshot lives only until it is copied; the next one may be made at its address.
    copies: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}
    for value in range(50):
        copy = host_copy({"gathered": torch.full((1000,), float(value))}, copies)
        assert copy["gathered"][0].item() == value
