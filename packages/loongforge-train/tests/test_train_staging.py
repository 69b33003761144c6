"""Micro-batches copied ahead of their step: same numbers, same resume, counts taken on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loongforge.clock import StepClock
from loongforge.config import CheckpointConfig, PillarConfig, TrainConfig
from loongforge.errors import ConfigError
from loongforge.ranks import Ranks
from loongforge.records import read_metrics
from loongforge.rng import seed_rank
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.staging import AheadPlan, StagedBatch, StagedLoader, host_of, stage
from loongforge.testing import ToyData, ToyModel, collate
from torch.utils.data import DataLoader

CPU = torch.device("cpu")


class Ahead:
    """Pulls ``depth`` batches before it hands one out, as the prefetcher does on a GPU."""

    def __init__(self, loader: object, device: object, convert: object, depth: int) -> None:
        self.loader, self.depth = loader, depth
        self.most = 0
        self._state: Mapping[str, object] | None = None

    def __iter__(self) -> Iterator[object]:
        source, waiting = iter(self.loader), deque()
        self._state = None
        while True:
            while len(waiting) < self.depth:
                entry = next(source, None)
                if entry is None:
                    break
                waiting.append((entry, self.loader.state_dict()))
            if not waiting:
                break
            self.most = max(self.most, len(waiting))
            value, self._state = waiting.popleft()
            yield value
        self._state = None

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def state_dict(self) -> dict[str, object]:
        return dict(self._state if self._state is not None else self.loader.state_dict())

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._state = None
        self.loader.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def stats(self) -> dict[str, object]:
        return dict(self.loader.stats())


class Counting:
    """Stands in for what runs the frozen part ahead: notes the order of starts and takes."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.started = self.replays = self.discarded = 0
        self.failures = ()

    def start(self, window: list[Mapping[str, object]]) -> object:
        self.started += 1
        number = self.started
        self.events.append(("start", len(window)))

        def take() -> list[Mapping[str, object]]:
            self.events.append(("take", number))
            return [{**batch, "frozen": number} for batch in window]

        return SimpleNamespace(take=take, finish=lambda: self.events.append(("finish", number)))

    def stats(self) -> Counting:
        return self

    def release(self) -> None:
        self.events.append(("release", 0))


def adfe(length: int = 52) -> object:
    data = pytest.importorskip("loongforge_data")
    return data.ADFEDataLoader(ToyData(length), batch_size=2, shuffle=True, seed=3, collate_fn=collate)


def staged(
    model: ToyModel,
    prefetcher: Callable[..., object] = Ahead,
    depth: int = 3,
    plan: AheadPlan | None = None,
) -> StagedLoader:
    return StagedLoader(adfe(), model, CPU, seed=0, depth=depth, prefetcher=prefetcher, plan=plan)


def train(
    out: Path, *, ahead: bool, steps: int | None = None, dropout: float = 0.3, group: int = 0
) -> list[list[int]]:
    config = TrainConfig(
        output=str(out),
        steps=steps,
        epochs=3,
        accumulation=4,
        learning_rate=1e-2,
        schedule="constant",
        control=False,
        log_interval=1000,
        checkpoint=CheckpointConfig(every=0, background=False),
    )
    model, seen = ToyModel(dropout=dropout), []
    seed_rank(0, 0)
    plan = AheadPlan(ahead=Counting(), group=group) if group else None
    source = BatchSource(staged(model, plan=plan) if ahead else adfe(), fingerprint="toy")
    parts = build_parts(config, model, source, Ranks(rank=0, world_size=1, device=CPU))
    parts.recorder.listeners.append(lambda record, ids: seen.append([i for group in ids for i in group]))
    Session(config, parts).train()
    return seen


def curve(out: Path) -> list[tuple[object, ...]]:
    names = ("step", "loss", "micro_losses", "grad_norm", "samples")
    return [tuple(record[name] for name in names) for record in read_metrics(out)]


def test_batches_copied_ahead_give_the_same_numbers_and_resume_at_every_stop(tmp_path: Path) -> None:
    ids = train(tmp_path / "plain", ahead=False)
    assert train(tmp_path / "ahead", ahead=True) == ids
    assert curve(tmp_path / "ahead") == curve(tmp_path / "plain")
    for stop in (1, 5, 6, 7, 8, 13, 14, 20):
        out = tmp_path / f"stop{stop}"
        seen = train(out, ahead=True, steps=stop) + train(out, ahead=True)
        assert seen == ids, f"stopped after step {stop}"
        assert curve(out) == curve(tmp_path / "plain"), f"stopped after step {stop}"


@pytest.mark.parametrize("group", [1, 3, 4])
def test_groups_started_ahead_resume_at_every_stop(tmp_path: Path, group: int) -> None:
    ids = train(tmp_path / "plain", ahead=False)
    assert train(tmp_path / "ahead", ahead=True, group=group) == ids
    assert curve(tmp_path / "ahead") == curve(tmp_path / "plain")
    for stop in (1, 6, 7, 13, 20):
        out = tmp_path / f"stop{stop}"
        seen = train(out, ahead=True, steps=stop, group=group) + train(out, ahead=True, group=group)
        assert seen == ids, f"stopped after step {stop}"
        assert curve(out) == curve(tmp_path / "plain"), f"stopped after step {stop}"


def test_a_group_is_started_before_the_one_before_it_is_handed_out() -> None:
    ahead = Counting()
    loader = staged(ToyModel(), plan=AheadPlan(ahead=ahead, group=4))
    loader.set_epoch(0)
    numbers = [batch.ahead()["frozen"] for batch in loader]
    assert numbers == sorted([1, 2, 3, 4, 5, 6] * 4 + [7, 7])
    assert ahead.events[:5] == [("start", 4), ("start", 4), ("take", 1), ("start", 4), ("take", 2)]
    assert ahead.events[-3:] == [("start", 2), ("take", 6), ("take", 7)]
    assert loader.stats()["frozen_ahead"] == 7


def test_closing_gives_up_the_graphs() -> None:
    ahead = Counting()
    loader = staged(ToyModel(), plan=AheadPlan(ahead=ahead, group=4))
    next(iter(loader))
    loader.close()
    assert ahead.events[-1] == ("release", 0)


def test_a_step_finishes_the_coming_group_before_its_optimizer(tmp_path: Path) -> None:
    ahead = Counting()
    config = TrainConfig(
        output=str(tmp_path), steps=3, accumulation=4, control=False, checkpoint=CheckpointConfig(every=0)
    )
    model = ToyModel()
    source = BatchSource(staged(model, plan=AheadPlan(ahead=ahead, group=4)), fingerprint="toy")
    Session(config, build_parts(config, model, source, Ranks(rank=0, world_size=1, device=CPU))).train()
    assert [event for event in ahead.events if event[0] not in ("start", "release")] == [
        ("take", 1), ("finish", 2), ("take", 2), ("finish", 3), ("take", 3), ("finish", 4)
    ]  # fmt: skip


def test_waiting_for_the_frozen_part_is_part_of_the_window_and_no_wait_for_data(tmp_path: Path) -> None:
    phases: list[str] = []

    class Clock(StepClock):
        def enter(self, phase: str) -> None:
            phases[:] = [phase]
            super().enter(phase)

    class Noting(Counting):
        def start(self, window: list[Mapping[str, object]]) -> object:
            started = super().start(window)
            take = started.take
            started.take = lambda: (taken_in.append(list(phases)), take())[1]
            return started

    taken_in: list[list[str]] = []
    config = TrainConfig(
        output=str(tmp_path), steps=2, accumulation=4, control=False, checkpoint=CheckpointConfig(every=0)
    )
    model = ToyModel()
    source = BatchSource(staged(model, plan=AheadPlan(ahead=Noting(), group=4)), fingerprint="toy")
    run = Session(config, build_parts(config, model, source, Ranks(rank=0, world_size=1, device=CPU)))
    run.engine.new_clock = Clock
    run.train()
    assert taken_in == [["forward"]] * 2


def test_a_new_epoch_amid_an_epoch_begins_where_the_steps_are() -> None:
    loader = staged(ToyModel(), plan=AheadPlan(ahead=Counting(), group=4))
    loader.set_epoch(0)
    whole = [host_of(batch)["index"].tolist() for batch in loader]
    loader.set_epoch(0)
    source = iter(loader)
    first = [host_of(next(source))["index"].tolist() for _ in range(5)]
    loader.set_epoch(0)
    assert list(source) == []
    rest = [host_of(batch)["index"].tolist() for batch in loader]
    assert first + rest == whole


def test_draws_are_made_before_the_copy_and_the_host_batch_stays_beside_it() -> None:
    model = ToyModel()
    loader = staged(model)
    loader.set_epoch(4)
    first = next(iter(loader))
    assert isinstance(first, StagedBatch)
    assert "noise" in first.device
    assert "noise" not in host_of(first)
    from loongforge.batches import add_draws

    again = add_draws(model, host_of(first), seed=0, epoch=4)
    assert torch.equal(again["noise"], first.device["noise"])
    assert loader.stats()["device_prefetch"] == 3


def test_draws_that_no_sample_keys_are_left_to_their_step() -> None:
    def without_index(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {key: value for key, value in collate(samples).items() if key != "index"}

    data = pytest.importorskip("loongforge_data")
    inner = data.ADFEDataLoader(ToyData(8), batch_size=2, collate_fn=without_index)
    loader = StagedLoader(inner, ToyModel(), CPU, seed=0, depth=2, prefetcher=Ahead)
    assert not any(isinstance(batch, StagedBatch) for batch in loader)


def test_the_real_prefetcher_fits(tmp_path: Path) -> None:
    device = pytest.importorskip("loongforge_data.device")
    loader = staged(ToyModel(), device.DevicePrefetcher)
    batches = list(loader)
    assert len(batches) == len(loader) == 26
    assert all(isinstance(batch, StagedBatch) for batch in batches)
    assert loader.stats()["device_batches"] == 26


def test_what_is_copied_ahead_goes_on_inside_an_epoch_of_another_number_of_ranks() -> None:
    device = pytest.importorskip("loongforge_data.device")

    def loader(rank: int, ranks: int) -> StagedLoader:
        data = pytest.importorskip("loongforge_data")
        inner = data.ADFEDataLoader(
            ToyData(52), batch_size=2, shuffle=True, seed=3, collate_fn=collate, rank=rank, world_size=ranks
        )
        return StagedLoader(inner, ToyModel(), CPU, seed=0, depth=3, prefetcher=device.DevicePrefetcher)

    def ids(batches: list[StagedBatch]) -> list[int]:
        return [int(i) for batch in batches for i in batch.host["index"]]

    three = [loader(rank, 3) for rank in range(3)]
    first = [ids([batch for _, batch in zip(range(4), one, strict=False)]) for one in three]
    rest = []
    for rank in range(2):
        source = BatchSource(loader(rank, 2))
        source.load_resharded(
            {"epoch": 0, "taken": 4, "loader": three[0].state_dict()}, stored_ranks=3, ranks=2
        )
        assert source.taken == 0
        rest.append(ids(list(iter(source.next_micro_batch, None))))
    assert sorted(index for part in first + rest for index in part) == list(range(52))


def test_where_nothing_can_be_copied_ahead_the_loader_stays_as_it_is() -> None:
    plain = DataLoader(ToyData(8), batch_size=2, collate_fn=collate)
    assert stage(plain, ToyModel(), torch.device("cuda"), seed=0, depth=2) is plain
    resumable = adfe()
    assert stage(resumable, ToyModel(), torch.device("cuda"), seed=0, depth=0) is resumable
    assert stage(resumable, ToyModel(), CPU, seed=0, depth=2) is resumable
    with pytest.raises(ConfigError, match="device_prefetch is -1"):
        TrainConfig(steps=1, pillars=PillarConfig(device_prefetch=-1))
