"""Ports of test groups cannot be taken by connections that go out."""

import socket
from pathlib import Path

import pytest
from loongforge_comm.testing import free_port

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_a_free_port_lies_below_those_that_the_system_hands_out():
    if not RANGE.is_file():
        pytest.skip("the system does not say which ports it hands out")
    lowest = int(RANGE.read_text().split()[0])
    assert all(free_port() < lowest for _ in range(50))


def test_a_port_somebody_listens_on_is_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        busy = taken.getsockname()[1]
        other = free_port()
        choices = iter([busy, busy, other])
        monkeypatch.setattr("loongforge_comm.testing.secrets.choice", lambda _: next(choices))
        assert free_port() == other
