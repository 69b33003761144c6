"""What a scheduler tells about its run: telemetry, stragglers, the status file, late gradients."""

from __future__ import annotations

import logging

from loongforge_comm import state as saved_state
from loongforge_comm.agreement import Agreement
from loongforge_comm.config import SchedulerConfig
from loongforge_comm.plan import CommPlan
from loongforge_comm.records import BackwardRecord
from loongforge_comm.telemetry import StatusFile, Telemetry

LOG = logging.getLogger("loongforge_comm")
LATE_FIRST_GRADIENT = 0.8
LOOK_EVERY = 16
"""Steps between looks for late gradients after the first ten: the median of the history costs 0.2 ms."""


class Reporting:
    """Collects the records of this rank and, now and then, of all ranks.

    Attributes:
        telemetry: this rank's history, ``None`` before the first plan.
        compile_suspected: the first gradient comes so late that the whole model must be compiled.
    """

    def __init__(self, config: SchedulerConfig, *, first: bool) -> None:
        """``first``: this is the rank that writes the status file."""
        self.telemetry: Telemetry | None = None
        self.compile_suspected = False
        self._status: StatusFile | None = None
        self._peer_times: dict[str, object] = {}
        if first and config.status_path is not None:
            self._status = StatusFile(config.status_path)

    def use_plan(self, plan: CommPlan) -> Telemetry:
        """Bucket numbers mean those of ``plan`` from now on."""
        if self.telemetry is None:
            self.telemetry = Telemetry(plan)
        else:
            self.telemetry.use_plan(plan)
        return self.telemetry

    def add(self, record: BackwardRecord) -> None:
        """Account one synchronised backward."""
        if self.telemetry is not None:
            self.telemetry.add(record)

    def exchange_times(self, plan: CommPlan, agreement: Agreement) -> None:
        """Bucket times of all ranks (collective): their minimum is the collective, the rest is waiting."""
        if self.telemetry is None:
            return
        mine = {str(index): ms for index, ms in self.telemetry.bucket_ms().items()}
        parts = agreement.exchange("bucket-times", [mine, self.telemetry.summary()["backward_ms_mean"]])
        self._peer_times = saved_state.straggler_table(plan, agreement.ranks, parts)

    def warn_of_late_gradients(self, *, parameters: int, steps: int) -> None:
        """Say once that nothing can overlap because the first gradient comes at the end of backward."""
        if self.compile_suspected or self.telemetry is None or parameters <= 4:
            return
        if steps < 3 or (steps > 10 and steps % LOOK_EVERY):
            return
        share = self.telemetry.first_gradient_share()
        if share is None or share <= LATE_FIRST_GRADIENT:
            return
        self.compile_suspected = True
        LOG.warning(
            "the first gradient arrives after %.0f %% of backward, so nothing can overlap; this is what "
            "torch.compile of the whole model does. Compile the repeated blocks instead "
            "(for block in model.blocks: block.compile())",
            100 * share,
        )

    def figures(self, plan: CommPlan) -> dict[str, object]:
        """Figures of the run under ``plan``."""
        if self.telemetry is None:
            return {}
        return {
            "plan_hash": plan.hash,
            "plan_source": plan.source,
            "buckets": len(plan.buckets),
            "gradient_bytes": plan.nbytes,
            "predicted_exposed_ms": plan.exposed_ms,
            "whole_model_compile_suspected": self.compile_suspected,
            **self.telemetry.summary(),
            "groups": self.telemetry.groups(),
            "ranks": self._peer_times,
        }

    @property
    def due(self) -> bool:
        """Whether the status file wants to be written."""
        return self._status is not None and self._status.due

    def write(self, step: int, figures: dict[str, object], *, closed: bool = False) -> None:
        """Write the status file where there is one."""
        if self._status is not None:
            end: dict[str, object] = {"closed": True} if closed else {}
            self._status.write({"step": step, **end, **figures}, force=closed)
