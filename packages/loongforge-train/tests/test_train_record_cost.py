"""What a step record may cost: device operations and Python calls are counted, with a stand-in for CUDA."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from loongforge import clock, recorder
from loongforge.clock import StepClock
from loongforge.config import CheckpointConfig, TrainConfig
from loongforge.errors import NonFiniteError
from loongforge.guards import READ_LAG
from loongforge.ranks import Ranks
from loongforge.recorder import MOST_BEHIND, MOST_GATHERED, MOST_UNREAD, PendingStep, Recorder
from loongforge.records import StepRecord, read_metrics
from loongforge.session import Session, build_parts
from loongforge.sinks import JsonlSink
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate
from loongforge.window import EagerWindow
from torch import Tensor, nn

STEPS = 8 * MOST_GATHERED
GPU = torch.device("cuda", 6)


class Device:
    """Stands in for CUDA: counts what is asked of it; copies pass when they are asked for a second time."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.stuck = False

    def event(self, **_: object) -> Event:
        self.counts["made"] += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.asked = False

    def record(self, stream: object) -> None:
        self.device.counts["recorded"] += 1
        self.asked = False

    def elapsed_time(self, other: Event) -> float:
        self.device.counts["elapsed"] += 1
        return 1.0

    def query(self) -> bool:
        self.device.counts["asked"] += 1
        passed, self.asked = self.asked, True
        return passed and not self.device.stuck

    def synchronize(self) -> None:
        self.device.counts["waited"] += not self.asked


class Stream:
    device = GPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(clock, "_spare", defaultdict(list))
    return device


def on_stand_in(run: Path, *, accumulation: int = 1, data: ToyData | None = None) -> Session:
    """Return a session that computes on the CPU and records as on a GPU."""
    toy = data or ToyData(64 * accumulation)
    batches = [collate([toy[8 * n + i] for i in range(8)]) for n in range(len(toy) // 8)]
    for batch in batches:
        batch["attention_mask"] = torch.ones(8, 60, dtype=torch.int64)
    config = TrainConfig(
        output=str(run), steps=10**6, schedule="constant", log_interval=10**9, probe_interval=0,
        accumulation=accumulation, checkpoint=CheckpointConfig(every=0), control=False,
    )  # fmt: skip
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    parts = build_parts(config, ToyModel(), BatchSource(batches), ranks)
    # Only full gatherings, however slow the machine is.
    parts.recorder = Recorder(GPU, 0, write_every_s=3600.0)
    one = Session(config, parts)
    one.engine.new_clock = lambda _: StepClock(GPU)
    return one


def run_steps(one: Session, steps: int = STEPS) -> None:
    for _ in range(steps):
        one.engine.run_step()


def calls(one: Session) -> float:
    """Return calls of Python and C functions per step."""
    found = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        found += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        run_steps(one)
    finally:
        sys.setprofile(None)
    return found / STEPS


class NoClock(StepClock):
    """Measures nothing."""

    __slots__ = ()

    def have_window(self) -> None:
        pass

    def enter(self, phase: str) -> None:
        pass


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_asks_little_of_the_device(tmp_path: Path, gpu: Device, accumulation: int) -> None:
    one = on_stand_in(tmp_path, accumulation=accumulation)
    one._open_sinks()
    run_steps(one)
    made = gpu.counts["made"]
    gpu.counts.clear()
    run_steps(one)
    gatherings = STEPS // MOST_GATHERED
    # Beginning, copies, window, optimizer, end; the borders of each backward; one event behind each copy.
    assert gpu.counts["recorded"] <= STEPS * (5 + 2 * accumulation) + gatherings
    assert gpu.counts["elapsed"] <= STEPS * (5 + accumulation)
    assert gpu.counts["asked"] <= 2 * gatherings
    assert gpu.counts["made"] <= gatherings < made, "the events of the steps are used again"
    assert gpu.counts["waited"] == 0
    one.close()


def test_a_record_costs_few_calls(tmp_path: Path, gpu: Device) -> None:
    one = on_stand_in(tmp_path)
    one._open_sinks()
    run_steps(one)
    recorded = calls(one)
    one.engine._record = lambda *_, **__: None  # type: ignore[method-assign]
    one.engine.count = lambda _: (None, None, [])
    one.engine.new_clock = lambda _: NoClock(torch.device("cpu"))
    run_steps(one)
    # 170 when this was written; a value read per step or a context manager per phase shows at once.
    assert recorded - calls(one) < 190
    one.close()


def test_values_of_gathered_steps_travel_in_one_copy(
    tmp_path: Path, gpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = on_stand_in(tmp_path)
    records: list[StepRecord] = []
    one.parts.recorder.listeners.append(lambda record, _: records.append(record))
    run_steps(one)
    one.parts.recorder.flush()
    rests: list[int] = []
    one.parts.recorder.rests.append(lambda: rests.append(records[-1].step))
    touched: list[object] = []
    scalar: Callable[[float | Tensor, torch.device], Tensor] = recorder._scalar

    def touch(value: float | Tensor, device: torch.device) -> Tensor:
        touched.append(value)
        return scalar(value, device)

    monkeypatch.setattr(recorder, "_scalar", touch)
    run_steps(one, MOST_GATHERED - 1)
    assert touched == []
    run_steps(one, 1)
    assert len(records) == STEPS, "the values are still on their way"
    one.parts.recorder.flush()
    assert len(touched) == MOST_GATHERED * 4
    assert rests == [STEPS + MOST_GATHERED], "a sink is told once that a gathering is complete"
    assert [record.step for record in records] == list(range(1, STEPS + MOST_GATHERED + 1))
    assert len({record.loss for record in records}) > MOST_GATHERED
    assert records[-1].micro_losses == [records[-1].loss]


def pending(step: int) -> PendingStep:
    ended = StepClock(GPU)
    ended.finish()
    value = torch.tensor(float(step))
    return PendingStep(
        step=step, epoch=0, time_unix=0.0, clock=ended, loss=value, micro_losses=[], norm=value,
        skipped=torch.zeros(()), lr=0.1,
    )  # fmt: skip


@pytest.mark.parametrize("write_every_s", [0.0, 3600.0])
def test_the_host_waits_only_when_it_is_far_ahead(gpu: Device, write_every_s: float) -> None:
    gpu.stuck = True
    writer = Recorder(GPU, 0, write_every_s=write_every_s)
    steps: list[int] = []
    writer.listeners.append(lambda record, _: steps.append(record.step))
    for step in range(1, 100):
        writer.submit(pending(step))
        assert writer.unread == step - len(steps) <= MOST_UNREAD
        # Those written are the ones that MOST_BEHIND steps or more have followed.
        assert len(steps) <= max(0, step - MOST_BEHIND)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) > 80
    writer.flush()
    assert steps == list(range(1, 100))


def test_the_spike_limit_uses_losses_that_every_rank_has_read() -> None:
    assert READ_LAG == MOST_UNREAD + 1


def test_a_run_that_a_guard_ends_has_all_its_records(tmp_path: Path, gpu: Device) -> None:
    data = ToyData(64)
    data._x[:] = float("nan")
    one = on_stand_in(tmp_path, data=data)
    with pytest.raises(NonFiniteError, match="10 step"):
        one.train()
    steps = [record["step"] for record in read_metrics(tmp_path)]
    assert steps == list(range(1, one.engine.at.step + 1))


def test_gathered_lines_are_written_at_once_and_a_cut_spoils_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = JsonlSink(tmp_path, gather=True)
    real, sizes = os.write, []

    def write(descriptor: int, data: bytes) -> int:
        sizes.append(len(data))
        return real(descriptor, data[: 2 * len(data) // 3] if len(sizes) == 2 else data)

    monkeypatch.setattr(os, "write", write)
    for first in (1, 4, 7):
        for step in range(first, first + 3):
            sink.write(StepRecord(step=step, epoch=0, rank=0, time_unix=0.0))
        assert len(sizes) == first // 3
        sink.flush()
    sink.write(StepRecord(step=10, epoch=0, rank=0, time_unix=0.0))
    sink.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 7, 8, 9, 10]
    assert sink.dropped == 1


def test_a_loss_that_the_next_call_overwrites_is_kept() -> None:
    class Static(nn.Module):
        """Writes every loss to the same place, as a captured graph does."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))
            self.out = torch.zeros(())

        def forward(self, batch: Tensor) -> dict[str, Tensor]:
            loss = (self.w * batch).sum()
            self.out.copy_(loss.detach())
            return {"loss": Shared.apply(loss, self.out)}

    outcome = EagerWindow(Static()).run([torch.ones(1), torch.full((1,), 5.0)])
    assert [float(value) for value in outcome.micro_losses] == [1.0, 5.0]


class Shared(torch.autograd.Function):
    """Returns a buffer as the result of a computation."""

    @staticmethod
    def forward(context: object, value: Tensor, out: Tensor) -> Tensor:
        return out.detach()

    @staticmethod
    def backward(context: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
