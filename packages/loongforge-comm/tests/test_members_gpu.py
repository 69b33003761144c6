"""Losses and joins over NCCL: a host that waits for its device is freed, and no half sum becomes a weight."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from loongforge_comm import (
    Generation,
    GradientScheduler,
    LinkModel,
    Membership,
    MembershipConfig,
    RankFailureError,
    RemovedError,
    SchedulerConfig,
)
from loongforge_comm.testing import free_port, seeded_batch, start_rank, tanh_mlp
from torch import Tensor, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs NCCL"),
]

CONFIG = MembershipConfig(
    check_every=2, heartbeat_interval_s=0.1, heartbeat_timeout_s=2.0, agree_timeout_s=60.0, timeout_s=60.0
)
SCHEDULER = SchedulerConfig(
    heartbeat_interval_s=0.1, heartbeat_timeout_s=2.0, timeout_s=60.0, agree_timeout_s=60.0, warmup_steps=0
)
BACKENDS = "cpu:gloo,cuda:nccl"
AT, LAST = 5, 12
WIDTH = 64
TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (3e-2, 3e-2)}


def network(dtype: torch.dtype) -> nn.Sequential:
    return tanh_mlp(width=WIDTH).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int, device: str, dtype: torch.dtype) -> Tensor:
    return model(seeded_batch(rank, step, WIDTH).to(device, dtype)).float().square().mean()


class Loop:
    """A training loop on one GPU that outlives its ranks."""

    def __init__(self, members: Membership, device: str, dtype: torch.dtype, trouble: str) -> None:
        self.members, self.device, self.dtype, self.trouble = members, device, dtype, trouble
        self.model = network(dtype).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.story: list[tuple[int, int]] = []
        self._begin()

    def _begin(self) -> None:
        now = self.members.generation
        self.step = now.step
        link = LinkModel.from_alpha_beta(0.01, 1.0, world_size=max(2, now.world_size))
        self.scheduler = GradientScheduler(self.model, config=SCHEDULER, link=link)
        if now.receivers:
            for parameter in self.model.parameters():
                state = self.optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                dist.broadcast(state["momentum_buffer"], 0)
        self.members.commit()
        self.members.settled()
        self.story.append((now.world_size, now.step))

    def run(self, path: Path) -> None:
        while self.step < LAST:
            change = self._one()
            if change is not None:
                self.scheduler.close()
                self.optimizer.zero_grad()
                self.members.enter(change)
                self._begin()
        self.scheduler.close()
        self.members.close(ended=True)
        torch.save(
            {"weights": [p.detach().cpu() for p in self.model.parameters()], "story": self.story}, path
        )

    def _one(self) -> Generation | None:
        try:
            self._before()
            loss_of(self.model, self.members.rank, self.step, self.device, self.dtype).backward()
            self.members.commit()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.scheduler.step_end(self.step)
            return self.members.border(self.step)
        except RemovedError:
            raise
        except RankFailureError:
            return self.members.recover(self.step)

    def _before(self) -> None:
        if self.trouble in ("SIGKILL", "SIGSTOP") and self.members.member == 1 and self.step == AT:
            torch.cuda.synchronize()
            os.kill(os.getpid(), getattr(signal, self.trouble))
        if self.trouble == "join" and self.step == 1:
            while not self.members._board.waiting()[1]:
                time.sleep(0.01)


def founder(rank: int, world: int, port: int, folder: str, dtype: torch.dtype, trouble: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.cuda.set_device(rank)
    try:
        members = Membership.found(BACKENDS, store=f"127.0.0.1:{port}", config=CONFIG)
        (Path(folder) / f"address.{rank}").write_text(members.address)
        Loop(members, f"cuda:{rank}", dtype, trouble).run(Path(folder) / f"{rank}.pt")
    except Exception as error:  # the test reads how each process ended
        (Path(folder) / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
        raise


def joiner(address: str, folder: str, dtype: torch.dtype) -> None:
    torch.cuda.set_device(1)
    try:
        members = Membership.join(BACKENDS, address=address, config=CONFIG, limit_s=120.0)
        Loop(members, "cuda:1", dtype, "").run(Path(folder) / "1.pt")
    except Exception as error:
        (Path(folder) / "1.error").write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.fixture
def processes() -> Iterator[list[BaseProcess]]:
    made: list[BaseProcess] = []
    yield made
    for process in made:
        process.kill()
        process.join(10)


def stored() -> tuple[dist.TCPStore, int]:
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    port = free_port()
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False), port


def alone(schedule: list[tuple[int, int]], dtype: torch.dtype) -> list[Tensor]:
    """Weights after training on one GPU: (ranks, steps) one after the other, averaged by hand."""
    model = network(dtype).to("cuda:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    for world, steps in schedule:
        for _ in range(steps):
            for rank in range(world):
                (loss_of(model, rank, step, "cuda:0", dtype) / world).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return [p.detach().cpu() for p in model.parameters()]


def assert_close(weights: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    relative, absolute = TOLERANCES[dtype]
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=relative, atol=absolute)


def ended(folder: Path, process: BaseProcess) -> None:
    process.join(120)
    errors = {p.name: p.read_text() for p in folder.glob("*.error")}
    assert process.exitcode == 0, (process.exitcode, errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trouble", ["SIGKILL", "SIGSTOP"])
def test_a_gpu_goes_on_without_the_one_that_is_gone(
    trouble: str, dtype: torch.dtype, tmp_path: Path, processes: list[BaseProcess]
) -> None:
    _store, port = stored()
    processes += [start_rank(founder, r, 2, port, str(tmp_path), dtype, trouble) for r in range(2)]
    ended(tmp_path, processes[0])
    kept = torch.load(tmp_path / "0.pt")
    assert kept["story"] == [(2, 0), (1, AT)]
    assert_close(kept["weights"], alone([(2, AT), (1, LAST - AT)], dtype), dtype)
    if trouble == "SIGSTOP":
        os.kill(processes[1].pid or 0, signal.SIGCONT)
        processes[1].join(120)
        assert processes[1].exitcode not in (0, None)
        assert not (tmp_path / "1.pt").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_joins_with_the_state_of_the_others(
    dtype: torch.dtype, tmp_path: Path, processes: list[BaseProcess]
) -> None:
    _store, port = stored()
    processes.append(start_rank(founder, 0, 1, port, str(tmp_path), dtype, "join"))
    address = tmp_path / "address.0"
    deadline = time.monotonic() + 120
    while not address.exists() or not address.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes.append(start_rank(joiner, address.read_text(), str(tmp_path), dtype))
    for process in processes:
        ended(tmp_path, process)
    first, second = (torch.load(tmp_path / f"{place}.pt") for place in (0, 1))
    assert first["story"] == [(1, 0), (2, 2)]
    assert_close(first["weights"], alone([(1, 2), (2, LAST - 2)], dtype), dtype)
    assert all(torch.equal(a, b) for a, b in zip(first["weights"], second["weights"], strict=True))


def waits(rank: int, port: int, folder: str) -> None:
    """Rank 1 takes no part in a collective but lives: nobody may wait for it longer than the limit."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    torch.cuda.set_device(rank)
    config = replace(CONFIG, timeout_s=3.0)
    members = Membership.found(BACKENDS, store=f"127.0.0.1:{port}", config=config)
    total = torch.ones(4, device=f"cuda:{rank}")
    dist.all_reduce(total)
    members.commit()
    if rank == 0:
        begin = time.monotonic()
        dist.all_reduce(total)
        try:
            members.commit()
        except RankFailureError as error:
            (Path(folder) / "error").write_text(f"{time.monotonic() - begin:.1f} {error}")
    else:
        while not (Path(folder) / "error").exists():
            time.sleep(0.05)
    os._exit(0)


def test_the_wait_for_a_device_has_a_limit_when_everybody_lives(
    tmp_path: Path, processes: list[BaseProcess]
) -> None:
    _store, port = stored()
    processes += [start_rank(waits, rank, port, str(tmp_path)) for rank in range(2)]
    ended(tmp_path, processes[0])
    seconds, _, words = (tmp_path / "error").read_text().partition(" ")
    assert float(seconds) < 20
    assert "the device did not finish within the limit of 3 s" in words
