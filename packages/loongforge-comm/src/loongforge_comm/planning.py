"""Makes and remakes the plan of a running scheduler, alike on every rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from torch import nn

from loongforge_comm.config import SchedulerConfig
from loongforge_comm.gradients import gradient_specs, trainable_parameters
from loongforge_comm.groups import apply_overrides, load_overrides
from loongforge_comm.link import Correction, LinkModel
from loongforge_comm.measure import measure_channels
from loongforge_comm.plan import CommPlan
from loongforge_comm.planner import plan_buckets
from loongforge_comm.team import Team
from loongforge_comm.telemetry import Telemetry

LOG = logging.getLogger("loongforge_comm")
KEPT_BACKWARDS = 8


class Planning:
    """Owns the link model, the strategy and the measured ready times.

    Attributes:
        link: cost model, measured at the first plan unless given.
        strategy: ``hybrid`` or ``simple``.
        corrections: what training showed about the link, by strategy; kept over rebuilds.
        predicted: ready times by name to start from, ``None`` for the reverse registration order.
        analyses: plans made from scratch (a resumed run makes none).
        rebuilds: plans remade from measured times or after a change.
    """

    def __init__(
        self,
        model: nn.Module,
        team: Team,
        config: SchedulerConfig,
        link: LinkModel | None,
        predicted: Mapping[str, float] | None,
    ) -> None:
        self._model = model
        self._team = team
        self._config = config
        self._history: list[dict[str, float]] = []
        self.link = link
        self.strategy: str = config.strategy
        self.predicted = dict(predicted) if predicted is not None else None
        self.corrections: dict[str, Correction] = {}
        self.analyses = 0
        self.rebuilds = 0

    def first(self) -> CommPlan:
        """The plan before anything was measured in training (collective)."""
        self.analyses += 1
        return self._make(self.predicted, {}, "mdg" if self.predicted else "registration", step=0)

    def remake(
        self, plan: CommPlan, fires: Mapping[str, int], telemetry: Telemetry, *, step: int, reason: str
    ) -> CommPlan:
        """A new plan (collective).

        Ready times are the mean over ranks of each rank's median; the link is corrected by the bucket times
        seen.
        """
        names = [spec.name for spec in plan.gradients]
        solo = telemetry.ran_alone()
        mine = {str(index): [ms, index in solo] for index, ms in telemetry.bucket_ms().items()}
        parts = self._team.agreement.exchange("ready-times", [self._times(names), mine])
        pairs = [part for part in parts if isinstance(part, list)]
        tables = [times for times, _ in pairs if times]
        self._correct(plan, [table for _, table in pairs])
        if tables:
            ready = {name: sum(t[i] for t in tables) / len(tables) for i, name in enumerate(names)}
            source = "measured"
        else:
            ready, source = {spec.name: spec.ready_ms for spec in plan.gradients}, plan.source
        made = self._make(ready, fires, source, step=step)
        self.rebuilds += 1
        self._history = []
        LOG.info("plan %s rebuilt at step %d (%s)", made.hash, step, reason)
        return made

    def observe(self, ready_ms: Mapping[str, float]) -> None:
        """Keep the ready times of one backward."""
        if ready_ms:
            self._history.append(dict(ready_ms))
            del self._history[:-KEPT_BACKWARDS]

    def rebuild_due(self, plan: CommPlan, step: int) -> bool:
        """Whether the border after ``step`` steps rebuilds; depends on nothing that differs between ranks."""
        config = self._config
        first = plan.source != "measured" and step == config.warmup_steps
        later = bool(config.rebuild_interval) and step % config.rebuild_interval == 0
        return config.mode == "hooks" and (first or later)

    def profiling(self, step: int) -> bool:
        """Whether ready times of the coming backward are wanted: warm-up, and three steps before a
        rebuild.
        """
        interval = self._config.rebuild_interval
        left = interval - step % interval if interval else KEPT_BACKWARDS
        return step <= self._config.warmup_steps or left <= 3

    def _make(
        self,
        ready_ms: Mapping[str, float] | None,
        fires: Mapping[str, int],
        source: str,
        *,
        step: int,
    ) -> CommPlan:
        """Compute on the first rank and hand the text to the others, so that rounding cannot split the
        ranks.
        """
        link = self._measured_link()
        text: str | None = None
        if self._team.first:
            specs = gradient_specs(self._model, ready_ms=ready_ms, local=self._config.local_parameters)
            specs = apply_overrides(specs, load_overrides(self._config.group_overrides))
            text = plan_buckets(
                tuple(replace(spec, fires=fires.get(spec.name, spec.fires)) for spec in specs),
                link.corrected(self.corrections),
                strategy=self.strategy,
                simple_bucket_mib=self._config.simple_bucket_mib,
                max_bucket_mib=self._config.max_bucket_mib,
                source=source,
                step=step,
            ).to_json()
        return CommPlan.from_json(str(self._team.agreement.exchange("plan", text)[0]))

    def _measured_link(self) -> LinkModel:
        if self.link is None:
            parameters = trainable_parameters(self._model, self._config.local_parameters)
            self.link = measure_channels(
                self._team.channels,
                self._team.agreement,
                next(iter(parameters.values())).device,
                budget_s=self._config.link_budget_s,
                cache=self._config.link_cache,
            )
        return self.link

    def _times(self, names: Sequence[str]) -> list[float]:
        """Median ready time per name; a gradient never seen counts as ready with the last one."""
        kept = self._history[1:] if len(self._history) > 1 else self._history
        if not kept:
            return []
        last = median(max(times.values()) for times in kept)
        return [median([times[n] for times in kept if n in times] or [last]) for n in names]

    def _correct(self, plan: CommPlan, tables: Sequence[Mapping[str, tuple[float, bool]]]) -> None:
        """Learn from the bucket times of all ranks; their minimum leaves waiting for stragglers out."""
        if self.link is None or not tables:
            return
        points: dict[str, list[tuple[float, float, bool]]] = {}
        for bucket in plan.buckets:
            seen = [table[str(bucket.index)] for table in tables if str(bucket.index) in table]
            if len(seen) == len(tables) and bucket.nbytes:
                idle = self.link.predict_ms(bucket.strategy, bucket.nbytes)
                fastest = min(ms for ms, _ in seen)
                points.setdefault(bucket.strategy, []).append((idle, fastest, all(solo for _, solo in seen)))
        for strategy, rows in points.items():
            self.corrections[strategy] = Correction.fit(*zip(*rows, strict=True))
