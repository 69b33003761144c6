"""Calls around a step that all ranks make together: end of data, barriers, overflow, per-rank parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.distributed as dist
from torch import Tensor, nn

from loongforge_comm import state as saved_state
from loongforge_comm.config import SchedulerConfig
from loongforge_comm.modules import SharedBuffers, broadcast_tensors
from loongforge_comm.reducer import Reducer
from loongforge_comm.team import Team
from loongforge_comm.watch import ModelWatch


class RankCalls(ABC):
    """Part of :class:`loongforge_comm.GradientScheduler`; not used on its own."""

    active: bool
    config: SchedulerConfig
    _model: nn.Module
    _team: Team
    _watch: ModelWatch | None
    _buffers: SharedBuffers

    @abstractmethod
    def _ready_reducer(self) -> Reducer: ...

    @abstractmethod
    def reduce_now(self) -> None:
        """Average the gradients that exist now."""

    def sync_buffers(self) -> None:
        """Copy rank 0's module buffers to all ranks now (before a checkpoint or an evaluation)."""
        if self.active:
            buffers = self._buffers.now()
            if buffers:
                broadcast_tensors(buffers, self._team.channels.ring, self._team.ranks[0])

    def agree_continue(self, *, has_batch: bool, rule: str = "stop") -> bool:
        """Agree whether the next step takes place when ranks may run out of data at different times.

        Args:
            has_batch: this rank has data for one more step.
            rule: ``stop``: end for all as soon as one rank has none. ``join``: go on while one rank has data;
                ranks without call :meth:`shadow_step` in place of forward and backward, and averages divide
                by the ranks that had data.

        Returns:
            True when the step takes place. Costs one store exchange.
        """
        if rule not in ("stop", "join"):
            msg = f"rule is {rule!r}, allowed are 'stop' and 'join'"
            raise ValueError(msg)
        if not self.active:
            return has_batch
        votes = [bool(vote) for vote in self._team.agreement.exchange("continue", has_batch)]
        live = sum(votes)
        if rule == "stop" or not live:
            return all(votes)
        self._ready_reducer().contributors = live
        return True

    def shadow_step(self) -> None:
        """Take part in the step's collectives without data (see :meth:`agree_continue`)."""
        if self.active and self._watch is not None:
            if self.config.buffers == "forward":
                self.sync_buffers()
            for parameter in self._watch.hooked.values():
                parameter.grad = None
            self.reduce_now()

    def barrier(self, name: str, *, timeout_s: float) -> None:
        """Wait for all ranks with a limit of its own, for example around a slow checkpoint of rank 0.

        Uses the store, not the collective library, so it does not count against ``timeout_s`` of the buckets.
        """
        if self.active:
            self._team.agreement.exchange(f"barrier/{name}", 1, timeout_s=timeout_s)

    def agree_found_inf(self, found_inf: Tensor) -> None:
        """Make an overflow on one rank count on all, in place (needed only with local parameters)."""
        if self.active:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self._team.channels.ring)

    def gather_local(self) -> dict[str, list[Tensor]]:
        """All-gather the parameters that stay per rank: name to one tensor per rank, for checkpoints."""
        if not self.active:
            return {}
        return saved_state.gather_local(self._model, self.config.local_parameters, self._team.channels.peers)
