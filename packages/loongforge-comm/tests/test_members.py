"""Ranks are taken out and let in while a run goes on; what is left trains as if it had always been alone."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
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
from loongforge_comm.members import changing
from loongforge_comm.members.board import Board
from loongforge_comm.testing import free_port, seeded_batch, start_rank, tanh_mlp
from torch import Tensor, nn

QUICK = MembershipConfig(
    check_every=2, heartbeat_interval_s=0.1, heartbeat_timeout_s=1.5, agree_timeout_s=20.0, timeout_s=30.0
)
SCHEDULER = SchedulerConfig(
    heartbeat_interval_s=0.1, heartbeat_timeout_s=1.5, timeout_s=20.0, agree_timeout_s=20.0, warmup_steps=0
)
AT = 5
"""Step after which trouble begins."""


def scheduler_of(model: nn.Module) -> GradientScheduler:
    link = LinkModel.from_alpha_beta(0.01, 1.0, world_size=max(2, dist.get_world_size()))
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

    def __init__(
        self, members: Membership, folder: Path, *, last: int, before: Callable[[Loop], None] = lambda _: None
    ) -> None:
        self.members, self.folder, self.last, self.before = members, folder, last, before
        self.model = tanh_mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.story: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
        self._begin()

    def _begin(self) -> None:
        now = self.members.generation
        self.step = now.step
        self.scheduler = scheduler_of(self.model)
        if now.receivers:
            share_momentum(self.optimizer, self.model)
        self.members.settled()
        self.story.append((now.world_size, now.step, now.left, now.joined))

    def run(self) -> None:
        while self.step < self.last:
            change = self._one()
            if change is not None:
                self.scheduler.close()
                self.optimizer.zero_grad()
                self.members.enter(change)
                self._begin()
        self.scheduler.close()
        self.members.close(ended=True)
        weights = [p.detach().clone() for p in self.model.parameters()]
        torch.save({"weights": weights, "story": self.story}, self.folder / f"{self.members.member}.pt")

    def _one(self) -> Generation | None:
        try:
            self.before(self)
            self.model(seeded_batch(self.members.rank, self.step)).square().sum().backward()
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


def die(number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def last_dies(loop: Loop) -> None:
    """The founder with the highest rank is killed in mid-step."""
    if loop.members.member == loop.founders - 1 and loop.step == AT:  # type: ignore[attr-defined]
        die()


def last_stops(loop: Loop) -> None:
    """It is stopped instead."""
    if loop.members.member == loop.founders - 1 and loop.step == AT:  # type: ignore[attr-defined]
        die(signal.SIGSTOP)


def first_dies(loop: Loop) -> None:
    """Rank 0 is killed, which is whom the others ask at borders."""
    if loop.members.member == 0 and loop.step == AT:
        die()


def two_die_one_in_the_change(loop: Loop) -> None:
    """One is killed in mid-step; another one when all have met and connect."""
    last_dies(loop)
    if loop.members.member == 1:
        real = changing.make_groups

        def make_groups(*args: object, number: int, **kwargs: object) -> None:
            if number == 1:
                die()
            real(*args, number=number, **kwargs)  # type: ignore[arg-type]

        changing.make_groups = make_groups  # type: ignore[assignment]


def writer_dies(loop: Loop) -> None:
    """One is killed in mid-step; rank 0 when it is about to write the next record."""
    last_dies(loop)
    if loop.members.member == 0 and loop.step == AT:
        Board.publish = lambda *_: die()  # type: ignore[assignment]


def waits_for_requests(loop: Loop) -> None:
    """Rank 0 goes on behind the first step when as many processes ask as the test wants."""
    if loop.members.rank == 0 and loop.step == 1:
        wanted = int((loop.folder / "wanted").read_text())
        while len(loop.members._board.waiting()[1]) < wanted:
            time.sleep(0.01)


def dies_and_waits(loop: Loop) -> None:
    """A rank is lost, and one comes in its place: the others go on when it asks."""
    last_dies(loop)
    if loop.members.rank == 0 and loop.step == AT and loop.members.generation.number == 1:
        while not loop.members._board.waiting()[1]:
            time.sleep(0.01)


def founder(
    rank: int, world: int, port: int, folder: str, before: str, last: int, config: MembershipConfig
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    try:
        members = Membership.found("gloo", store=f"127.0.0.1:{port}", config=config)
        path = Path(folder) / "address"
        path.with_suffix(f".{rank}").write_text(members.address)
        path.with_suffix(f".{rank}").replace(path)
        Loop.founders = world  # type: ignore[attr-defined]
        Loop(members, Path(folder), last=last, before=globals()[before]).run()
    except Exception as error:  # the test reads how each process ended
        (Path(folder) / f"{rank}.error").write_text(f"{type(error).__name__}: {error}")
        raise


def joiner(name: str, folder: str, last: int, party: str | None, size: int) -> None:
    address = (Path(folder) / "address").read_text()
    try:
        members = Membership.join("gloo", address=address, config=QUICK, party=party, size=size, limit_s=60.0)
        Loop(members, Path(folder), last=last).run()
    except Exception as error:
        (Path(folder) / f"{name}.error").write_text(f"{type(error).__name__}: {error}")
        raise


class Host:
    """Processes of one run and the store that outlives them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # torch's store asks for the name of whoever connects: where nobody answers that, it waits.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        self.port = free_port()
        self.store = dist.TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        self.processes: list[BaseProcess] = []

    def begin(self, world: int, before: str, *, last: int, config: MembershipConfig = QUICK) -> None:
        arguments = [
            (rank, world, self.port, str(self.folder), before, last, config) for rank in range(world)
        ]
        self.processes += [start_rank(founder, *args) for args in arguments]

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 60.0
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"{name} was not written"
            time.sleep(0.02)

    def join(self, name: str, *, last: int, party: str | None = None, size: int = 1) -> BaseProcess:
        self.wait_for("address")
        process = start_rank(joiner, name, str(self.folder), last, party, size)
        self.processes.append(process)
        return process

    def end(self, *places: int, limit_s: float = 60.0) -> None:
        """Wait for processes, which must end well."""
        deadline = time.monotonic() + limit_s
        for place in places:
            self.processes[place].join(max(0.1, deadline - time.monotonic()))
        codes = [p.exitcode for p in self.processes]
        errors = {p.name: p.read_text() for p in self.folder.glob("*.error")}
        assert all(codes[place] == 0 for place in places), (codes, errors)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)

    def result(self, member: int) -> tuple[list[Tensor], list[object]]:
        kept = torch.load(self.folder / f"{member}.pt")
        return kept["weights"], kept["story"]


@pytest.fixture
def host(tmp_path: Path) -> object:
    made = Host(tmp_path)
    yield made
    made.close()


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


def assert_close(weights: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def assert_equal(*results: list[Tensor]) -> None:
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# -- losses ----------------------------------------------------------------------------------------


def test_the_others_go_on_without_a_rank_that_was_killed(host: Host) -> None:
    host.begin(3, "last_dies", last=9)
    host.end(0, 1)
    results = [host.result(member) for member in (0, 1)]
    for weights, story in results:
        assert_close(weights, alone([(3, AT), (2, 4)]))
        assert story == [(3, 0, (), ()), (2, AT, (2,), ())]
    assert_equal(results[0][0], results[1][0])


def test_a_stopped_rank_is_left_out_and_ends_when_it_wakes_up(host: Host) -> None:
    host.begin(3, "last_stops", last=9)
    host.end(0, 1)
    weights, story = host.result(0)
    assert_close(weights, alone([(3, AT), (2, 4)]))
    assert story[1] == (2, AT, (2,), ())
    os.kill(host.processes[2].pid or 0, signal.SIGCONT)
    host.processes[2].join(60)
    assert host.processes[2].exitcode == 1
    assert (host.folder / "2.error").read_text().startswith("RemovedError: member 2 did not answer")
    assert not (host.folder / "2.pt").exists()


def test_the_others_go_on_without_rank_zero_when_the_store_lives_elsewhere(host: Host) -> None:
    host.begin(3, "first_dies", last=9)
    host.end(1, 2)
    weights, story = host.result(1)
    # The ranks are numbered anew: member 1 now has the batches of rank 0.
    assert_close(weights, alone([(3, AT), (2, 4)]))
    assert story == [(3, 0, (), ()), (2, AT, (0,), ())]
    assert_equal(weights, host.result(2)[0])


def test_a_second_loss_while_groups_are_made_is_one_more_change(host: Host) -> None:
    host.begin(4, "two_die_one_in_the_change", last=9, config=replace(QUICK, agree_timeout_s=4.0))
    host.end(0, 2)
    weights, story = host.result(0)
    assert_close(weights, alone([(4, AT), (2, 4)]))
    assert story == [(4, 0, (), ()), (2, AT, (1,), ())]
    assert_equal(weights, host.result(2)[0])


def test_the_last_one_goes_on_alone_when_the_writer_of_the_record_dies_too(host: Host) -> None:
    host.begin(3, "writer_dies", last=9)
    host.end(1)
    weights, story = host.result(1)
    assert_close(weights, alone([(3, AT), (1, 4)]))
    assert story == [(3, 0, (), ()), (1, AT, (0, 2), ())]


# -- joining ---------------------------------------------------------------------------------------


def test_a_process_joins_at_a_step_border_with_the_state_of_the_others(host: Host) -> None:
    host.begin(3, "dies_and_waits", last=14)
    host.processes[2].join(60)
    host.join("late", last=14)
    host.end(0, 1, 3)
    results = [host.result(member) for member in (0, 1, 3)]
    story = results[0][1]
    joined = AT + 1
    assert story == [(3, 0, (), ()), (2, AT, (2,), ()), (3, joined, (), (3,))]
    assert joined % QUICK.check_every == 0
    assert_close(results[0][0], alone([(3, AT), (2, joined - AT), (3, 14 - joined)]))
    assert_equal(*[weights for weights, _ in results])


def test_a_party_comes_in_together_and_one_that_died_waiting_is_not_waited_for(host: Host) -> None:
    (host.folder / "wanted").write_text("3")
    host.begin(2, "waits_for_requests", last=14)
    gone = host.join("gone", last=14)
    board = Board(dist.PrefixStore("none/0/loongforge_members", host.store))
    deadline = time.monotonic() + 30.0
    while not board.waiting()[1]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gone.kill()
    gone.join(10)
    for name in ("one", "two"):
        host.join(name, last=14, party="node", size=2)
    host.end(0, 1, 3, 4)
    results = [host.result(member) for member in (0, 1, 2, 3)]
    joined = QUICK.check_every
    assert results[0][1] == [(2, 0, (), ()), (4, joined, (), (2, 3))]
    assert_close(results[0][0], alone([(2, joined), (4, 14 - joined)]))
    assert_equal(*[weights for weights, _ in results])


# -- many changes ----------------------------------------------------------------------------------


def changes(rank: int, world: int, port: int, folder: str) -> None:
    """Thirty changes with nobody lost; what is open before and after."""
    logging.getLogger("loongforge_comm").setLevel(logging.ERROR)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    config = replace(QUICK, timeout_s=2.0)
    members = Membership.found("gloo", store=f"127.0.0.1:{port}", config=config)
    counts, total = [], torch.zeros(1)
    for number in range(30):
        scheduler = scheduler_of(model := tanh_mlp())
        model(seeded_batch(rank, number)).sum().backward()
        total += sum(p.grad.sum() for p in model.parameters() if p.grad is not None)
        scheduler.close()
        del scheduler, model
        members.enter(members.recover(number))
        if number in (0, 29):
            counts.append(settled_counts(counts[0] if counts else None))
    dist.all_reduce(total)
    members.close(ended=True)
    torch.save(counts, Path(folder) / f"{rank}.counts")


def settled_counts(wanted: tuple[int, int] | None) -> tuple[int, int]:
    """(threads, open files) when the groups that were given up have run into their limit."""
    gc.collect()  # a scheduler's parts refer to each other
    deadline = time.monotonic() + 15.0
    while True:
        names = [thread.name for thread in threading.enumerate()]
        now = (len(names), len(os.listdir("/proc/self/fd")))  # noqa: PTH208
        quiet = "loongforge-comm-retired" not in names and (wanted is None or now <= wanted)
        if quiet or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


def test_thirty_changes_leave_no_threads_and_no_open_files(host: Host) -> None:
    host.processes += [start_rank(changes, rank, 2, host.port, str(host.folder)) for rank in range(2)]
    host.end(0, 1, limit_s=120.0)
    for rank in range(2):
        before, after = torch.load(host.folder / f"{rank}.counts")
        assert after[0] <= before[0]
        assert after[1] <= before[1]
