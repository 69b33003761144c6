"""Fixtures shared by the trainer's tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from loongforge.config import TrainConfig
from loongforge.rank_testing import RankOutcome
from loongforge.rank_testing import run_ranks as run_on_ranks
from loongforge.ranks import Ranks
from loongforge.session import Session, build_parts
from loongforge.sources import BatchSource
from loongforge.testing import ToyData, ToyModel, collate
from torch import nn
from torch.utils.data import DataLoader

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


def make_session(
    run: Path, *, model: nn.Module | None = None, length: int = 64, **settings: object
) -> Session:
    config = TrainConfig(
        **{
            "output": str(run),
            "epochs": 2,
            "batch_size": 8,
            "schedule": "cosine",
            "control": False,
            **settings,
        }
    )
    torch.manual_seed(0)
    data = ToyData(length)
    loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate)
    source = BatchSource(loader, fingerprint=data.fingerprint)
    ranks = Ranks(rank=0, world_size=1, device=torch.device("cpu"))
    return Session(config, build_parts(config, model or ToyModel(), source, ranks))


@pytest.fixture
def session() -> Callable[..., Session]:
    """Make a session of the toy model in a run directory, from keyword settings."""
    return make_session
