"""How members agree: who is left after a failure, and whether all have come to the start of a generation.

Both end in a record that is written once, so a member that was stopped in any phase reads, when it wakes up,
what the others have done without it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from loongforge_comm.errors import RankFailureError
from loongforge_comm.liveness import Liveness
from loongforge_comm.members.board import CANCELLED, GO, VOID, Board
from loongforge_comm.members.config import MembershipConfig
from loongforge_comm.members.generation import Generation, after_loss

POLL_S = 0.02


class FoundingError(RankFailureError):
    """The run cannot begin: a rank that was started did not come. Nobody goes on."""


def agree(
    board: Board,
    liveness: Liveness,
    now: Generation,
    *,
    member: int,
    held: int,
    config: MembershipConfig,
) -> Generation:
    """Say that this member has given generation ``now`` up, and wait until it is settled what follows.

    The lowest of those that are ready and alive writes the record when everybody is ready or gone; after
    ``agree_timeout_s`` anybody does.

    Args:
        board: the run's.
        liveness: this member's heartbeat; it watches everybody meanwhile.
        now: the generation that failed.
        member: this process.
        held: last step whose result this member holds, or NO_STATE.
        config: settings.

    Raises:
        RankFailureError: too few are left, nobody has the state, the run has ended, or the store is gone.
    """
    liveness.follow(now.members, watched=now.members, epoch=now.number)
    liveness.fail((member,))
    board.say_ready(now.number, member, held)
    deadline = time.monotonic() + config.agree_timeout_s
    while (record := board.generation(now.number + 1)) is None:
        gone = set(liveness.quiet())
        left = {m: step for m, step in board.ready(now.number).items() if m not in gone}
        late = time.monotonic() > deadline
        if late or left.keys() | gone >= set(now.members):
            _require_enough(board, now, left, config)
            if late or member == min(left):
                board.publish(after_loss(now, left))
                continue
        time.sleep(POLL_S)
    return record


def _require_enough(board: Board, now: Generation, left: Mapping[int, int], config: MembershipConfig) -> None:
    """Everybody looks, not only who would write the record: nobody has to wait for the end of the first."""
    missing = tuple(m for m in now.members if m not in left)
    if board.ended:
        msg = "the other ranks have finished the run; nothing is left to do"
        raise RankFailureError(msg, ranks=missing)
    if len(left) < config.min_ranks:
        msg = (
            f"only {len(left)} of {now.world_size} ranks are left and min_ranks is {config.min_ranks}: "
            "resume from the newest checkpoint, or lower min_ranks"
        )
        raise RankFailureError(msg, ranks=missing)
    if max(left.values()) < 0:
        msg = "no rank that is left has the state of the run: resume from the newest checkpoint"
        raise RankFailureError(msg, ranks=missing)


def meet(
    board: Board, liveness: Liveness, generation: Generation, *, member: int, config: MembershipConfig
) -> None:
    """Wait until all members of a generation have come.

    torch's own meeting would wait for a dead rank until its time limit. What stands in the store at the end
    is one verdict for all: nobody begins while another has given up.

    Raises:
        RankFailureError: a member is gone, or has given the generation up.
    """
    number = generation.number
    board.arrive(number, member)
    deadline = time.monotonic() + config.agree_timeout_s
    missing = set(generation.members)
    while (verdict := board.verdict(number)) is None:
        missing -= board.arrived(number)
        if not missing:
            verdict = board.settle(number, GO)
            break
        late = time.monotonic() > deadline
        unknown = missing - liveness.seen(generation.members) if number == 0 else set()
        if late or (missing - unknown) & set(liveness.quiet()):
            verdict = board.settle(number, CANCELLED if late and unknown else VOID)
            break
        time.sleep(POLL_S)
    if verdict == GO:
        return
    names = ", ".join(map(str, sorted(missing))) or "none that this one knows of"
    msg = f"generation {number} could not begin (missing member(s): {names})"
    if verdict == CANCELLED:
        msg += f": not all {generation.world_size} ranks came within {config.agree_timeout_s:g} s"
        raise FoundingError(msg, ranks=tuple(sorted(missing)))
    raise RankFailureError(msg, ranks=tuple(sorted(missing)))
