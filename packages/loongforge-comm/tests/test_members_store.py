"""The run's store: a process of its own, its loss, its hanging, and addresses that are none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from loongforge_comm import Membership, MembershipConfig, RankFailureError
from loongforge_comm.members import changing
from loongforge_comm.members.store import BoundedStore, connect

CONFIG = MembershipConfig(
    check_every=1, heartbeat_interval_s=0.05, heartbeat_timeout_s=0.5, agree_timeout_s=10.0, timeout_s=10.0
)


def without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changing, "make_groups", lambda *_, **__: None)
    monkeypatch.setattr(changing, "give_up_groups", lambda **_: None)


class Server:
    """The command's store in a process of its own."""

    def __init__(self) -> None:
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "loongforge_comm", "store", "--host", "127.0.0.1", "--port", "0"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words[:2] == ["store", "at"], words
        self.where = words[2]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_the_store_of_its_own_serves_runs_until_it_is_interrupted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_groups(monkeypatch)
    monkeypatch.setattr(os, "environ", {**os.environ, "RANK": "0", "WORLD_SIZE": "1"})
    members = Membership.found("gloo", store=server.where, config=CONFIG)
    assert members.address == f"{server.where}/none/0"
    assert members.border(1) is None
    with pytest.raises(ValueError, match="already holds a run of this name"):
        Membership.found("gloo", store=server.where, config=CONFIG)
    members.close(ended=True)
    server.send(signal.SIGINT)
    assert server.process.wait(10) == 130


def test_every_question_to_a_store_that_is_gone_ends_with_an_error(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_groups(monkeypatch)
    monkeypatch.setattr(os, "environ", {**os.environ, "RANK": "0", "WORLD_SIZE": "1"})
    members = Membership.found("gloo", store=server.where, config=CONFIG)
    server.close()
    for question in (lambda: members.border(1), lambda: members.recover(1), lambda: members.check(ask=True)):
        with pytest.raises(RankFailureError, match="store is gone"):
            question()
    members.close(ended=True)
    with pytest.raises(ConnectionError, match="no store answers"):
        connect(members.address, limit_s=1.0)


def test_a_store_that_hangs_is_not_waited_for_for_ever(server: Server) -> None:
    bounded = BoundedStore(connect(f"{server.where}/x"), 0.3)
    assert bounded.call(lambda store: store.add("a", 1)) == 1
    server.send(signal.SIGSTOP)
    with pytest.raises(RankFailureError, match=r"has not answered for 0\.3 s"):
        bounded.call(lambda store: store.add("a", 1))
    server.send(signal.SIGCONT)
    deadline = time.monotonic() + 20.0
    while not _answers(bounded):
        assert time.monotonic() < deadline


def _answers(bounded: BoundedStore) -> bool:
    try:
        return bounded.call(lambda store: store.check(["a"]))
    except RankFailureError:
        return False


@pytest.mark.parametrize("address", ["host:1", "host/x", ":1/x", "host:port/x"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="allowed is HOST:PORT/PREFIX"):
        connect(address)


def test_a_rank_that_torchrun_did_not_start_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        Membership.found("gloo")
