"""The members of a run while it goes on: who is taken out, who is let in, and the groups of the others.

Nobody has to be asked twice who is in: a generation is a record in the store that is written once. A rank
that stops answering is left out of the next record by those that go on; when it wakes up it finds itself left
out and ends. New processes put up a request, which rank 0 answers at a step border.

The store is the one thing that must live: it is torchrun's on the first node, or one of its own
(``python -m loongforge_comm store``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import cached_property
from typing import Self

import torch
import torch.distributed as dist

from loongforge_comm.errors import RankFailureError
from loongforge_comm.internals import wait_slice
from loongforge_comm.members import generation as compositions
from loongforge_comm.members.admission import Admission, ask_to_join
from loongforge_comm.members.agreeing import POLL_S
from loongforge_comm.members.board import Board
from loongforge_comm.members.changing import Member
from loongforge_comm.members.config import MembershipConfig
from loongforge_comm.members.generation import Generation
from loongforge_comm.members.store import connect, founding_of
from loongforge_comm.members.watching import PREFIX, RemovedError, first_line

LOG = logging.getLogger("loongforge_comm")
SLICE_S = 0.25


class Membership(Member):
    """This process among the members of a run. Made by :meth:`found` or :meth:`join`.

    A loop that outlives its ranks::

        members = Membership.found("gloo")
        scheduler = GradientScheduler(model)
        while step < last:
            try:
                model(batch(step, members.rank, members.world_size)).backward()
                members.commit()  # raises when a rank was lost, before weights change
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
                # members.generation.receivers need rank 0's optimizer state as well;
                # what fails from enter() on goes to recover(step) like a failed step
        members.close(ended=True)

    Attributes:
        address: where the run's store is and which part of it belongs to the run, for :meth:`join`.
        generation: the composition this process is in.
        member: this process's number in it.
        config: settings.
    """

    @cached_property
    def _admission(self) -> Admission:
        return Admission(self._board, pause_s=2 * self.config.heartbeat_interval_s)

    @cached_property
    def _decided(self) -> list[tuple[int, int]]:
        """Borders that this process decided on as rank 0 and that stand in the store."""
        return []

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
            ConnectionError: no store is there.
            ValueError: the store holds another run under this name, or a variable is missing.
        """
        config = config or MembershipConfig()
        founding = founding_of(store)
        own = connect(founding.address, opens=founding.opens, limit_s=config.agree_timeout_s)
        board = Board(dist.PrefixStore(PREFIX, own), limit_s=config.agree_timeout_s)
        if not board.claim(f"founder/{founding.rank}"):
            msg = (
                f"the store at {founding.address} already holds a run of this name with a rank "
                f"{founding.rank}: give torchrun another --rdzv-id, or start the store anew"
            )
            raise ValueError(msg)
        begin = board.publish(compositions.first(founding.world_size))
        board.close()
        members = cls(
            founding.address, member=founding.rank, generation=begin, backend=backend, config=config,
            store=own, hosts_store=founding.opens,
        )  # fmt: skip
        return members._entered(begin)

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
            RankFailureError: the run has ended, did not answer in time, or its store is gone.
            ConnectionError: no store is at the address.
            ValueError: ``size`` is below 1, or above 1 without a party's name.
        """
        if size < 1 or (size > 1 and party is None):
            msg = (
                f"size is {size} with party {party!r}, allowed are numbers >= 1, above 1 with a party's name"
            )
            raise ValueError(msg)
        config = config or MembershipConfig()
        store = connect(address)
        board = Board(dist.PrefixStore(PREFIX, store), limit_s=config.agree_timeout_s)
        number, member = ask_to_join(
            board, party=party, size=size, every_s=config.heartbeat_interval_s / 2, limit_s=limit_s
        )
        generation = board.generation(number)
        board.close()
        if generation is None:
            msg = f"this process was let into generation {number}, which has no record"
            raise RankFailureError(msg)
        members = cls(
            address, member=member, generation=generation, backend=backend, config=config, store=store
        )
        return members._entered(generation)

    # -- between steps -----------------------------------------------------------------------------

    def commit(self) -> None:
        """Make sure that the collectives of this step have ended well; call it before ``optimizer.step()``.

        On CUDA the host waits for the current stream, for ``timeout_s`` at the longest: a collective that was
        aborted for a lost rank leaves half of a sum in the gradients, and only after the wait it is known.
        Work on other streams must be waited for by the current one before. On CPU nothing is waited for.

        Raises:
            RankFailureError: a rank was lost; the step must be done again.
        """
        if "nccl" in self._backend and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            with self._watch.limited_wait():
                torch.cuda.current_stream().synchronize()
        self.check()

    def check(self, *, ask: bool = False) -> None:
        """Raise when a rank was lost, or when this one was (it may have been stopped for a while).

        Args:
            ask: ask the store as well (one round trip), before what only one may do, as to write a
                checkpoint.

        Raises:
            RemovedError: the others went on without this rank.
            RankFailureError: a rank was lost, a collective was aborted, or the store is gone.
        """
        self._watch.check()
        if ask or self._watch.stale:
            record = self._board.generation(self.generation.number + 1)
            if record is not None and self.member not in record.members:
                raise self._watch.removed(record)

    def settled(self) -> None:
        """Say that rank 0's state is here completely; :meth:`border` says so as well.

        Between :meth:`enter` and this a process that receives counts as one that has no state.
        """
        self._held, self._whole = self.generation.step, True

    def border(self, step: int) -> Generation | None:
        """Mark the end of a step; every ``check_every`` steps let in who waits. Call it on all ranks alike.

        Returns:
            The generation to :meth:`enter`, or None to go on.

        Raises:
            RankFailureError: a rank was lost (CUDA: noticed since), or rank 0 did not decide in time.
        """
        self._held, self._whole = step, True
        self._watch.step = step
        self.check()
        if step % self.config.check_every:
            return None
        return self._decide(step) if self.rank == 0 else self._hear(step)

    def part(self, leaving: Collection[int], step: int) -> Generation:
        """Let ranks go that want to leave behind a step; all ranks have agreed on it, and all call this.

        Args:
            leaving: ranks that leave; at least one stays.
            step: the step that has ended.

        Returns:
            The generation of the others. They :meth:`enter` it; who is not in it calls :meth:`close`.

        Raises:
            ValueError: nobody stays.
            RankFailureError: a rank was lost since, or the store is gone.
        """
        self._held, self._whole = step, True
        self._watch.step = step
        self.check()
        gone = {self.generation.members[rank] for rank in leaving}
        wanted = compositions.after_leave(self.generation, gone, step=step)
        self._broken = True  # who leaves waits for nobody, so nobody waits for it
        return self._board.publish(wanted)

    def _decide(self, step: int) -> Generation | None:
        number = self.generation.number
        self.check(ask=True)
        change = self._admission.admit(self.generation, step)
        if change is not None and self.member not in change.members:
            raise self._watch.removed(change)
        self._board.decide(number, step, change=change is not None)
        self._decided.append((number, step))
        while len(self._decided) > 2:  # everybody came to a later border, so has read this one
            self._board.forget(*self._decided.pop(0))
        return change

    def _hear(self, step: int) -> Generation | None:
        number = self.generation.number
        if not self._until(lambda: self._board.decision(number, step) is not None):
            what = f"rank 0 did not say within {self.config.agree_timeout_s:g} s what follows"
            raise self._watch.failure(what)
        return self._board.generation(number + 1) if self._board.decision(number, step) else None

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Poll until something holds; False when a rank is silent or the limit passes."""
        begin = time.monotonic()
        pause = POLL_S / 10
        while not condition():
            if time.monotonic() - begin > self.config.agree_timeout_s or self._watch.trouble(begin):
                return condition()  # it may have come true since
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
        return True

    # -- trouble -----------------------------------------------------------------------------------

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
                broke = f"{what}: the connection broke ({first_line(error)})"
                raise self._watch.failure(broke) from error
            if self._watch.trouble(begin):
                silent = f"{what}: a rank does not answer"
                raise self._watch.failure(silent)
            if time.monotonic() - begin > self.config.timeout_s:
                late = f"{what}: the limit of {self.config.timeout_s:g} s passed"
                raise self._watch.failure(late)

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
        now = self.generation
        others = set(now.members) - {self.member}
        if not others:
            return False
        limit = self.config.heartbeat_timeout_s + 2 * self.config.heartbeat_interval_s
        begin = time.monotonic()
        while time.monotonic() - begin < limit:
            if self._watch.trouble(begin) or others & self._board.ready(now.number).keys():
                return True
            if self._board.generation(now.number + 1) is not None:
                return True
            time.sleep(self.config.heartbeat_interval_s / 4)
        return bool(self._watch.trouble(begin))
