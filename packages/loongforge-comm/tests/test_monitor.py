"""What the live view is fed with when the plan drives stock DDP."""

import json
from io import StringIO
from pathlib import Path

import pytest
from loongforge_comm import GradientScheduler, LinkModel, SchedulerConfig
from loongforge_comm.monitor import render
from loongforge_comm.testing import run_ranks, seeded_batch, tanh_mlp
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel


def planned_only(rank: int, world_size: int, folder: str) -> list[dict[str, object]]:
    return [one_run(rank, Path(folder) / f"{compress}.json", compress) for compress in ("off", "bf16")]


def one_run(rank: int, path: Path, compress: str) -> dict[str, object]:
    """Stock DDP driven by the plan, with a status file: the monitor sees buckets, the numbers stay."""
    model, reference = tanh_mlp(), DistributedDataParallel(tanh_mlp())
    config = SchedulerConfig(
        mode="plan-only", heartbeat_interval_s=0.0, heartbeat_every=4, status_path=path, compress=compress
    )
    link = LinkModel.from_alpha_beta(0.0, 0.001)
    with GradientScheduler(model, config=config, link=link) as scheduler:
        for step in range(6):
            for call in (scheduler.module, reference):
                call.zero_grad()
                with call.no_sync():
                    call(seeded_batch(rank, step)).sum().backward()
                call(seeded_batch(rank, step + 100)).sum().backward()
            scheduler.step_end(step)
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        gap = max((a.grad - b.grad).abs().max().item() for a, b in pairs)
        for ask in (scheduler.rebuild, lambda: scheduler.switch_strategy("simple")):
            with pytest.raises(ValueError, match="mode is 'plan-only'"):
                ask()
    return {"gap": gap, "status": json.loads(path.read_text()) if rank == 0 else None}


def test_plan_only_feeds_the_monitor_and_changes_no_number(tmp_path: Path) -> None:
    outcomes = run_ranks(planned_only, 2, str(tmp_path), timeout_s=90.0)
    assert all(outcomes)
    for left, right, limit in zip(*outcomes, (0.0, 0.2), strict=True):
        assert max(left["gap"], right["gap"]) <= limit
        status = left["status"]
        assert status["synced_backwards"] == 6
        assert 0.0 <= status["overlap_mean"] <= 1.0
        assert status["exposed_ms"] >= 0.0
        assert next(iter(status["groups"].values()))["mean_ms"] > 0.0
        assert set(status["ranks"]["waiting_ms"]) == {"0", "1"}
        console = Console(width=120, record=True, file=StringIO())
        console.print(render(status, now=status["time_unix"]))
        assert "collectives by group" in console.export_text()
