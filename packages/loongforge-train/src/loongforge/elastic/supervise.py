"""Runs one session after the other while ranks come and go: each session has the ranks of one generation."""

from __future__ import annotations

import dataclasses
import functools
import gc
import logging
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import nn

from loongforge.composition import Kept
from loongforge.config import TrainConfig
from loongforge.elastic.border import MembersChanged, StepBorder
from loongforge.elastic.handover import hand_over
from loongforge.elastic.lasting import LastingMemory
from loongforge.elastic.notice import Notice, post
from loongforge.errors import ConfigError, ControlError, require
from loongforge.ranks import TORCHRUN_VARIABLES, Ranks, backend_of, choose_device, prefer_loopback
from loongforge.records import METRICS_FILE
from loongforge.runs import Prepared, Run, assemble, check_run, prepare
from loongforge.session import Callback, Result
from loongforge.signals import StopRequest, watch_signals

if TYPE_CHECKING:
    from loongforge_comm import Generation, Membership, MembershipConfig

log = logging.getLogger("loongforge")
MOST_REPEATS = 3
"""Failures in a row at one step that nobody left after; then the error is passed on."""
STORE_LIMIT_S = 10.0
"""Longest wait for the store of a run that may be over."""
UNFINISHED = -1
"""Step of a process that has no state yet: it must never be the one whose state the others take."""


class Supervisor:
    """An elastic run as one of its processes sees it.

    Args:
        config: The run.
        members: The membership, in its first generation here.
        prepared: Model and data of this process.
        callbacks: Called with each step record.
    """

    def __init__(
        self,
        config: TrainConfig,
        members: Membership,
        prepared: Prepared,
        *,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config = config
        self.members = members
        self._memory = prepared.memory
        self._prepared = dataclasses.replace(prepared, memory=LastingMemory(prepared.memory))
        self._device = choose_device(config.device)
        self._callbacks = callbacks
        self._earlier: Kept | None = None
        self._border: StepBorder | None = None
        self._repeats = 0
        self.run: Run | None = None
        """The present session, or the last one."""
        self.left = False
        """Whether a signal made this process leave a run that goes on."""

    @property
    def model(self) -> nn.Module:
        """The model, the same one in all sessions."""
        return self._prepared.model

    @property
    def last_rank(self) -> int:
        """This process's rank at the end of the run, -1 when it left a run that goes on."""
        return -1 if self.left else self.members.rank

    @classmethod
    def found(cls, config: TrainConfig, *, callbacks: Sequence[Callback] = ()) -> Self:
        """Begin a run with all ranks that torchrun has started.

        Raises:
            ConfigError: torchrun's variables are missing, or a setting does not fit.
            RankFailureError: A rank did not come.
        """
        check_run(config)
        missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
        if missing:
            msg = (
                f"elastic is on but {', '.join(missing)} is not set: start with torchrun, one rank is enough"
            )
            raise ConfigError(msg)
        device = choose_device(config.device)
        prefer_loopback(os.environ["MASTER_ADDR"])
        comm = require("loongforge_comm", "loongforge-comm", "use --no-elastic")
        members = comm.Membership.found(  # type: ignore[attr-defined]
            backend_of(device), store=config.elastic.store or None, config=settings_of(config)
        )
        return cls(config, members, prepare(config, device), callbacks=callbacks)

    @classmethod
    def rejoin(cls, notice: Notice, *, limit_s: float, callbacks: Sequence[Callback] = ()) -> Self:
        """Come to a run that goes on. Model and data are built first: from the answer on the others wait.

        Raises:
            ControlError: The run does not answer.
            RankFailureError: The run ended before this process could come in.
        """
        config = notice.config
        device = choose_device(config.device)
        prefer_loopback(notice.address.partition(":")[0])
        comm = require("loongforge_comm", "loongforge-comm")
        check_store(notice)
        prepared = prepare(config, device)
        names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
        party = "/".join(os.environ[n] for n in names if n in os.environ) or None
        try:
            members = comm.Membership.join(  # type: ignore[attr-defined]
                notice.backend,
                address=notice.address,
                config=settings_of(config),
                party=party,
                size=int(os.environ.get("WORLD_SIZE", "1")),
                limit_s=limit_s,
            )
        except ConnectionError as error:
            raise ControlError(str(error)) from error
        return cls(config, members, prepared, callbacks=callbacks)

    def train(self) -> Result:
        """Train to the end, with whoever is there.

        Raises:
            RemovedError: The others went on without this process.
            RankFailureError: Too few ranks are left, or the run's store is gone.
        """
        try:
            with watch_signals() as stop:
                while True:
                    self.run = None
                    try:
                        self.run = self._assemble(stop)
                        result = self.run.session.train()
                    except MembersChanged as change:
                        self._keep()
                        if self.members.member not in change.generation.members:
                            return self._left(stop)
                        self._enter(change.generation)
                    except Exception as error:
                        self._keep()
                        self._enter(self._without(error))
                    else:
                        self.members.close(ended=True)
                        return result
        finally:
            self.members.close()
            self._memory.close()

    def _left(self, stop: StopRequest) -> Result:
        """Return how this process ended, whom a signal asked to leave a run that goes on."""
        self.left = True
        step = self._border.step if self._border is not None else 0
        log.warning("left the run after step %d; the others go on", step)
        return Result(
            steps=step,
            exit_code=stop.exit_code,
            metrics=Path(self.config.output) / METRICS_FILE,
            checkpoint=None,
            resumed_from=None,
        )

    def _assemble(self, stop: StopRequest) -> Run:
        """Build the session of the present generation; all its ranks do."""
        # Graphs and buffers of the session before are given back before there are new ones.
        gc.collect()
        members, config = self.members, self.config
        ranks = Ranks(rank=members.rank, world_size=members.world_size, device=self._device, members=members)
        ranks.require_equal("the configuration", repr(config))
        run = assemble(config, self._prepared, ranks, callbacks=self._callbacks, earlier=self._earlier)
        run.session.members, run.session.stop = members, stop
        if members.generation.number:
            run.session.handover = functools.partial(
                hand_over, run.session.engine, config, members, self._border
            )
        if ranks.rank == 0:
            post(Path(config.output), members, config, backend=backend_of(self._device))
        return run

    def _keep(self) -> None:
        """Leave a session; what the next one can use stays."""
        run = self.run
        if run is None:
            return
        run.session.close()
        # A rank that is gone does not write its part any more; the others have, or are about to.
        run.session.writer.hurry(self.config.elastic.heartbeat_s)
        run.ranks.close()
        self._earlier = Kept.of(run.session.parts)
        self._border = run.session.border or self._border
        for parameter in run.model.parameters():
            parameter.grad = None

    def _without(self, error: Exception) -> Generation:
        """Return the generation that goes on after an error, or raise it when it is this process's own."""
        step = self._border.step if self._border is not None else UNFINISHED
        if not self.members.blames_others(error) or not self.members.trouble():
            raise error
        log.warning("step %d is given up: %s", step + 1, error)
        generation = self.members.recover(step)
        self._repeats = 0 if generation.left else self._repeats + 1
        if self._repeats >= MOST_REPEATS:
            raise error
        return generation

    def _enter(self, generation: Generation) -> None:
        self.members.enter(generation)
        if self.members.receives:
            # Until rank 0's state is here this process has none that belongs together.
            self._border = None


def check_store(notice: Notice) -> None:
    """Fail soon when the run is over: building a model first may take minutes.

    Raises:
        ControlError: Its store does not answer.
    """
    where = notice.address.partition("/")[0]
    host, _, port = where.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=STORE_LIMIT_S):
            return
    except OSError as error:
        msg = f"no store answers at {where} ({error}): the run has ended, or its store is gone"
        raise ControlError(msg) from error


def settings_of(config: TrainConfig) -> MembershipConfig:
    """Return the membership's settings of a run."""
    comm = require("loongforge_comm", "loongforge-comm", "use --no-elastic")
    elastic = config.elastic
    settings: MembershipConfig = comm.MembershipConfig(  # type: ignore[attr-defined]
        check_every=elastic.check_every,
        heartbeat_interval_s=elastic.heartbeat_interval_s,
        heartbeat_timeout_s=elastic.heartbeat_s,
        agree_timeout_s=max(120.0, 2 * elastic.heartbeat_s),
        min_ranks=elastic.min_ranks,
    )
    return settings
