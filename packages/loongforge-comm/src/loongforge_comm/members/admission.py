"""How a process is let in: it asks and shows that it lives, and rank 0 answers at a step border."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid

from loongforge_comm.errors import RankFailureError
from loongforge_comm.members.board import Board, JoinRequest
from loongforge_comm.members.generation import Generation, after_join, complete_parties

LOG = logging.getLogger("loongforge_comm")
Waiting = dict[int, tuple[JoinRequest, str]]


class Admission:
    """Rank 0's memory of who asked. Nobody waits for a process that asked and died: it is looked at once."""

    def __init__(self, board: Board, *, pause_s: float) -> None:
        """Set up.

        Args:
            board: where requests are.
            pause_s: seconds in which a living process shows that it lives.
        """
        self._board = board
        self._pause_s = pause_s
        self._first = 0
        self._dead: dict[int, str] = {}

    def admit(self, now: Generation, step: int) -> Generation | None:
        """Let in the complete parties of processes that are alive.

        Returns:
            The record that follows ``now``, None when nobody is let in. It is not the one proposed here when
            others have made one meanwhile.
        """
        alive = self._alive()
        tickets = complete_parties(_parties(alive))
        if not tickets:
            return None
        wanted = after_join(now, len(tickets), step=step)
        change = self._board.publish(wanted)
        if change != wanted:
            return change
        for ticket, member in zip(tickets, change.joined, strict=True):
            request = alive[ticket][0]
            if self._board.answer(ticket, change.number, member):
                LOG.info("member %d joins from %s, process %d", member, request.host, request.pid)
        return change

    def _alive(self) -> Waiting:
        before = self._look()
        candidates = {t: entry for t, entry in before.items() if self._dead.get(t) != entry[1]}
        if not complete_parties(_parties(candidates)):
            return {}
        time.sleep(self._pause_s)
        now = self._look()
        alive = {t: now[t] for t, entry in candidates.items() if t in now and now[t][1] != entry[1]}
        self._dead.update({t: now[t][1] for t in candidates if t in now and t not in alive})
        return alive

    def _look(self) -> Waiting:
        # What is older than the oldest open request is not read again.
        self._first, waiting = self._board.waiting(first=self._first)
        return waiting


def ask_to_join(
    board: Board, *, party: str | None, size: int, every_s: float, limit_s: float
) -> tuple[int, int]:
    """Ask to be let in and wait.

    Args:
        board: the run's.
        party: name that processes share which are to be let in together.
        size: how many processes the party has.
        every_s: seconds between signs of life.
        limit_s: longest wait; the request is taken back then.

    Returns:
        (number of the generation, member number in it).

    Raises:
        RankFailureError: the run has ended, did not answer in time, or its store is gone.
    """
    if board.ended:
        msg = "the run has ended: nothing is left to join"
        raise RankFailureError(msg)
    name = party or uuid.uuid4().hex
    ticket = board.ask(JoinRequest(party=name, size=size, host=socket.gethostname(), pid=os.getpid()))
    begin = time.monotonic()
    count = 0
    while (answer := board.answered(ticket)) is None:
        if board.ended:
            msg = "the run has ended before a step border at which this process could join"
            raise RankFailureError(msg)
        if time.monotonic() - begin > limit_s:
            answer = board.withdraw(ticket)
            if answer is not None:
                return answer
            msg = (
                f"no answer within {limit_s:g} s: the run looks for new ranks every check_every steps, and "
                f"lets a party in when all {size} of it are there; is it still going?"
            )
            raise RankFailureError(msg, elapsed_s=limit_s)
        count += 1
        board.show_life(ticket, count)
        time.sleep(every_s)
    return answer


def _parties(waiting: Waiting) -> list[tuple[int, str, int]]:
    return [(ticket, request.party, request.size) for ticket, (request, _) in waiting.items()]
