"""Windows, divisors, guards, records, the moving average and the watchdog."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
import torch
from loongforge.batches import LossAdapter
from loongforge.clock import StepClock
from loongforge.config import CheckpointConfig, GuardConfig, TrainConfig
from loongforge.errors import DataExhaustedError, NonFiniteError, SpikeError
from loongforge.guards import Guard
from loongforge.nvml import Utilisation
from loongforge.ranks import Ranks
from loongforge.recorder import MOST_GATHERED, PendingStep, Recorder
from loongforge.records import FIELD_NAMES, StepRecord, drop_after, read_metrics
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate
from loongforge.window import EagerWindow
from torch import nn
from torch.utils.data import DataLoader

NAMES = (
    "step",
    "epoch",
    "rank",
    "time_unix",
    "loss",
    "micro_losses",
    "grad_norm",
    "lr",
    "samples",
    "tokens",
    "step_ms",
    "data_wait_ms",
    "h2d_ms",
    "forward_ms",
    "backward_ms",
    "comm_exposed_ms",
    "comm_overlap",
    "optimizer_ms",
    "checkpoint_ms",
    "samples_per_s",
    "tokens_per_s_gpu",
    "gpu_util",
    "mem_peak_bytes",
    "alloc_ms",
    "fused",
    "fusion_reason",
    "graph",
    "graph_reason",
)


def session(run: Path, *, data: object = None, model: nn.Module | None = None, **settings: object) -> Session:
    base = {"output": str(run), "schedule": "constant", "learning_rate": 1e-2, "control": False}
    if not {"steps", "epochs"} & set(settings):
        base["epochs"] = 1
    config = TrainConfig(**{**base, **settings})
    torch.manual_seed(0)
    loader = DataLoader(data or ToyData(), batch_size=config.batch_size, collate_fn=collate)
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    return Session(config, build_parts(config, model or ToyModel(), BatchSource(loader), ranks))


def test_the_divisor_is_the_number_of_valid_elements_of_the_window() -> None:
    # Fault F13: micro-batches with 3 and 1 valid elements.
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            values = self.w * batch["v"]
            return {
                "loss": values.mean(),
                "loss_sum": values.sum()[None],
                "loss_count": torch.tensor([values.numel()]),
            }

    window = [{"v": torch.ones(3)}, {"v": torch.full((1,), 9.0)}]
    model = Mean()
    outcome = EagerWindow(model).run(window, divisor=4.0)
    assert (float(outcome.loss), float(model.w.grad)) == (3.0, 3.0)
    assert [float(value) for value in outcome.micro_losses] == [1.0, 9.0]
    model.w.grad = None
    assert float(EagerWindow(model).run(window).loss) == 5.0, "without a divisor: the mean of means"


def test_the_ragged_last_window_counts_what_it_has(tmp_path: Path) -> None:
    # Faults T10, T24: 10 micro-batches, accumulation 4: windows of 4, 4, 2.
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.layer(batch["x"]).mean()

    torch.manual_seed(1)
    model = Plain()
    one = session(
        tmp_path,
        data=ToyData(20),
        model=model,
        batch_size=2,
        accumulation=4,
        learning_rate=0.0,
        clip_norm=None,
    )
    one.parts.runner = EagerWindow(LossAdapter(model))
    one.train()
    records = read_metrics(tmp_path)
    assert [len(record["micro_losses"]) for record in records] == [4, 4, 2]
    data = ToyData(20)
    last = torch.stack([data[index]["x"] for index in range(16, 20)])
    expected = model.layer(last).mean()
    assert records[2]["loss"] == pytest.approx(expected.item(), abs=1e-6)
    gradient = torch.autograd.grad(expected, list(model.parameters()))
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient))
    assert records[2]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_dropping_ragged_windows_and_never_stepping_is_an_error(tmp_path: Path) -> None:
    # Fault T10.
    kept = session(tmp_path / "a", data=ToyData(20), batch_size=2, accumulation=4, drop_ragged=True)
    assert kept.train().steps == 2
    never = session(
        tmp_path / "b", data=ToyData(6), batch_size=2, accumulation=4, drop_ragged=True, steps=5, epochs=None
    )
    with pytest.raises(DataExhaustedError, match="3 micro-batches on this rank and a step needs 4"):
        never.train()


def test_an_empty_loader_is_an_error_not_a_loop(tmp_path: Path) -> None:
    config = TrainConfig(output=str(tmp_path), steps=3, control=False)
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    parts = build_parts(config, ToyModel(), BatchSource([]), ranks)
    with pytest.raises(DataExhaustedError):
        Session(config, parts).train()


def test_a_window_never_crosses_an_epoch_and_clipping_happens_once_a_step(tmp_path: Path) -> None:
    # Fault T12: 5 micro-batches an epoch, accumulation 2, fp16 scaler, clip 1.0, 3 epochs.
    one = session(
        tmp_path, data=ToyData(10), batch_size=2, accumulation=2, precision="fp16", clip_norm=1.0, epochs=3
    )
    clipped: list[int] = []
    real = one.parts.parallel.clip

    def clip(limit: float | None) -> torch.Tensor:
        clipped.append(one.engine.at.step)
        return real(limit)

    one.parts.parallel.clip = clip  # type: ignore[method-assign]
    one.train()
    records = read_metrics(tmp_path)
    assert [len(r["micro_losses"]) for r in records] == [2, 2, 1] * 3
    assert [r["epoch"] for r in records] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert clipped == list(range(9))


def test_not_finite_loss_skips_the_update_and_leaves_the_optimizer_alone(tmp_path: Path) -> None:
    # Fault T19.
    data = ToyData(40)
    data._x[13] = float("nan")
    one = session(tmp_path, data=data, batch_size=4, accumulation=2)
    before: list[dict[str, object]] = []
    real = one.parts.guard.apply

    def apply(bad: torch.Tensor, optimizer: torch.optim.Optimizer, scaler: object) -> None:
        saved = [v.clone() for s in optimizer.state.values() for v in s.values()]
        weights = [p.detach().clone() for p in one.parts.model.parameters()]
        real(bad, optimizer, scaler)
        if bad.item():
            after = [v for s in optimizer.state.values() for v in s.values()]
            assert all(torch.equal(a, b) for a, b in zip(saved, after, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(weights, one.parts.model.parameters(), strict=True))
            before.append({})

    one.parts.guard.apply = apply  # type: ignore[method-assign]
    one.train()
    records = read_metrics(tmp_path)
    assert [r["skipped"] for r in records] == [False, True, False, False, False]
    assert records[1]["loss"] is None
    assert records[1]["micro_losses"].count(None) == 1
    assert len(before) == 1


def test_too_many_skips_stop_the_run_and_name_the_samples(tmp_path: Path) -> None:
    # Fault T19.
    data = ToyData(40)
    data._x[8:] = float("nan")
    one = session(tmp_path, data=data, batch_size=4, guards=GuardConfig(max_skips=3))
    with pytest.raises(NonFiniteError, match=r"3 step\(s\) in a row.*16, 17, 18, 19"):
        one.train()
    stop = session(tmp_path / "b", data=data, batch_size=4, guards=GuardConfig(nonfinite="stop"))
    with pytest.raises(NonFiniteError, match=r"step 3: .*8, 9, 10, 11"):
        stop.train()


def spiky(guard: Guard, losses: list[float]) -> list[bool]:
    verdicts = []
    for step, loss in enumerate(losses, start=1):
        bad = guard.verdict(torch.tensor(loss), torch.tensor(1.0), step=step)
        verdicts.append(bool(bad))
        guard.observe(
            StepRecord(step=step, epoch=0, rank=0, time_unix=0.0, loss=loss, skipped=bool(bad)), [[step]]
        )
    return verdicts


def test_a_loss_spike_is_skipped_or_stops_with_its_samples() -> None:
    losses = [1.0] * 40 + [50.0] + [1.0] * 5
    skip = Guard(GuardConfig(spike_factor=10.0, spike_action="skip"))
    assert [i for i, bad in enumerate(spiky(skip, losses)) if bad] == [40]
    assert skip.failure is None
    stop = Guard(GuardConfig(spike_factor=10.0, spike_action="stop"))
    spiky(stop, losses)
    assert isinstance(stop.failure, SpikeError)
    assert "step 41" in str(stop.failure)
    warn = Guard(GuardConfig(spike_factor=10.0, spike_action="warn"))
    assert not any(spiky(warn, losses))
    assert warn.spikes == 1


def test_every_line_has_all_names_of_the_record_and_unknown_is_null(tmp_path: Path) -> None:
    session(tmp_path, epochs=1).train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert set(NAMES) <= set(FIELD_NAMES) == set(lines[0])
    first = lines[0]
    for name in ("gpu_util", "mem_peak_bytes", "comm_exposed_ms", "comm_overlap", "alloc_ms", "tokens"):
        assert first[name] is None, f"{name} cannot be known on this CPU run"
    assert first["fused"] is False
    assert first["fusion_reason"] == "off"
    for record in lines[1:]:
        parts = (
            "data_wait_ms",
            "h2d_ms",
            "forward_ms",
            "backward_ms",
            "optimizer_ms",
            "checkpoint_ms",
            "host_gap_ms",
        )
        assert sum(record[name] for name in parts) == pytest.approx(record["step_ms"], rel=0.02, abs=0.2)


def test_torn_and_repeated_lines_are_read_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "rank": 0, "loss": 1},
        {"step": 2, "rank": 0, "loss": 2},
        {"step": 2, "rank": 0, "loss": 3},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "ra')
    assert [(r["step"], r["loss"]) for r in read_metrics(tmp_path)] == [(1, 1), (2, 3)]
    assert drop_after(path, 1) == 2
    assert path.read_text() == '{"step":1,"rank":0,"loss":1}\n'


def test_ema_follows_the_weights_and_ignores_skipped_steps() -> None:
    from loongforge.ema import WeightAverage

    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    average = WeightAverage(model, 0.5)
    with torch.no_grad():
        model.weight.fill_(3.0)
    average.update(torch.tensor(1.0))
    assert average.state_dict()["weight"].item() == 1.0
    average.update(torch.tensor(0.0))
    assert average.state_dict()["weight"].item() == 2.0
    with pytest.raises(ValueError, match="missing"):
        average.load_state_dict({})


def test_a_hung_step_dumps_all_stacks(tmp_path: Path) -> None:
    import threading
    import time

    from loongforge.watchdog import Watchdog

    release = threading.Event()
    stuck = threading.Thread(target=release.wait, args=(20,), name="stuck")
    stuck.start()
    dog = Watchdog(tmp_path, rank=3, limit_s=0.05)
    dog.start()
    deadline = time.monotonic() + 10
    while not dog.dumps and time.monotonic() < deadline:
        release.wait(0.01)
    dog.close()
    release.set()
    stuck.join()
    assert len(dog.dumps) == 1
    text = dog.dumps[0].read_text()
    assert "rank 3" in text
    assert text.count("Thread 0x") >= 2
    assert dog.dumps[0].name.startswith("rank_00003_step_0_")


def test_checkpoint_failure_in_mid_run_is_reported_and_the_run_goes_on(tmp_path: Path) -> None:
    one = session(tmp_path, steps=6, epochs=None, checkpoint=CheckpointConfig(every=2, background=False))
    real, calls = one.writer.write, []

    def write(snapshot: object, *, background: bool | None = None) -> None:
        calls.append(1)
        if len(calls) == 1:
            from loongforge.errors import CheckpointError

            raise CheckpointError("no space for checkpoint")
        real(snapshot, background=background)

    one.writer.write = write  # type: ignore[method-assign]
    assert one.train().steps == 6


def test_the_driver_is_asked_in_a_thread_and_never_waited_for() -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow() -> float:
        asked.set()
        answer.wait(30.0)
        return 87.0

    utilisation = Utilisation(slow)
    assert utilisation() is None
    assert asked.wait(30.0)
    assert utilisation() is None, "the driver has not answered yet"
    answer.set()
    utilisation.close()
    assert utilisation() == 87.0


def test_a_clock_gives_its_marks_back_once_the_next_step_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Event:
        def __init__(self, **_: object) -> None:
            made.append(self)

        def record(self, stream: object) -> None:
            self.at = len(made)

        def elapsed_time(self, other: Event) -> float:
            return 1.0

    class Stream:
        device = torch.device("cuda", 7)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    device = torch.device("cuda", 7)
    first, second = StepClock(device), StepClock(device)
    for clock in (first, second):
        clock.enter("forward")
        clock.finish()
    assert len(made) == 6
    assert second.total_ms(first) == 1.0
    first.release()
    third = StepClock(device)
    third.enter("forward")
    third.finish()
    assert len(made) == 6
    assert third.phases_ms() == {"data": 1.0, "forward": 1.0}


def pending(step: int) -> PendingStep:
    clock = StepClock(torch.device("cpu"))
    clock.finish()
    value = torch.tensor(float(step))
    return PendingStep(
        step=step, epoch=0, time_unix=0.0, clock=clock, loss=value, micro_losses=[], norm=value,
        skipped=torch.zeros(()), lr=0.1,
    )  # fmt: skip


def test_records_are_gathered_for_a_while_and_written_in_order() -> None:
    written: list[int] = []
    recorder = Recorder(torch.device("cpu"), 0, write_every_s=3600.0)
    recorder.listeners.append(lambda record, _: written.append(record.step))
    recorder.submit(pending(1))
    assert written == [1], "the first step shows at once"
    for step in range(2, 2 + MOST_GATHERED - 1):
        recorder.submit(pending(step))
    assert written == [1]
    recorder.submit(pending(1 + MOST_GATHERED))
    assert written == list(range(1, 2 + MOST_GATHERED))
    recorder.submit(pending(50))
    recorder.submit(pending(51))
    recorder.flush()
    assert written[-2:] == [50, 51]


def test_a_checkpoint_comes_after_the_records_of_its_steps(tmp_path: Path) -> None:
    run = session(tmp_path, epochs=1, checkpoint=CheckpointConfig(every=3), batch_size=4)
    run.parts.recorder._write_every_s = 3600.0
    found: dict[int, list[int]] = {}
    save = run.save

    def saved(**named: object) -> None:
        save(**named)
        found[run.engine.at.step] = [int(r["step"]) for r in read_metrics(tmp_path)]

    run.save = saved  # type: ignore[method-assign]
    run.train()
    assert found
    assert all(steps == list(range(1, step + 1)) for step, steps in found.items())
