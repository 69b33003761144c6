"""The members of a run while it goes on: who is taken out, who is let in, and the groups of those that are in.

Nobody has to be asked twice who is in: a generation is a record in the store that is written once. A rank
that stops answering is left out of the next record by those that go on; when it wakes up it finds itself left
out and ends. New processes put up a request, which rank 0 answers at a step border.

The store is the one thing that must live: it is torchrun's on the first node, or one of its own
(``python -m loongforge_comm store``).
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Self

import torch.distributed as dist

from loongforge_comm.errors import RankFailureError
from loongforge_comm.internals import wait_slice
from loongforge_comm.liveness import Liveness
from loongforge_comm.members import generation as compositions
from loongforge_comm.members.board import Board, JoinRequest
from loongforge_comm.members.config import MembershipConfig
from loongforge_comm.members.generation import Generation
from loongforge_comm.members.groups import abort_devices, give_up_groups, make_groups

LOG = logging.getLogger("loongforge_comm")
SLICE_S = 0.25
POLL_S = 0.02
PREFIX = "loongforge_members"


class RemovedError(RankFailureError):
    """The others went on without this rank; it must not act on the run any more."""


class Membership:
    """This process among the members of a run. Made by :meth:`found` or :meth:`join`.

    A loop that outlives its ranks::

        members = Membership.found("gloo")
        scheduler = GradientScheduler(model)
        while step < last:
            try:
                model(batch(step, members.rank, members.world_size)).backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                scheduler.step_end(step)
                change = members.border(step)
            except RankFailureError:
                change = members.recover(step)
            if change is not None:
                scheduler.close()
                step = members.enter(change).step
                scheduler = GradientScheduler(model)  # broadcasts rank 0's weights
                # members.generation.receivers need rank 0's optimizer state as well

    Attributes:
        address: where the run's store is and which part of it belongs to the run, for :meth:`join`.
        generation: the composition this process is in.
        member: this process's number in it.
        config: settings.
    """

    def __init__(
        self,
        address: str,
        *,
        member: int,
        generation: Generation,
        backend: str,
        config: MembershipConfig,
        store: dist.Store,
    ) -> None:
        """Start the heartbeat; :meth:`found` and :meth:`join` call this."""
        self.address = address
        self._store = store
        self._board = Board(dist.PrefixStore(PREFIX, store))
        self._backend = backend
        self.member = member
        self.generation = generation
        self.config = config
        self._broken = False
        self._finished_step = generation.step
        self._decided: list[tuple[int, int]] = []
        self._lost: tuple[int, ...] = ()
        beats = dist.PrefixStore(f"{PREFIX}/beats", store.clone())  # type: ignore[attr-defined]
        self._liveness = Liveness(
            beats,
            generation.members,
            member,
            interval_s=config.heartbeat_interval_s,
            timeout_s=config.heartbeat_timeout_s,
        )
        self._liveness.start()

    # -- coming ------------------------------------------------------------------------------------

    @classmethod
    def found(cls, backend: str, *, store: str | None = None, config: MembershipConfig | None = None) -> Self:
        """Begin a run with all ranks that were started together, and make its process groups.

        Reads ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` as torchrun sets them; call it
        instead of ``init_process_group``.

        Args:
            backend: ``gloo``, ``nccl`` or torch's combined form.
            store: ``HOST:PORT`` of a store of its own (``python -m loongforge_comm store``); by default
                torchrun's at the master's address, or one that rank 0 opens there.
            config: settings, equal on all ranks.

        Raises:
            RankFailureError: a rank did not come within ``agree_timeout_s``.
            ValueError: the store holds another run under this name.
        """
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        config = config or MembershipConfig()
        where = store or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        address = f"{where}/{run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        own = connect(
            address, opens=rank == 0 and not agent and store is None, limit_s=config.agree_timeout_s
        )
        board = Board(dist.PrefixStore(PREFIX, own))
        if not board.claim(f"founder/{rank}"):
            msg = (
                f"the store at {where} already holds a run named {run!r} with a rank {rank}: give torchrun "
                "another --rdzv-id, or start the store anew"
            )
            raise ValueError(msg)
        begin = board.publish(compositions.first(world_size))
        members = cls(address, member=rank, generation=begin, backend=backend, config=config, store=own)
        members.enter(begin)
        return members

    @classmethod
    def join(
        cls,
        backend: str,
        *,
        address: str,
        config: MembershipConfig | None = None,
        party: str | None = None,
        size: int = 1,
        limit_s: float = 3600.0,
    ) -> Self:
        """Ask to be let into a run that goes on, and wait for the step border at which that happens.

        Have model and data ready before: the others wait from the moment of the answer on.

        Args:
            backend: as the run has it.
            address: attribute ``address`` of a member of the run.
            config: settings, equal to the run's.
            party: name that processes share which are to be let in together.
            size: how many processes the party has.
            limit_s: longest wait for the answer.

        Raises:
            RankFailureError: the run has ended, or did not answer in time.
            ConnectionError: the run's store is gone.
        """
        config = config or MembershipConfig()
        store = connect(address)
        board = Board(dist.PrefixStore(PREFIX, store))
        party = party or uuid.uuid4().hex
        ticket = board.ask(JoinRequest(party=party, size=size, host=socket.gethostname(), pid=os.getpid()))
        number, member = _await_answer(board, ticket, config, limit_s)
        generation = board.generation(number)
        if generation is None:
            msg = f"ticket {ticket} was answered with generation {number}, which has no record"
            raise RankFailureError(msg)
        members = cls(
            address, member=member, generation=generation, backend=backend, config=config, store=store
        )
        members.enter(generation)
        return members

    @property
    def rank(self) -> int:
        """This process's rank now."""
        return self.generation.rank_of(self.member)

    @property
    def world_size(self) -> int:
        """Number of ranks now."""
        return self.generation.world_size

    @property
    def receives(self) -> bool:
        """Whether this process needs rank 0's state in the present generation."""
        return self.member in self.generation.receivers

    # -- between steps -----------------------------------------------------------------------------

    def border(self, step: int) -> Generation | None:
        """Mark the end of a step; every ``check_every`` steps let in who waits. Call it on all ranks alike.

        Returns:
            The generation to :meth:`enter`, or None to go on.

        Raises:
            RankFailureError: a rank was lost (CUDA: noticed since), or rank 0 did not decide in time.
        """
        self._finished_step = step
        self._liveness.step = step
        self.check()
        if step % self.config.check_every:
            return None
        number = self.generation.number
        change = self._let_in(step) if self.rank == 0 else None
        if self.rank == 0:
            self._board.decide(number, step, change=change is not None)
            self._decided.append((number, step))
            while len(self._decided) > 2:  # everybody came to a later border, so has read this one
                self._board.forget(*self._decided.pop(0))
            return change
        if not self._until(lambda: self._board.decision(number, step) is not None):
            raise self._failure(f"rank 0 did not say within {self.config.agree_timeout_s:g} s what follows")
        return self._board.generation(number + 1) if self._board.decision(number, step) else None

    def _let_in(self, step: int) -> Generation | None:
        """As rank 0: admit the complete parties of processes that are alive."""
        before = self._board.waiting()
        if not compositions.complete_parties(_named(before)):
            return None
        time.sleep(2 * self.config.heartbeat_interval_s)
        now = self._board.waiting()
        alive = {t: entry for t, entry in now.items() if t in before and entry[1] != before[t][1]}
        tickets = compositions.complete_parties(_named(alive))
        if not tickets:
            return None
        wanted = compositions.after_join(self.generation, len(tickets), step=step)
        change = self._board.publish(wanted)
        if change == wanted:
            for ticket, member in zip(tickets, change.joined, strict=True):
                self._board.answer(ticket, change.number, member)
                LOG.info(
                    "member %d joins from %s, process %d", member, alive[ticket][0].host, alive[ticket][0].pid
                )
        return change

    # -- trouble -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise when a rank was found silent since (CUDA, where the host does not wait for collectives)."""
        if self._lost:
            raise self._failure("a rank was lost")

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for a collective on host memory as long as everybody answers.

        Raises:
            RankFailureError: a rank is silent, or the connection broke.
        """
        begin = time.monotonic()
        while True:
            try:
                if wait_slice(work, SLICE_S):
                    return
            except RuntimeError as error:
                raise self._failure(f"{what}: the connection broke ({_line(error)})") from error
            if self._lost or self._liveness.silent():
                raise self._failure(f"{what}: a rank does not answer")
            if time.monotonic() - begin > self.config.timeout_s:
                raise self._failure(f"{what}: the limit of {self.config.timeout_s:g} s passed")

    @staticmethod
    def blames_others(error: BaseException) -> bool:
        """Whether an error can come from another rank's end: a failed collective, in any of its forms."""
        if isinstance(error, (RankFailureError, dist.DistError)):
            return not isinstance(error, RemovedError)
        text = str(error).lower()
        return isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "c10d"))

    def trouble(self) -> bool:
        """After an error: whether other ranks are in trouble too. Waits up to the time limit of heartbeats.

        False means that the error is this rank's own, and that going on without others would not help.
        """
        number = self.generation.number
        others = [m for m in self.generation.members if m != self.member]
        if not others:
            return False
        limit = self.config.heartbeat_timeout_s + 2 * self.config.heartbeat_interval_s
        deadline = time.monotonic() + limit
        while True:
            if self._lost or self._liveness.silent() or self._board.ready(number, others):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(self.config.heartbeat_interval_s / 4)

    def recover(self, step: int) -> Generation:
        """After a failed step: agree with those that are left who goes on.

        Args:
            step: last step that this rank has finished, with weights and optimizer as after it; -1 when this
                rank has no state that belongs together (it came, and did not get rank 0's).

        Returns:
            The generation to :meth:`enter`.

        Raises:
            RemovedError: the others went on without this rank.
            RankFailureError: fewer than ``min_ranks`` are left, the run has ended, or the store is gone.
        """
        self._broken, self._finished_step = True, step
        now, config = self.generation, self.config
        self._liveness.follow(now.members, watched=now.members)
        self._liveness.fail((self.member,))
        self._board.say_ready(now.number, self.member, step)
        deadline = time.monotonic() + config.agree_timeout_s
        while (record := self._board.generation(now.number + 1)) is None:
            ready = self._board.ready(now.number, now.members)
            gone = set(self._liveness.quiet())
            late = time.monotonic() > deadline
            if (late or ready.keys() | gone >= set(now.members)) and self.member == min(ready):
                self._propose(now, ready)
            elif time.monotonic() > deadline + config.heartbeat_timeout_s:
                raise self._failure("the others did not agree who goes on")
            time.sleep(POLL_S)
        if self.member not in record.members:
            raise self._removed(record)
        return record

    def _propose(self, now: Generation, ready: dict[int, int]) -> None:
        if self._board.ended:
            msg = "the other ranks have finished the run; nothing is left to do"
            raise RankFailureError(msg)
        if len(ready) < self.config.min_ranks:
            msg = (
                f"only {len(ready)} of {now.world_size} ranks are left and min_ranks is "
                f"{self.config.min_ranks}: resume from the newest checkpoint, or lower min_ranks"
            )
            raise RankFailureError(msg, ranks=tuple(m for m in now.members if m not in ready))
        if max(ready.values()) < 0:
            msg = "no rank that is left has the state of the run: resume from the newest checkpoint"
            raise RankFailureError(msg)
        self._board.publish(compositions.after_loss(now, ready))

    # -- entering ----------------------------------------------------------------------------------

    def enter(self, generation: Generation) -> Generation:
        """Make the process groups of a generation and leave those of the one before.

        When somebody is lost meanwhile, agrees on the next one and enters that.

        Returns:
            The generation that was entered; ``receivers`` in it need rank 0's state.
        """
        while True:
            try:
                self._come(generation)
                break
            except RemovedError:
                raise
            except RankFailureError as error:
                LOG.warning("%s", error)
                generation = self.recover(self._finished_step)
        return generation

    def _come(self, generation: Generation) -> None:
        self._liveness.on_silent = None
        give_up_groups(broken=self._broken, timeout_s=self.config.timeout_s)
        self._broken, self._lost = False, ()
        self.generation = generation
        self._liveness.follow(generation.members)
        self._liveness.look()
        self._board.arrive(generation.number, self.member)
        self._meet(generation)
        make_groups(
            self._store,
            number=generation.number,
            rank=self.rank,
            world_size=generation.world_size,
            backend=self._backend,
            timeout_s=self.config.timeout_s,
        )
        # Everybody has said "run" before arriving: what an earlier failure left is not read any more.
        self._liveness.look()
        self._liveness.on_silent = self._silent
        if generation.number:
            LOG.warning(
                "generation %d: %d ranks (left %s, joined %s), from step %d on",
                generation.number, generation.world_size, generation.left, generation.joined, generation.step,
            )  # fmt: skip

    def _meet(self, generation: Generation) -> None:
        """Wait until all are here: torch's own meeting would wait for a dead rank until its time limit."""
        deadline = time.monotonic() + self.config.agree_timeout_s
        missing = set(generation.members)
        while missing := missing - self._board.arrived(generation.number, missing):
            if self._board.generation(generation.number + 1) is not None:
                raise self._failure("the others went on to the next generation")
            if missing & set(self._liveness.quiet()) or time.monotonic() > deadline:
                msg = f"generation {generation.number} could not begin: member(s) {sorted(missing)} did not come"
                raise RankFailureError(msg, ranks=tuple(sorted(missing)))
            time.sleep(POLL_S)

    # -- leaving -----------------------------------------------------------------------------------

    def close(self, *, ended: bool = False) -> None:
        """Leave the groups and end the heartbeat.

        Args:
            ended: the run is over; who waits to join is told.
        """
        if ended:
            self._board.end()
        self._liveness.on_silent = None
        self._liveness.close()
        give_up_groups(broken=self._broken, timeout_s=self.config.timeout_s)

    def _silent(self, ranks: tuple[int, ...]) -> None:
        """Runs in the heartbeat thread; a host that waits for its device can only be freed from here."""
        LOG.error("%s", self._story(ranks))
        self._lost = ranks
        abort_devices()

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Poll until something holds; False when a rank is silent or the limit passes."""
        deadline = time.monotonic() + self.config.agree_timeout_s
        pause = POLL_S / 10
        while not condition():
            if time.monotonic() > deadline or self._lost or self._liveness.silent():
                return False
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
        return True

    def _failure(self, what: str) -> RankFailureError:
        ranks = self._lost or self._liveness.silent()
        return RankFailureError(f"step {self._finished_step}: {what}; {self._story(ranks)}", ranks=ranks)

    def _story(self, ranks: tuple[int, ...]) -> str:
        who = ", ".join(self._liveness.describe(member).replace("rank", "member", 1) for member in ranks)
        return f"generation {self.generation.number} misses {who or 'nobody by name'}"

    def _removed(self, record: Generation) -> RemovedError:
        return RemovedError(
            f"member {self.member} did not answer, and the others went on without it as generation "
            f"{record.number} from step {record.step}: this process must end; start a new one that joins",
            ranks=(self.member,),
        )


def connect(address: str, *, opens: bool = False, limit_s: float = 30.0) -> dist.Store:
    """Return a connection to the store at ``HOST:PORT/PREFIX``.

    Args:
        address: host, port, and the prefix that keeps runs and restarts apart which use one store.
        opens: open the store there.
        limit_s: longest wait, also of what is asked later.

    Raises:
        ValueError: the address is not of that form.
        ConnectionError: nothing answers there within ``limit_s``.
    """
    where, _, prefix = address.partition("/")
    host, _, port = where.rpartition(":")
    if not host or not port.isdecimal() or not prefix:
        msg = f"store is {address!r}, allowed is HOST:PORT/PREFIX"
        raise ValueError(msg)
    limit = timedelta(seconds=limit_s)
    try:
        store = dist.TCPStore(host, int(port), is_master=opens, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        msg = f"no store answers at {where} within {limit_s:g} s: the run has ended, or its store is gone"
        raise ConnectionError(msg) from error
    return dist.PrefixStore(prefix, store)


def _named(waiting: dict[int, tuple[JoinRequest, str]]) -> list[tuple[int, str, int]]:
    return [(ticket, request.party, request.size) for ticket, (request, _) in waiting.items()]


def _await_answer(board: Board, ticket: int, config: MembershipConfig, limit_s: float) -> tuple[int, int]:
    deadline = time.monotonic() + limit_s
    count = 0
    while (answer := board.answered(ticket)) is None:
        if board.ended:
            msg = "the run has ended before a step border at which this process could join"
            raise RankFailureError(msg)
        if time.monotonic() > deadline:
            msg = (
                f"no answer within {limit_s:g} s: the run looks for new ranks every check_every steps; is it "
                "still going?"
            )
            raise RankFailureError(msg)
        count += 1
        board.show_life(ticket, count)
        time.sleep(config.heartbeat_interval_s / 2)
    return answer


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:160]
