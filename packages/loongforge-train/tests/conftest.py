"""Fixtures shared by the trainer's tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from loongforge.rank_testing import RankOutcome
from loongforge.rank_testing import run_ranks as run_on_ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[RankOutcome]]:
    """Run a script on several ranks; returns how each ended."""

    def start(
        script: str,
        *arguments: str,
        ranks: int = 2,
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
    ) -> list[RankOutcome]:
        folder = tmp_path / "ranks"
        return run_on_ranks(script, arguments, folder=folder, ranks=ranks, timeout_s=timeout, env=env)

    return start
