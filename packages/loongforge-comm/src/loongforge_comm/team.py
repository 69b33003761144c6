"""The ranks that average together: store, process groups, heartbeats and waiting, made once per scheduler."""

from __future__ import annotations

import logging
from collections import Counter
from weakref import WeakKeyDictionary

import torch.distributed as dist

from loongforge_comm.agreement import Agreement, group_store
from loongforge_comm.channels import Channels
from loongforge_comm.config import SchedulerConfig, agreed_settings
from loongforge_comm.liveness import Liveness
from loongforge_comm.waiting import BucketWaiter

LOG = logging.getLogger("loongforge_comm")
_instances: WeakKeyDictionary[object, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""By default group: a process that comes to a run later has made fewer schedulers than the others."""


class Team:
    """Connections of one scheduler to the other ranks.

    Attributes:
        ranks: global ranks in group order.
        rank: this process's global rank.
        agreement: exchanges over the store.
        channels: process groups that carry buckets.
        liveness: heartbeats, ``None`` when off or alone.
        waiter: turns a missing rank into an error with its name.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, config: SchedulerConfig) -> None:
        """Agree on the settings, then make the groups (collective over the ranks)."""
        self.ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        self.rank = dist.get_rank()
        self._stock = config.mode == "plan-only"
        made = _instances.setdefault(dist.group.WORLD, Counter())
        label = str(made[self.ranks])  # all ranks of the group have made equally many before
        made[self.ranks] += 1
        self.agreement = Agreement(
            group_store(self.ranks, label), self.ranks, self.rank, config.agree_timeout_s
        )
        self.agreement.require_equal(
            "scheduler settings", agreed_settings(config), "use one SchedulerConfig on all ranks"
        )
        self.liveness: Liveness | None = None
        if config.heartbeat_interval_s and len(self.ranks) > 1:
            self.liveness = Liveness(
                group_store(self.ranks, f"{label}-beat"),
                self.ranks,
                self.rank,
                interval_s=config.heartbeat_interval_s,
                timeout_s=config.heartbeat_timeout_s,
            )
            self.liveness.start()
        self.channels = Channels(
            self.ranks, timeout_s=config.timeout_s, nccl_algorithms=config.nccl_algorithms
        )
        self.waiter = BucketWaiter(self.liveness, timeout_s=config.timeout_s)
        if self.liveness is not None:
            self.liveness.on_silent = self._silent

    @property
    def first(self) -> bool:
        """Whether this is the group's first rank, which computes what all use."""
        return self.rank == self.ranks[0]

    def _silent(self, ranks: tuple[int, ...]) -> None:
        """Runs in the heartbeat thread. A host that waits in a device call can only be freed from here.

        On CPU the waiting thread itself sees the heartbeats, unless stock DDP waits: then this names the rank
        in the log, and the next step border (or the group's own time limit) ends the run.
        """
        if self.liveness is None or not (self.waiter.on_device or self._stock):
            return
        LOG.error("%s", self.waiter.message("a rank is silent", ranks, 0.0))
        self.waiter.lost = ranks
        self.channels.abort_device_groups()

    def at_step(self, step: int) -> None:
        """Step number for messages and heartbeats."""
        self.waiter.step = step
        if self.liveness is not None:
            self.liveness.step = step

    def close(self) -> None:
        """End the threads; process groups stay with torch."""
        failed = self.liveness is not None and self.liveness.state == "failed"
        if self.liveness is not None:
            self.liveness.close()
        self.channels.close(limit_s=0.0 if failed else 5.0)
