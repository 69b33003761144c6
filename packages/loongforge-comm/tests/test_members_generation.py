"""What follows from a composition, and what the store keeps of it."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from loongforge_comm import Generation, MembershipConfig
from loongforge_comm.members.board import CANCELLED, GO, VOID, Board, JoinRequest
from loongforge_comm.members.generation import NO_STATE, after_join, after_loss, complete_parties, first


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    """Some composition in the middle of a run, with numbers out of order."""
    members = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True))
    return Generation(
        number=draw(st.integers(0, 9)),
        members=tuple(members),
        step=draw(st.integers(0, 99)),
        next_member=max(members) + 1 + draw(st.integers(0, 3)),
    )


@st.composite
def losses(draw: st.DrawFn) -> tuple[Generation, dict[int, int]]:
    """A composition, and the last finished steps of those that are left; one at least has the state."""
    now = draw(generations())
    left = draw(st.lists(st.sampled_from(now.members), min_size=1, unique=True))
    steps = st.sampled_from([NO_STATE, now.step + 6, now.step + 7])
    ready = {member: draw(steps) for member in left}
    ready[left[0]] = now.step + 7
    return now, ready


@given(losses())
def test_rank_zero_after_a_loss_has_finished_the_step_that_all_go_on_from(
    case: tuple[Generation, dict[int, int]],
) -> None:
    now, ready = case
    then = after_loss(now, ready)
    assert then.number == now.number + 1
    assert ready[then.members[0]] == then.step == max(ready.values())
    assert then.members[0] not in then.receivers


@given(losses())
def test_after_a_loss_everybody_is_in_left_or_in_members_and_whoever_is_behind_receives(
    case: tuple[Generation, dict[int, int]],
) -> None:
    now, ready = case
    then = after_loss(now, ready)
    assert set(then.members) == set(ready)
    assert set(then.left) == set(now.members) - set(ready)
    assert set(then.receivers) == {m for m, step in ready.items() if step < then.step}
    assert then.next_member == now.next_member
    holders = [m for m in then.members if m not in then.behind]
    assert holders == [m for m in now.members if m in holders]


@given(generations(), st.integers(1, 5))
def test_who_joins_gets_new_numbers_and_the_last_ranks(now: Generation, number: int) -> None:
    then = after_join(now, number, step=now.step + 10)
    assert then.members[: now.world_size] == now.members
    assert then.members[now.world_size :] == then.joined == then.receivers
    assert not set(then.joined) & set(now.members)
    assert min(then.joined) == now.next_member
    assert then.next_member == max(then.joined) + 1


@given(losses(), st.integers(1, 3))
def test_a_record_reads_as_it_was_written(case: tuple[Generation, dict[int, int]], number: int) -> None:
    for record in (after_loss(*case), after_join(case[0], number, step=3), first(4)):
        assert Generation.from_json(record.to_json()) == record
        assert [record.rank_of(m) for m in record.members] == list(range(record.world_size))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3)), max_size=9))
def test_only_whole_parties_are_let_in(asked: list[tuple[str, int]]) -> None:
    requests = [(ticket, party, size) for ticket, (party, size) in enumerate(asked)]
    chosen = complete_parties(requests)
    assert chosen == sorted(chosen)
    for ticket, party, size in requests:
        there = sum(other == party for _, other, _ in requests)
        assert (ticket in chosen) == (there >= size)


def test_a_loss_of_everybody_with_the_state_has_no_record() -> None:
    with pytest.raises(ValueError, match="has the state"):
        after_loss(first(3), {1: NO_STATE, 2: NO_STATE})


def test_a_rank_of_somebody_else_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="member 7 is not in generation 0"):
        first(2).rank_of(7)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"check_every": 0}, "check_every is 0"),
        ({"min_ranks": 0}, "min_ranks is 0"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0"),
        ({"heartbeat_interval_s": 6.0}, "up to half the timeout"),
        ({"agree_timeout_s": 5.0}, "agree_timeout_s is 5.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        MembershipConfig(**settings)  # type: ignore[arg-type]


def test_of_two_records_of_a_number_the_first_stands() -> None:
    board = Board(dist.HashStore())
    begin = board.publish(first(3))
    ours, theirs = after_loss(begin, {0: 4, 1: 4}), after_loss(begin, {1: 4, 2: 4})
    assert board.publish(ours) == ours
    assert board.publish(theirs) == ours
    assert board.generation(1) == ours
    assert board.generation(2) is None


def test_of_two_verdicts_about_a_beginning_the_first_stands() -> None:
    board = Board(dist.HashStore())
    assert board.verdict(3) is None
    assert board.settle(3, VOID) == VOID
    assert board.settle(3, GO) == VOID
    assert board.settle(4, GO) == GO
    assert board.settle(4, CANCELLED) == board.verdict(4) == GO


def test_what_members_say_is_kept_by_generation() -> None:
    board = Board(dist.HashStore())
    assert board.ready(2) == {}
    assert board.arrived(2) == set()
    board.say_ready(2, 5, 17)
    board.say_ready(2, 3, NO_STATE)
    board.say_ready(3, 4, 18)
    board.arrive(2, 3)
    assert board.ready(2) == {5: 17, 3: NO_STATE}
    assert board.arrived(2) == {3}


def test_a_request_is_either_answered_or_taken_back() -> None:
    board = Board(dist.HashStore())
    request = JoinRequest(party="p", size=1, host="h", pid=1)
    early, late = board.ask(request), board.ask(request)
    assert board.withdraw(early) is None
    assert not board.answer(early, 1, 7)
    assert board.answer(late, 1, 7)
    assert board.withdraw(late) == board.answered(late) == (1, 7)
    assert board.answered(early) is None
    assert board.waiting() == (2, {})


def test_a_request_that_is_just_being_written_is_not_passed_over() -> None:
    store = dist.HashStore()
    board = Board(store)
    store.add("join/count", 1)  # the ticket is taken, its text not yet there
    later = board.ask(JoinRequest(party="p", size=1, host="h", pid=1))
    oldest, waiting = board.waiting()
    assert oldest == 0
    assert list(waiting) == [later]
