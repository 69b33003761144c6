"""How members agree, in one process: a store, a thread for each member, and no process groups."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist
from loongforge_comm import Generation, Membership, MembershipConfig, RankFailureError, RemovedError
from loongforge_comm.members import changing
from loongforge_comm.members.admission import Admission
from loongforge_comm.members.agreeing import FoundingError
from loongforge_comm.members.board import VOID, Board, JoinRequest
from loongforge_comm.members.generation import after_join, after_loss, first
from loongforge_comm.members.store import connect
from loongforge_comm.members.watching import PREFIX
from loongforge_comm.testing import free_port

CONFIG = MembershipConfig(
    check_every=1, heartbeat_interval_s=0.05, heartbeat_timeout_s=0.5, agree_timeout_s=10.0, timeout_s=10.0
)
LIMIT_S = 20.0


class Town:
    """Members of one run that live in threads of this process."""

    def __init__(self, world: int) -> None:
        # torch's store asks for the name of whoever connects: where nobody answers that, it waits.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        self.port = free_port()
        self.server = dist.TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        self.address = f"127.0.0.1:{self.port}/run/0"
        self.board = Board(dist.PrefixStore(PREFIX, connect(self.address)))
        self.begin = self.board.publish(first(world))
        self.members: list[Membership] = []

    def member(
        self, number: int, generation: Generation | None = None, config: MembershipConfig = CONFIG
    ) -> Membership:
        made = Membership(
            self.address, member=number, generation=generation or self.begin, backend="gloo",
            config=config, store=connect(self.address),
        )  # fmt: skip
        self.members.append(made)
        return made

    def all(self, config: MembershipConfig = CONFIG) -> list[Membership]:
        made = [self.member(number, config=config) for number in self.begin.members]
        together(*[lambda m=m: m.enter(self.begin) for m in made])
        return made

    def close(self) -> None:
        for member in self.members:
            if not hasattr(member._watch.liveness, "frozen"):
                member.close()


@pytest.fixture
def towns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Town]]:
    monkeypatch.setattr(changing, "make_groups", lambda *_, **__: None)
    monkeypatch.setattr(changing, "give_up_groups", lambda **_: None)
    made: list[Town] = []

    def build(world: int) -> Town:
        made.append(Town(world))
        return made[-1]

    yield build
    for town in made:
        town.close()


def together(*calls: Callable[[], object]) -> list[object]:
    """Run calls at the same time; return results, or the errors they ended with, in order."""
    results: list[object] = [TimeoutError("did not end")] * len(calls)

    def one(place: int) -> None:
        try:
            results[place] = calls[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=one, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return results


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.005)


def freeze(member: Membership) -> None:
    """As SIGSTOP or SIGKILL: no beat any more, and no goodbye."""
    live = member._watch.liveness
    with live._turn:
        live._round = lambda: None  # type: ignore[method-assign]
    live.frozen = True  # type: ignore[attr-defined]


def wake(member: Membership) -> None:
    live = member._watch.liveness
    del live._round
    del live.frozen  # type: ignore[attr-defined]


# -- losses ----------------------------------------------------------------------------------------


def test_the_others_agree_without_a_rank_that_fell_silent(towns: Callable[[int], Town]) -> None:
    a, b, c = towns(3).all()
    freeze(c)
    records = together(lambda: a.recover(4), lambda: b.recover(5))
    assert records[0] == records[1]
    assert isinstance(records[0], Generation)
    assert (records[0].members, records[0].step, records[0].behind) == ((1, 0), 5, (0,))
    entered = together(lambda: a.enter(records[0]), lambda: b.enter(records[0]))  # type: ignore[arg-type]
    assert entered == records
    assert (a.rank, b.rank, a.receives, b.receives) == (1, 0, True, False)


def test_two_losses_at_once_are_one_change(towns: Callable[[int], Town]) -> None:
    a, b, c, d = towns(4).all()
    freeze(a)
    freeze(c)
    records = together(lambda: b.recover(3), lambda: d.recover(3))
    assert [r.members for r in records] == [(1, 3), (1, 3)]  # type: ignore[attr-defined]


def test_another_writes_the_record_when_the_one_whose_turn_it_is_dies(towns: Callable[[int], Town]) -> None:
    town = towns(3)
    a, b, c = town.all()
    freeze(c)
    freeze(a)
    town.board.say_ready(0, a.member, 7)  # the lowest is ready, and dies before it writes
    record = b.recover(7)
    assert record.members == (1,)
    assert record.left == (0, 2)


def test_one_that_dies_after_arriving_is_left_out_of_the_next_generation(
    towns: Callable[[int], Town],
) -> None:
    town = towns(3)
    a, b, c = town.all()
    freeze(c)
    town.board.say_ready(0, b.member, 5)
    record = together(lambda: a.recover(5))[0]
    freeze(b)  # ready, but it never comes
    assert isinstance(record, Generation)
    assert record.members == (0, 1)
    assert a.enter(record).members == (0,)


def test_a_rank_that_is_slow_but_alive_is_waited_for(towns: Callable[[int], Town]) -> None:
    town = towns(3)
    a, b, c = town.all()
    freeze(c)
    results: list[object] = []
    early = threading.Thread(target=lambda: results.append(a.recover(2)), daemon=True)
    early.start()
    until(lambda: set(a._watch.liveness.quiet()) == {2})
    assert town.board.generation(1) is None  # for want of b, which is alive
    results.append(b.recover(2))
    early.join(LIMIT_S)
    assert [r.members for r in results] == [(0, 1), (0, 1)]  # type: ignore[attr-defined]


def test_a_rank_that_is_slow_beyond_the_limit_is_taken_out_and_learns_it(
    towns: Callable[[int], Town],
) -> None:
    town = towns(2)
    a, b = town.all(replace(CONFIG, agree_timeout_s=1.0))
    assert a.recover(2).members == (0,)
    with pytest.raises(RemovedError, match="the others went on without it as generation 1 from step 2"):
        b.recover(2)


def test_too_few_ranks_end_with_an_error_on_each(towns: Callable[[int], Town]) -> None:
    a, b, c = towns(3).all(replace(CONFIG, min_ranks=3))
    freeze(c)
    errors = together(lambda: a.recover(2), lambda: b.recover(2))
    for error in errors:
        assert isinstance(error, RankFailureError)
        assert "only 2 of 3 ranks are left and min_ranks is 3" in str(error)
        assert error.ranks == (2,)


def test_a_failure_after_the_end_says_that_the_run_has_ended(towns: Callable[[int], Town]) -> None:
    a, b = towns(2).all()
    a.close(ended=True)
    with pytest.raises(RankFailureError, match="have finished the run"):
        b.recover(8)


# -- state -----------------------------------------------------------------------------------------


def test_a_process_that_came_counts_as_stateless_until_it_has_rank_zeros_state(
    towns: Callable[[int], Town],
) -> None:
    town = towns(1)
    (a,) = town.all()
    change = town.board.publish(after_join(town.begin, 1, step=6))
    b = town.member(1, change)
    together(lambda: a.enter(change), lambda: b.enter(change))
    assert b.receives
    records = together(lambda: a.recover(6), lambda: b.recover(change.step))  # failed before the state came
    assert records[0] == records[1]
    assert (records[0].members, records[0].behind) == ((0, 1), (1,))  # type: ignore[attr-defined]
    together(lambda: a.enter(records[0]), lambda: b.enter(records[0]))  # type: ignore[arg-type]
    b.settled()
    freeze(a)
    assert b.recover(6).receivers == ()  # now it holds the state, and may go on alone


def test_nobody_goes_on_when_the_state_is_lost(towns: Callable[[int], Town]) -> None:
    town = towns(1)
    (a,) = town.all()
    change = town.board.publish(after_join(town.begin, 1, step=6))
    b = town.member(1, change)
    together(lambda: a.enter(change), lambda: b.enter(change))
    freeze(a)
    with pytest.raises(RankFailureError, match="no rank that is left has the state"):
        b.recover(change.step)


def test_a_rank_behind_a_record_of_joining_gets_the_state_in_the_one_after(
    towns: Callable[[int], Town],
) -> None:
    town = towns(2)
    a, b = town.all()
    change = town.board.publish(after_join(town.begin, 1, step=6))
    c = town.member(2, change)
    # Rank 0 let c in behind step 6, whose last transfer failed on b.
    a._held = change.step
    entered = together(lambda: a.enter(change), lambda: b.enter(b.recover(5)), lambda: c.enter(change))
    assert entered[0] == entered[1] == entered[2]
    assert isinstance(entered[0], Generation)
    assert (entered[0].number, entered[0].members, entered[0].step) == (2, (0, 1, 2), 6)
    assert entered[0].receivers == (1, 2)


# -- waking up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_that_wakes_up_does_not_pass_a_border(rank: int, towns: Callable[[int], Town]) -> None:
    town = towns(3)
    members = town.all()
    sleeper = members.pop(rank)
    freeze(sleeper)
    records = together(*[lambda m=m: m.recover(3) for m in members])
    together(*[lambda m=m: m.enter(records[0]) for m in members])
    until(lambda: sleeper._watch.stale)
    with pytest.raises(RemovedError):
        sleeper.border(4)
    with pytest.raises(RemovedError):
        sleeper.check()
    with pytest.raises(RemovedError):
        sleeper.recover(4)


def test_a_stopped_rank_is_told_by_its_first_beat_too(towns: Callable[[int], Town]) -> None:
    a, b = towns(2).all()
    freeze(b)
    a.enter(a.recover(3))
    wake(b)
    until(lambda: b._watch.trouble(time.monotonic()))
    assert not b._watch.stale  # the store answers again, so only the flag says it
    with pytest.raises(RankFailureError, match="went on to generation 1"):
        b.commit()
    with pytest.raises(RemovedError):
        b.recover(3)


def test_a_rank_that_wakes_up_in_a_meeting_that_was_given_up_does_not_begin(
    towns: Callable[[int], Town],
) -> None:
    town = towns(3)
    a, b, _ = town.all()
    record = town.board.publish(after_loss(town.begin, {0: 3, 1: 3}))
    freeze(b)
    assert a.enter(record).members == (0,)  # b did not come
    wake(b)
    with pytest.raises(RemovedError, match="generation 2"):
        b.enter(record)


def test_a_rank_left_out_of_a_record_does_not_enter_it(towns: Callable[[int], Town]) -> None:
    town = towns(2)
    _, b = town.all()
    record = town.board.publish(after_loss(town.begin, {0: 3}))
    with pytest.raises(RemovedError):
        b.enter(record)


# -- beginnings ------------------------------------------------------------------------------------


def test_a_run_does_not_begin_without_a_founder_not_even_for_a_late_one(towns: Callable[[int], Town]) -> None:
    town = towns(3)
    config = replace(CONFIG, agree_timeout_s=1.5)
    a, b = town.member(0, config=config), town.member(1, config=config)
    errors = together(lambda: a.enter(town.begin), lambda: b.enter(town.begin))
    for error in errors:
        assert isinstance(error, FoundingError)
        assert "not all 3 ranks came within 1.5 s" in str(error)
    late = town.member(2, config=config)
    with pytest.raises(FoundingError):
        late.enter(town.begin)


def test_a_founder_that_starts_later_than_the_heartbeats_limit_is_waited_for(
    towns: Callable[[int], Town],
) -> None:
    town = towns(2)
    a = town.member(0)
    result: list[object] = []
    early = threading.Thread(target=lambda: result.append(a.enter(town.begin)), daemon=True)
    early.start()
    until(lambda: 1 in a._watch.liveness.quiet())
    b = town.member(1)
    assert b.enter(town.begin) == town.begin
    early.join(LIMIT_S)
    assert result == [town.begin]


def test_who_sees_that_another_gave_the_beginning_up_gives_it_up_too(towns: Callable[[int], Town]) -> None:
    town = towns(2)
    a, b = town.all()
    record = town.board.publish(after_loss(town.begin, {0: 3, 1: 3}))
    town.board.settle(1, VOID)
    entered = together(lambda: a.enter(record), lambda: b.enter(record))
    assert [g.number for g in entered] == [2, 2]  # type: ignore[attr-defined]


def test_groups_that_cannot_be_made_with_nobody_missing_are_an_error(
    towns: Callable[[int], Town], monkeypatch: pytest.MonkeyPatch
) -> None:
    town = towns(2)

    def refuse(*_: object, **__: object) -> None:
        msg = "no such device"
        raise RuntimeError(msg)

    monkeypatch.setattr(changing, "make_groups", refuse)
    a, b = town.member(0), town.member(1)
    errors = together(lambda: a.enter(town.begin), lambda: b.enter(town.begin))
    for error in errors:
        assert isinstance(error, RankFailureError)
        assert "could not be made (no such device)" in str(error)


# -- borders and joining ---------------------------------------------------------------------------


def test_borders_leave_nothing_behind_in_the_store(towns: Callable[[int], Town]) -> None:
    town = towns(2)
    a, b = town.all()
    sizes = []
    for step in range(1, 12):
        assert together(lambda s=step: a.border(s), lambda s=step: b.border(s)) == [None, None]
        sizes.append(town.server.num_keys())
    assert sizes[2] == sizes[-1]


def test_a_border_fails_when_rank_zero_dies_in_it(towns: Callable[[int], Town]) -> None:
    a, b = towns(2).all()
    freeze(a)
    with pytest.raises(RankFailureError, match="rank 0 did not say") as caught:
        b.border(1)
    assert caught.value.ranks == (0,)


def test_a_border_that_rank_zero_decided_before_it_ended_is_passed(towns: Callable[[int], Town]) -> None:
    town = towns(2)
    a, b = town.all()
    assert a.border(1) is None
    a.close(ended=True)
    until(lambda: b._watch.liveness.closed() == {0})
    assert b.border(1) is None


def test_rank_zero_that_dies_between_record_and_answer_costs_the_joiner_nothing(
    towns: Callable[[int], Town],
) -> None:
    town = towns(2)
    a, b = town.all()
    town.board.publish(after_join(town.begin, 1, step=4))  # and the ticket is not answered
    freeze(a)
    entered = b.enter(b.recover(4))
    assert (entered.number, entered.members) == (2, (1,))


class Ticking:
    """A process that waits and shows that it lives."""

    def __init__(self, board: Board, *, party: str = "p", size: int = 1) -> None:
        self.ticket = board.ask(JoinRequest(party=party, size=size, host="h", pid=1))
        self._board = board
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        count = 0
        while not self._end.wait(0.005):
            count += 1
            self._board.show_life(self.ticket, count)

    def end(self) -> None:
        self._end.set()
        self._thread.join(LIMIT_S)


def test_who_lives_is_let_in_and_who_died_waiting_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(dist.HashStore())
    admission = Admission(board, pause_s=0.1)
    pauses: list[float] = []
    real = time.sleep
    monkeypatch.setattr("loongforge_comm.members.admission.time.sleep", lambda s: (pauses.append(s), real(s)))
    dead = board.ask(JoinRequest(party="dead", size=1, host="h", pid=1))
    board.show_life(dead, 3)
    assert admission.admit(first(2), 4) is None
    assert admission.admit(first(2), 5) is None
    assert pauses == [0.1]
    alive = Ticking(board)
    change = admission.admit(first(2), 6)
    alive.end()
    assert change is not None
    assert (change.number, change.joined, change.step) == (1, (2,), 6)
    assert board.answered(alive.ticket) == (1, 2)
    assert board.answered(dead) is None


def test_a_party_is_let_in_when_all_of_it_are_there() -> None:
    board = Board(dist.HashStore())
    admission = Admission(board, pause_s=0.1)
    one = Ticking(board, party="node", size=2)
    assert admission.admit(first(2), 1) is None
    two = Ticking(board, party="node", size=2)
    change = admission.admit(first(2), 2)
    one.end()
    two.end()
    assert change is not None
    assert change.members == (0, 1, 2, 3)
    assert board.answered(one.ticket) == (1, 2)
    assert board.answered(two.ticket) == (1, 3)


def test_rank_zero_takes_no_record_of_others_for_its_own() -> None:
    board = Board(dist.HashStore())
    theirs = board.publish(after_loss(first(3), {1: 4, 2: 4}))
    process = Ticking(board)
    assert Admission(board, pause_s=0.1).admit(first(3), 5) == theirs
    process.end()
    assert board.answered(process.ticket) is None


def test_a_process_joins_a_run_and_leaves_it_to_go_on(towns: Callable[[int], Town]) -> None:
    town = towns(1)
    (a,) = town.all()

    def come() -> Membership:
        made = Membership.join("gloo", address=town.address, config=CONFIG, limit_s=LIMIT_S)
        town.members.append(made)
        return made

    def let_in() -> Generation:
        until(lambda: town.board.waiting()[1])
        change = None
        step = 0
        while change is None:
            step += 1
            change = a.border(step)
        return a.enter(change)

    entered, b = together(let_in, come)
    assert isinstance(b, Membership)
    assert entered == b.generation == a.generation
    assert (b.member, b.rank, b.receives, a.receives) == (1, 1, True, False)


def test_nobody_joins_a_run_that_has_ended(towns: Callable[[int], Town]) -> None:
    town = towns(1)
    (a,) = town.all()
    waiting = threading.Thread(target=lambda: until(lambda: town.board.waiting()[1]), daemon=True)
    waiting.start()

    def end() -> None:
        waiting.join(LIMIT_S)
        a.close(ended=True)

    late = together(end, lambda: Membership.join("gloo", address=town.address, config=CONFIG))[1]
    assert isinstance(late, RankFailureError)
    assert "has ended before a step border" in str(late)
    with pytest.raises(RankFailureError, match="nothing is left to join"):
        Membership.join("gloo", address=town.address, config=CONFIG)


def test_a_request_that_nobody_answers_is_taken_back(towns: Callable[[int], Town]) -> None:
    town = towns(1)
    with pytest.raises(RankFailureError, match=r"no answer within 0\.2 s"):
        Membership.join("gloo", address=town.address, config=CONFIG, limit_s=0.2)
    assert town.board.waiting() == (1, {})


def test_a_party_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="size is 2 with party None"):
        Membership.join("gloo", address="127.0.0.1:1/x", size=2)


# -- reports ---------------------------------------------------------------------------------------


def test_a_report_of_an_earlier_generation_is_nobodys_loss(towns: Callable[[int], Town]) -> None:
    a, b = towns(2).all()
    report = a._watch.liveness.on_silent
    assert report is not None
    record = together(lambda: a.recover(1), lambda: b.recover(1))[0]
    together(lambda: a.enter(record), lambda: b.enter(record))  # type: ignore[arg-type]
    report((1,))
    a.check()
    current = a._watch.liveness.on_silent
    assert current is not None
    current((1,))
    with pytest.raises(RankFailureError) as caught:
        a.check()
    assert caught.value.ranks == (1,)


def test_an_aborted_collective_fails_the_step_whoever_aborted_it(
    towns: Callable[[int], Town], monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,) = towns(1).all()
    a.commit()
    monkeypatch.setattr("loongforge_comm.internals._aborts", 10_000)
    with pytest.raises(RankFailureError):
        a.commit()


def test_the_loop_in_the_documentation_names_what_there_is() -> None:
    text = Membership.__doc__ or ""
    for name in ("found", "commit", "border", "recover", "enter", "close"):
        assert f"members.{name}(" in text or f"Membership.{name}(" in text
        assert callable(getattr(Membership, name))
