"""Ranks are taken out and let in while a run goes on; what is left trains as if it had always been alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
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
from loongforge_comm.testing import free_port, seeded_batch, tanh_mlp
from torch import Tensor, nn

QUICK = MembershipConfig(
    check_every=2, heartbeat_interval_s=0.1, heartbeat_timeout_s=1.5, agree_timeout_s=20.0, timeout_s=30.0
)
SCHEDULER = SchedulerConfig(
    heartbeat_interval_s=0.1, heartbeat_timeout_s=1.5, timeout_s=20.0, agree_timeout_s=20.0, warmup_steps=0
)


def scheduler_of(model: nn.Module) -> GradientScheduler:
    link = LinkModel.from_alpha_beta(0.01, 1.0, world_size=dist.get_world_size())
    return GradientScheduler(model, config=SCHEDULER, link=link)


def share_momentum(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Send rank 0's momentum to everybody."""
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        dist.broadcast(state["momentum_buffer"], 0)


class Loop:
    """A hand-written training loop that outlives its ranks."""

    def __init__(self, members: Membership, folder: Path, *, last: int) -> None:
        self.members, self.folder, self.last = members, folder, last
        self.model = tanh_mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = scheduler_of(self.model)
        self.step = members.generation.step
        self.story: list[dict[str, object]] = []
        self._begin()

    def _begin(self) -> None:
        generation = self.members.generation
        if generation.receivers:
            share_momentum(self.optimizer, self.model)
        self.story.append({"generation": generation.number, "world": generation.world_size,
                           "step": generation.step, "left": generation.left, "time": time.time()})  # fmt: skip

    def run(self) -> None:
        while self.step < self.last:
            change = self._one()
            if change is not None:
                self.scheduler.close()
                self.optimizer.zero_grad()
                self.step = self.members.enter(change).step
                self.scheduler = scheduler_of(self.model)
                self._begin()
        self.scheduler.close()
        self.members.close(ended=True)
        self.save()

    def _one(self) -> Generation | None:
        try:
            self.before(self.step)
            self.model(seeded_batch(self.members.rank, self.step)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.scheduler.step_end(self.step)
            return self.members.border(self.step)
        except RemovedError:
            raise
        except RankFailureError:
            return self.members.recover(self.step)

    def before(self, step: int) -> None:
        """Trouble of a test goes here."""

    def save(self) -> None:
        weights = [p.detach().clone() for p in self.model.parameters()]
        torch.save({"weights": weights, "story": self.story}, self.folder / f"{self.members.member}.pt")


class Doomed(Loop):
    """Member 2 dies, stops, or dies in mid-change."""

    kind = ""
    at = 5

    def before(self, step: int) -> None:
        if self.members.member == 2 and step == self.at:
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        if self.members.generation.number and self.kind == "join" and step >= self.last - 1:
            time.sleep(0.05)


def founder(rank: int, world: int, port: int, folder: str, kind: str, last: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    torch.set_num_threads(1)
    try:
        members = Membership.found("gloo", store=f"127.0.0.1:{port}", config=QUICK)
        (Path(folder) / "address").write_text(members.address)
        loop = Doomed(members, Path(folder), last=last)
        loop.kind = kind
        loop.run()
    except Exception as error:  # the test reads how each process ended
        (Path(folder) / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
        raise


def joiner(folder: str, last: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    address = (Path(folder) / "address").read_text()
    members = Membership.join("gloo", address=address, config=QUICK, limit_s=30.0)
    Loop(members, Path(folder), last=last).run()


class Host:
    """Processes of one run and the store that outlives them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.store = dist.TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        self._context = multiprocessing.get_context("spawn")
        self.processes: list[multiprocessing.process.BaseProcess] = []

    def start(self, target: object, *arguments: object) -> multiprocessing.process.BaseProcess:
        process = self._context.Process(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        process.start()
        self.processes.append(process)
        return process

    def begin(self, world: int, kind: str, *, last: int) -> None:
        for rank in range(world):
            self.start(founder, rank, world, self.port, str(self.folder), kind, last)

    def end(self, *ranks: int, limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        for rank in ranks:
            self.processes[rank].join(max(0.1, deadline - time.monotonic()))
        codes = [p.exitcode for p in self.processes]
        for process in self.processes:
            process.kill()
            process.join(10)
        errors = {p.name: p.read_text() for p in self.folder.glob("*.error")}
        assert all(codes[rank] == 0 for rank in ranks), (codes, errors)

    def result(self, member: int) -> dict[str, object]:
        return torch.load(self.folder / f"{member}.pt")


def alone(schedule: list[tuple[int, int]]) -> list[Tensor]:
    """Weights after training on one process: (ranks, steps) one after the other, averaged by hand."""
    model = tanh_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    for world, steps in schedule:
        for _ in range(steps):
            for rank in range(world):
                (model(seeded_batch(rank, step)).square().sum() / world).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return [p.detach() for p in model.parameters()]


def assert_close(weights: object, expected: list[Tensor]) -> None:
    for ours, theirs in zip(weights, expected, strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_the_others_go_on_without_a_rank_that_is_gone(kind: str, tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.begin(3, kind, last=9)
    host.end(0, 1)
    results = [host.result(member) for member in (0, 1)]
    expected = alone([(3, 5), (2, 4)])
    for result in results:
        assert_close(result["weights"], expected)
        story = result["story"]
        assert [(s["world"], s["step"], tuple(s["left"])) for s in story] == [(3, 0, ()), (2, 5, (2,))]
    for a, b in zip(results[0]["weights"], results[1]["weights"], strict=True):
        assert torch.equal(a, b)


def test_a_process_joins_at_a_step_border_with_the_state_of_the_others(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.begin(3, "kill", last=400)
    while not (tmp_path / "address").exists() or host.processes[2].is_alive():
        host.processes[2].join(0.05)
    late = host.start(joiner, str(tmp_path), 400)
    host.end(0, 1, 3, limit_s=80.0)
    assert late.exitcode == 0
    results = [host.result(member) for member in (0, 1, 3)]
    story = results[0]["story"]
    assert [s["world"] for s in story] == [3, 2, 3]
    joined = story[2]["step"]
    assert joined % QUICK.check_every == 0
    expected = alone([(3, 5), (2, joined - 5), (3, 400 - joined)])
    assert_close(results[0]["weights"], expected)
    for a, b in zip(results[0]["weights"], results[2]["weights"], strict=True):
        assert torch.equal(a, b)
