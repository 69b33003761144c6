"""The control socket: what it answers, whom it refuses, and that nothing it is sent disturbs a run."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loongforge.config import CheckpointConfig, TrainConfig
from loongforge.control import paths, server
from loongforge.control.client import ask
from loongforge.control.paths import reachable, socket_of
from loongforge.control.server import ControlServer
from loongforge.errors import ConfigError, ControlError
from loongforge.ranks import Ranks
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate
from torch.utils.data import DataLoader


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[ControlServer]:
    def fail(request: object) -> dict[str, object]:
        raise ConfigError("not like this")

    made = ControlServer(tmp_path, rank=0, handlers={"echo": lambda r: {"got": r.get("value")}, "fail": fail})
    yield made
    made.close()


def raw(path: Path, data: bytes, *, end: bool = True) -> bytes:
    with socket.socket(socket.AF_UNIX) as client, reachable(path) as address:
        client.settimeout(10)
        client.connect(address)
        try:
            client.sendall(data)
            if end:
                client.shutdown(socket.SHUT_WR)
        except OSError:
            return b""
        answer = bytearray()
        try:
            while chunk := client.recv(65_536):
                answer += chunk
        except ConnectionResetError:
            return b""
        return bytes(answer)


def test_a_request_is_answered_and_found_by_pid_and_by_run(echo: ControlServer, tmp_path: Path) -> None:
    assert ask(socket_of(pid=os.getpid()), "echo", value=3)["got"] == 3
    assert ask(socket_of(run=tmp_path, rank=0), "echo", value=[1])["got"] == [1]
    with pytest.raises(ControlError, match="not like this"):
        ask(echo.path, "fail")
    with pytest.raises(ControlError, match="unknown command 'nope': allowed are echo, fail"):
        ask(echo.path, "nope")


def test_the_socket_and_its_folder_belong_to_the_user_alone(echo: ControlServer) -> None:
    assert stat.S_IMODE(echo.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(paths.registry().stat().st_mode) == 0o700


def test_another_user_is_refused_by_the_peer_check(
    echo: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "peer_uid", lambda client: os.getuid() + 4711)
    with pytest.raises(ControlError, match=r"uid \d+ may not control a training of uid"):
        ask(echo.path, "echo")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_real_second_user_is_refused_even_when_the_file_mode_is_open(echo: ControlServer) -> None:
    def connect_as_nobody() -> str:
        code = (
            "import os,socket,sys\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "c = socket.socket(socket.AF_UNIX); c.settimeout(5)\n"
            "try:\n"
            "    c.connect(sys.argv[1])\n"
            "    c.sendall(b'{}\\n')\n"
            "    print(c.recv(4096).decode())\n"
            "except OSError as error: print('os error', error.errno)\n"
        )
        link = Path("/tmp") / f"lf_{os.getpid()}.sock"
        link.unlink(missing_ok=True)
        os.link(echo.path, link)
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, str(link)],
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            )
        finally:
            link.unlink()
        return done.stdout

    assert "os error 13" in connect_as_nobody()
    echo.path.chmod(0o666)
    assert "may not control" in connect_as_nobody()


@given(st.binary(max_size=300))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_get_a_refusal_and_the_server_lives(echo: ControlServer, data: bytes) -> None:
    answer = raw(echo.path, data + b"\n")
    if answer:
        assert json.loads(answer)["ok"] in {True, False}
    assert ask(echo.path, "echo", value=1)["got"] == 1


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 60_000 + b"\n",
        b"x" * 200_000,
        b'{"command": 5}\n',
        b'{"command": "echo"}',
        b"",
        b"\n",
        b'"text"\n',
        b'{"command": "' + b"a" * 60_000 + b'"}\n',
        b"\xff\xfe\x00\n",
    ],
)
def test_hostile_requests_end_in_a_closed_connection_at_worst(echo: ControlServer, data: bytes) -> None:
    raw(echo.path, data)
    assert ask(echo.path, "echo", value=2)["got"] == 2


def test_silent_clients_do_not_keep_others_out(echo: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READ_TIMEOUT_S", 0.2)
    idle = []
    for _ in range(server.MOST_CLIENTS * 2):
        client = socket.socket(socket.AF_UNIX)
        with reachable(echo.path) as address:
            client.connect(address)
        idle.append(client)
    answered, deadline = False, time.monotonic() + 20
    while not answered and time.monotonic() < deadline:
        try:
            answered = ask(echo.path, "echo", value=9, timeout_s=2)["got"] == 9
        except ControlError:
            continue
    for client in idle:
        client.close()
    assert answered


def test_a_very_deep_run_directory_still_has_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    made = ControlServer(deep, rank=0, handlers={"echo": lambda r: {}})
    assert ask(socket_of(run=deep), "echo")["ok"]
    made.close()
    with pytest.raises(ControlError, match="no live control socket"):
        socket_of(run=deep)
    with pytest.raises(ControlError, match="no control socket"):
        socket_of(pid=os.getpid())


class LiveRun:
    """A training in a thread of this process, for clients in the main thread."""

    def __init__(self, run: Path, **settings: object) -> None:
        config = TrainConfig(
            **{
                "output": str(run),
                "steps": 100_000,
                "log_interval": 10_000,
                "schedule": "constant",
                "checkpoint": CheckpointConfig(every=0),
                **settings,
            }
        )
        torch.manual_seed(0)
        loader = DataLoader(ToyData(64), batch_size=8, shuffle=True, collate_fn=collate)
        ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
        self.session = Session(config, build_parts(config, ToyModel(), BatchSource(loader), ranks))
        self.started = threading.Event()
        self.session.parts.recorder.listeners.append(
            lambda record, ids: self.started.set() if record.step >= 3 else None
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert self.started.wait(30)

    def _run(self) -> None:
        try:
            self.session.train()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.session.config = self.session.config
        self.session.engine.epochs = 0
        self.thread.join(60)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveRun]:
    run = LiveRun(tmp_path / "run")
    yield run
    run.stop()


def test_profile_status_trace_and_checkpoint_of_a_live_run(live: LiveRun, tmp_path: Path) -> None:
    path = socket_of(pid=os.getpid())
    before = ask(path, "status")
    profile = ask(path, "profile", duration_s=0.3, timeout_s=60)
    summary = profile["summary"]
    assert isinstance(summary, dict)
    assert summary["steps"] > 3
    assert summary["first_step"] > before["step"]
    assert set(summary["phases"]) >= {"data_wait_ms", "forward_ms", "backward_ms", "optimizer_ms"}
    traced = ask(path, "profile", duration_s=0.1, timeout_s=120, trace=str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert traced["ok"]
    saved = ask(path, "checkpoint", timeout_s=60)
    live.session.writer.wait()
    assert (live.session.run_dir / f"epoch_{saved_epoch(live)}_step_{saved['step']}").is_dir()
    stacks = Path(str(ask(path, "stacks")["file"]))
    assert "loongforge-control" in stacks.read_text() or "Thread 0x" in stacks.read_text()


def test_a_run_that_is_told_to_stop_ends_at_that_step_with_a_checkpoint(live: LiveRun) -> None:
    answer = ask(socket_of(pid=os.getpid()), "stop", timeout_s=60)
    live.thread.join(60)
    assert not live.thread.is_alive()
    assert live.error is None
    newest = live.session.checkpoint_path()
    assert newest is not None
    assert newest.name.endswith(f"_step_{answer['step']}")


def test_a_command_that_meets_the_end_of_an_epoch_is_not_lost(live: LiveRun) -> None:
    path = socket_of(pid=os.getpid())
    # An epoch has eight steps: among so many requests some vote at an epoch's end.
    steps = [ask(path, "checkpoint", timeout_s=60)["step"] for _ in range(30)]
    assert steps == sorted(steps)


def saved_epoch(live: LiveRun) -> int:
    newest = live.session.checkpoint_path()
    assert newest is not None
    return int(newest.name.split("_")[1])


def test_fusion_trace_comm_and_refusals_of_a_live_run(live: LiveRun) -> None:
    path = socket_of(pid=os.getpid())
    trace = ask(path, "dmf", last=5)
    assert len(trace["trace"]) <= 5  # type: ignore[arg-type]
    assert trace["fusion_reasons"]
    assert ask(path, "comm")["recent"]
    with pytest.raises(ControlError, match="gradient scheduler is off or there is one rank"):
        ask(path, "switch", strategy="simple", timeout_s=60)
    with pytest.raises(ControlError, match="allowed are simple, hybrid"):
        ask(path, "switch", strategy="magic")
    for bad in (0, -1, 1e9, "x", None, True):
        with pytest.raises(ControlError, match="allowed is a number above 0"):
            ask(path, "profile", duration_s=bad)


def test_the_commands_for_a_running_training_find_it_by_pid_and_by_folder(
    live: LiveRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from loongforge.cli import run

    pid, folder = ["--pid", str(os.getpid())], ["--run", str(live.session.run_dir)]
    target = tmp_path / "profile.json"
    assert run(["profile-step", *pid, "--duration", "0.4", "--output", str(target)]) == 0
    profile = json.loads(target.read_text())
    assert profile["duration_s"] == 0.4
    assert {"phases", "comm", "mem", "loader", "fused_share", "alloc_ms"} <= set(profile["summary"])
    capsys.readouterr()
    assert run(["profile-step", *folder, "--duration", "0.2"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["steps"] > 0
    assert run(["monitor-comm", *folder, "--interval", "0.05", "--count", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("step ") for line in lines)
    assert run(["debug-dmf", *pid, "--last", "3"]) == 0
    assert "separate (off)" in capsys.readouterr().out
    assert run(["switch-strategy", *pid, "--strategy", "simple"]) == 69
    assert "gradient scheduler is off or there is one rank" in capsys.readouterr().err


def test_fifty_attaches_leave_the_losses_as_they_are(tmp_path: Path) -> None:
    from loongforge.records import read_metrics

    run = LiveRun(tmp_path / "watched")
    path = socket_of(pid=os.getpid())
    for _ in range(50):
        ask(path, "status")
        with contextlib.suppress(ControlError):  # on a loaded machine no step may end in so short a time
            ask(path, "profile", duration_s=0.01, timeout_s=30)
    run.stop()
    watched = read_metrics(tmp_path / "watched")
    alone = LiveRun(tmp_path / "alone", steps=min(len(watched), 200))
    alone.thread.join(120)
    quiet = read_metrics(tmp_path / "alone")
    assert [r["loss"] for r in quiet] == [r["loss"] for r in watched[: len(quiet)]]
