"""What a member notices while it works: others that fall silent, and that it was itself left out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

from loongforge_comm.errors import RankFailureError
from loongforge_comm.internals import aborts
from loongforge_comm.liveness import Liveness
from loongforge_comm.members.board import Board
from loongforge_comm.members.config import MembershipConfig
from loongforge_comm.members.generation import Generation
from loongforge_comm.members.groups import abort_devices

LOG = logging.getLogger("loongforge_comm")
PREFIX = "loongforge_members"


class RemovedError(RankFailureError):
    """The others went on without this rank; it must not act on the run any more."""


class Watch:
    """The heartbeat of one member, and what it found since the present generation began.

    The heartbeat thread writes what it finds; the thread that trains asks. A host that waits for its device
    asks nothing: its collectives are aborted from here.

    Attributes:
        generation: the composition the member is in.
        liveness: the heartbeat.
    """

    def __init__(
        self,
        store: dist.Store,
        generation: Generation,
        member: int,
        config: MembershipConfig,
        *,
        device: bool,
    ) -> None:
        """Start the heartbeat; ``device`` says that collectives run on a device."""
        self.generation = generation
        self._member = member
        self._config = config
        self._device = device
        self._change = threading.RLock()
        self._lost: tuple[int, ...] = ()
        self._why = ""
        self._working = False
        self._waits_since: float | None = None
        self._record_since: tuple[int, float] | None = None
        self._aborts = aborts()
        # A connection of its own: a call that hangs must not hold up the other thread.
        own = store.clone()  # type: ignore[attr-defined]
        self._board = Board(dist.PrefixStore(PREFIX, own), limit_s=config.heartbeat_timeout_s)
        self.liveness = Liveness(
            dist.PrefixStore(f"{PREFIX}/beats", own),
            generation.members,
            member,
            interval_s=config.heartbeat_interval_s,
            timeout_s=config.heartbeat_timeout_s,
            epoch=generation.number,
        )
        self.liveness.on_round = self._look_at_record
        self.liveness.start()

    @property
    def step(self) -> int:
        """Step that the heartbeat shows."""
        return self.liveness.step

    @step.setter
    def step(self, step: int) -> None:
        self.liveness.step = step

    @property
    def stale(self) -> bool:
        """Whether the others may have given this member up since it last heard of them."""
        return self.liveness.store_silent_s > self._config.heartbeat_timeout_s / 2

    def trouble(self, begin: float) -> bool:
        """Whether waiting since ``begin`` makes no sense any more.

        A rank that said goodbye has sent what it owed; that may be still on its way.
        """
        if self._lost or self._why:
            return True
        silent = set(self.liveness.silent())
        if time.monotonic() - begin < self._config.heartbeat_timeout_s:
            silent -= self.liveness.closed()
        return bool(silent)

    def check(self) -> None:
        """Raise when something was found."""
        if self._lost or self._why or aborts() != self._aborts:
            raise self.failure(self._why or "a rank was lost")

    # -- changes -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Take nothing for a loss until :meth:`go_on`: the groups are being changed."""
        with self._change:
            self._working = False
            self.liveness.on_silent = None

    def turn_to(self, generation: Generation) -> None:
        """Watch the members of another generation; what was found before is over."""
        with self._change:
            self.generation = generation
            self._lost, self._why = (), ""
            self.liveness.follow(generation.members, epoch=generation.number)

    def go_on(self) -> None:
        """The groups of the generation are there: a loss is a loss from now on."""
        with self._change:
            self._aborts = aborts()
            self._working = True
            self.liveness.on_silent = partial(self._silent, self.generation.number)

    @contextmanager
    def limited_wait(self) -> Iterator[None]:
        """While the host waits for its device: the heartbeat thread ends that after ``timeout_s``."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def wait_for_goodbyes(self, limit_s: float) -> None:
        """Wait until all others have said that they leave, or are gone."""
        deadline = time.monotonic() + limit_s
        others = set(self.generation.members) - {self._member}
        self.liveness.follow(self.generation.members, watched=self.generation.members)
        while not others <= set(self.liveness.quiet()) and time.monotonic() < deadline:
            time.sleep(self._config.heartbeat_interval_s / 4)

    def close(self) -> None:
        """End the heartbeat."""
        self.pause()
        self.liveness.close()
        self._board.close()

    # -- heartbeat thread --------------------------------------------------------------------------

    def _silent(self, number: int, ranks: tuple[int, ...]) -> None:
        self._give_up(number, "a rank does not answer", ranks)

    def _look_at_record(self) -> None:
        """Part of each beat: has a record been written that this member is not in, or has not come to?

        While it trains, the next record is written when the others have given it up, or at a border: to that
        it comes soon, or it was stopped on the way.
        """
        now, limit = self.generation, self._config.heartbeat_timeout_s
        record = self._board.generation(now.number + 1)
        if record is None:
            self._record_since = None
        elif self._record_since is None or self._record_since[0] != record.number:
            self._record_since = (record.number, time.monotonic())
        if record is not None and self._record_since is not None:
            overdue = time.monotonic() - self._record_since[1] > limit
            if overdue or self._member not in record.members:
                self._give_up(now.number, f"the others went on to generation {record.number}", ())
        since = self._waits_since
        if since is not None and time.monotonic() - since > self._config.timeout_s:
            what = f"the device did not finish within the limit of {self._config.timeout_s:g} s"
            self._give_up(now.number, what, ())

    def _give_up(self, number: int, why: str, ranks: tuple[int, ...]) -> None:
        with self._change:
            # A report may be late: then it speaks of a generation that is over.
            if number != self.generation.number or not self._working or self._why:
                return
            self._lost, self._why = ranks, why
            LOG.error("%s", self.failure(why))
            if self._device:
                abort_devices()

    # -- words -------------------------------------------------------------------------------------

    def failure(self, what: str) -> RankFailureError:
        """An error with the names of those that are missed."""
        ranks = self._lost or self.liveness.silent()
        story = f"generation {self.generation.number} misses {self._names(ranks)}"
        return RankFailureError(f"step {self.step}: {what}; {story}", ranks=ranks)

    def removed(self, record: Generation) -> RemovedError:
        """The error of a member that is not in ``record``."""
        return RemovedError(
            f"member {self._member} did not answer, and the others went on without it as generation "
            f"{record.number} from step {record.step}: this process must end; start a new one that joins",
            ranks=(self._member,),
        )

    def _names(self, ranks: tuple[int, ...]) -> str:
        named = (self.liveness.describe(member).replace("rank", "member", 1) for member in ranks)
        return ", ".join(named) or "nobody by name"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, shortened."""
    return (str(error).splitlines() or [""])[0][:160]
