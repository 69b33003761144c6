"""Fixtures shared by the trainer's tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

SOURCES = Path(__file__).resolve().parents[1] / "src"


@pytest.fixture
def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def run_ranks(tmp_path: Path, free_port: int) -> Callable[..., list[subprocess.CompletedProcess[str]]]:
    """Run a script on several ranks with torchrun's variables; returns the finished processes."""

    def start(
        script: str,
        *arguments: str,
        ranks: int = 2,
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
    ) -> list[subprocess.CompletedProcess[str]]:
        path = tmp_path / "rank_script.py"
        path.write_text(script)
        processes = []
        for rank in range(ranks):
            variables = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                **(env or {}),
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(path), *arguments],
                    env=variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        done = []
        try:
            for process in processes:
                out, err = process.communicate(timeout=timeout)
                done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        return done

    return start
