"""How a member goes from one generation to the next."""

from __future__ import annotations

import logging
from typing import Self

import torch.distributed as dist

from loongforge_comm.errors import RankFailureError
from loongforge_comm.members.agreeing import FoundingError, agree, meet
from loongforge_comm.members.board import VOID, Board
from loongforge_comm.members.config import MembershipConfig
from loongforge_comm.members.generation import NO_STATE, Generation
from loongforge_comm.members.groups import give_up_groups, make_groups
from loongforge_comm.members.watching import PREFIX, RemovedError, Watch, first_line

LOG = logging.getLogger("loongforge_comm")
MOST_REPEATS = 3
"""So often a generation may fail to begin with nobody missing: then it is not for want of a rank."""


class Member:
    """A process in a generation: its groups, its heartbeat, and which state of the run it holds.

    Attributes:
        address: where the run's store is and which part of it belongs to the run.
        member: this process's number for life.
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
        hosts_store: bool = False,
    ) -> None:
        """Start the heartbeat; ``found`` and ``join`` of :class:`Membership` call this."""
        self.address = address
        self.member = member
        self.config = config
        self._store = store
        self._board = Board(dist.PrefixStore(PREFIX, store), limit_s=config.agree_timeout_s)
        self._backend = backend
        self._hosts_store = hosts_store
        self._broken = False
        # What this process holds: the result of step `_held`, unless rank 0's state may be half here.
        self._held = NO_STATE if member in generation.receivers else generation.step
        self._whole = self._held != NO_STATE
        self._watch = Watch(store, generation, member, config, device="nccl" in backend)

    @property
    def generation(self) -> Generation:
        """The composition this process is in."""
        return self._watch.generation

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

    # -- changes -----------------------------------------------------------------------------------

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
        if self._whole or step < 0:
            self._held = max(step, NO_STATE)
        return self._agree()

    def _agree(self) -> Generation:
        self._broken = True
        while True:
            record = agree(
                self._board, self._watch.liveness, self.generation, member=self.member, held=self._held,
                config=self.config,
            )  # fmt: skip
            if self.member not in record.members:
                raise self._watch.removed(record)
            if self._held >= record.step or self.member in record.receivers:
                return record
            # Rank 0 let somebody in behind a step that failed here: this rank needs the state, and the record
            # does not say so. The next one will.
            self._watch.turn_to(record)
            self._board.settle(record.number, VOID)

    def enter(self, generation: Generation) -> Generation:
        """Make the process groups of a generation and leave those of the one before.

        When somebody is lost meanwhile, agrees on the next one and enters that.

        Returns:
            The generation that was entered; ``receivers`` in it need rank 0's state.

        Raises:
            RemovedError: the others went on without this rank.
            RankFailureError: see :meth:`recover`; or the groups cannot be made though nobody is missing.
        """
        repeats = 0
        while True:
            try:
                self._come(generation)
                break
            except (RemovedError, FoundingError):
                raise
            except RankFailureError as error:
                LOG.warning("%s", error)
                record = self._agree()
                repeats = 0 if set(generation.members) - set(record.members) else repeats + 1
                if repeats >= MOST_REPEATS:
                    raise
                generation = record
        self._whole = self.member not in generation.receivers
        self._held = generation.step if self._whole else NO_STATE
        return generation

    def _come(self, generation: Generation) -> None:
        if self.member not in generation.members:
            raise self._watch.removed(generation)
        self._watch.pause()
        give_up_groups(broken=self._broken, timeout_s=self.config.timeout_s)
        self._broken = False
        self._watch.turn_to(generation)
        self._watch.liveness.look()
        meet(self._board, self._watch.liveness, generation, member=self.member, config=self.config)
        try:
            make_groups(
                self._store, number=generation.number, rank=self.rank, world_size=generation.world_size,
                backend=self._backend, connect_s=self.config.agree_timeout_s, timeout_s=self.config.timeout_s,
            )  # fmt: skip
        except RuntimeError as error:
            what = f"the process groups could not be made ({first_line(error)})"
            raise self._watch.failure(what) from error
        self._watch.go_on()
        if generation.number:
            LOG.warning(
                "generation %d: %d ranks (left %s, joined %s), from step %d on",
                generation.number, generation.world_size, generation.left, generation.joined, generation.step,
            )  # fmt: skip

    def _entered(self, generation: Generation) -> Self:
        """Return this after entering its first generation; the heartbeat ends when that fails."""
        try:
            self.enter(generation)
        except BaseException:
            self.close()
            raise
        return self

    # -- leaving -----------------------------------------------------------------------------------

    def close(self, *, ended: bool = False) -> None:
        """Leave the groups and end the heartbeat. Whoever opened the store waits until the others have left.

        Args:
            ended: the run is over; who waits to join is told.
        """
        if ended:
            try:
                self._board.end()
            except RankFailureError as error:
                LOG.warning("the end of the run could not be told: %s", error)
        self._watch.pause()
        # Before the end the others may be in collectives that this process will not join: torch would wait.
        give_up_groups(broken=self._broken or not ended, timeout_s=self.config.timeout_s)
        if ended and self._hosts_store:
            self._watch.wait_for_goodbyes(self.config.agree_timeout_s)
        self._watch.close()
        self._board.close()
