"""Optional sinks: against the real libraries where they are installed, and against stand-ins everywhere."""

from __future__ import annotations

import sys
import time
import types
from pathlib import Path

import pytest
from loongforge.errors import ConfigError, MissingPillarError, require
from loongforge.records import StepRecord
from loongforge.sinks import build_sink
from loongforge.sinks.base import SCALARS, scalars


def record(step: int, **values: object) -> StepRecord:
    return StepRecord(
        **{"step": step, "epoch": 0, "rank": 0, "time_unix": 0.0, "loss": 1.0 / step, "lr": 1e-3, **values}
    )


def test_unknown_values_are_left_out_never_sent_as_zero() -> None:
    assert scalars(record(2)) == {"loss": 0.5, "lr": 1e-3}
    assert set(SCALARS) <= set(vars(record(1)))


def test_an_unknown_sink_or_a_missing_extra_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed are tensorboard, wandb, prometheus"):
        build_sink("paper", tmp_path, 0, {})
    with pytest.raises(MissingPillarError, match=r"pip install loongforge-nothing`, or leave it"):
        require("loongforge_nothing", "loongforge-nothing", "leave it")


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "prometheus"])
def test_a_sink_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, {"prometheus": "prometheus_client"}.get(name, name), None)
    with pytest.raises(MissingPillarError, match=rf"pip install loongforge-train\[{name}\].*drop {name}"):
        build_sink(name, tmp_path, 0, {})


def test_tensorboard_writes_every_scalar_at_its_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = build_sink("tensorboard", tmp_path, 0, {})
    for step in (1, 2, 4):
        sink.write(record(step))
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "lr"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 0.5), (4, 0.25)]


def test_tensorboard_sink_against_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            calls.append(("open", Path(folder).name))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append(("close",))

    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    writer = types.ModuleType("torch.utils.tensorboard")
    writer.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", writer)
    sink = build_sink("tensorboard", tmp_path, 0, {})
    sink.write(record(4))
    sink.close()
    assert calls == [("open", "tensorboard"), ("loss", 0.25, 4), ("lr", 1e-3, 4), ("close",)]


def test_wandb_writes_offline_with_the_settings_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    sink = build_sink("wandb", tmp_path, 0, {"steps": 3, "pillars": {"mem": "off"}})
    sink.write(record(1))
    sink.write(record(2))
    sink.close()
    stored = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(stored) == 1
    # Its own process writes the file, and may end after finish() has returned.
    deadline = time.monotonic() + 20
    while b"loss" not in stored[0].read_bytes():
        assert time.monotonic() < deadline, "the run's file holds no loss"
        time.sleep(0.05)


def test_wandb_sink_against_a_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    class Run:
        def log(self, values: dict[str, float], *, step: int) -> None:
            calls.append((step, values))

        def finish(self) -> None:
            calls.append("finish")

    def init(**named: object) -> Run:
        calls.append(named)
        return Run()

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    sink = build_sink("wandb", tmp_path / "seven", 0, {"steps": 3})
    sink.write(record(2))
    sink.close()
    opened, logged, finished = calls
    assert opened == {
        "dir": str(tmp_path / "seven"), "name": "seven", "config": {"steps": 3}, "resume": "allow",
    }  # fmt: skip
    assert (logged, finished) == ((2, {"loss": 0.5, "lr": 1e-3}), "finish")


def test_prometheus_serves_the_last_step(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from urllib.request import urlopen

    from loongforge.sinks.prometheus import PrometheusSink

    sink = PrometheusSink(rank=1, port=0)
    sink.write(record(2, rank=1))
    with urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    sink.close()
    assert 'loongforge_loss{rank="1"} 0.5' in text
    assert 'loongforge_step{rank="1"} 2.0' in text


def test_prometheus_sink_against_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    gauges: dict[str, dict[str, float]] = {}
    served: list[object] = []

    class Gauge:
        def __init__(self, name: str, text: str, labels: list[str], *, registry: object) -> None:
            self.name = name
            assert labels == ["rank"]

        def labels(self, *, rank: str) -> Gauge:
            self.rank = rank
            return self

        def set(self, value: float) -> None:
            gauges.setdefault(self.name, {})[self.rank] = value

    class Server:
        server_port = 9403

        def shutdown(self) -> None:
            served.append("shutdown")

        def server_close(self) -> None:
            served.append("close")

    class Thread:
        def join(self, timeout: float) -> None:
            served.append(timeout)

    def start_http_server(port: int, *, addr: str, registry: object) -> tuple[Server, Thread]:
        served.append((port, addr))
        return Server(), Thread()

    module = types.ModuleType("prometheus_client")
    for part in (Gauge, start_http_server):
        setattr(module, part.__name__, part)
    module.CollectorRegistry = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "prometheus_client", module)
    monkeypatch.setenv("LOONGFORGE_PROMETHEUS_PORT", "9400")
    sink = build_sink("prometheus", Path("unused"), 3, {})
    sink.write(record(2))
    sink.close()
    assert gauges == {
        "loongforge_loss": {"3": 0.5},
        "loongforge_lr": {"3": 1e-3},
        "loongforge_step": {"3": 2.0},
    }
    assert served == [(9403, "127.0.0.1"), "shutdown", "close", 5]
