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
from loongforge_comm.link import LinkModel
from loongforge_comm.measure import measure_channels
from loongforge_comm.plan import CommPlan
from loongforge_comm.planner import plan_buckets
from loongforge_comm.team import Team
from loongforge_comm.telemetry import Telemetry

LOG = logging.getLogger("loongforge_comm")
KEPT_BACKWARDS = 8
SCALE_LIMITS = (0.7, 2.0)
"""How far bucket times seen in training may correct the idle link measurement."""


class Planning:
    """Owns the link model, the strategy and the measured ready times.

    Attributes:
        link: cost model, measured at the first plan unless given.
        strategy: ``hybrid`` or ``simple``.
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
        self.analyses = 0
        self.rebuilds = 0

    def first(self) -> CommPlan:
        """The plan before anything was measured in training (collective)."""
        self.analyses += 1
        return self._make(self.predicted, {}, "mdg" if self.predicted else "registration", step=0)

    def remake(
        self, plan: CommPlan, fires: Mapping[str, int], telemetry: Telemetry, *, step: int, reason: str
    ) -> CommPlan:
        """A new plan (collective): ready times are the mean over ranks of each rank's median, and the link is
        corrected
        by the smallest ratio of measured to predicted collective time over ranks.
        """
        names = [spec.name for spec in plan.gradients]
        parts = self._team.agreement.exchange(
            "ready-times", [self._times(names), self._scale(plan, telemetry)]
        )
        pairs = [part for part in parts if isinstance(part, list)]
        tables = [times for times, _ in pairs if times]
        scales = [float(scale) for _, scale in pairs if scale]
        low, high = SCALE_LIMITS
        scale = min(max(min(scales), low), high) if scales else 1.0
        if tables:
            ready = {name: sum(t[i] for t in tables) / len(tables) for i, name in enumerate(names)}
            source = "measured"
        else:
            ready, source = {spec.name: spec.ready_ms for spec in plan.gradients}, plan.source
        made = self._make(ready, fires, source, step=step, scale=scale)
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
        scale: float = 1.0,
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
                link.scaled(scale) if scale != 1.0 else link,
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

    def _scale(self, plan: CommPlan, telemetry: Telemetry) -> float | None:
        """Measured over predicted collective time, summed over buckets; ``None`` without measurements."""
        if self.link is None:
            return None
        seen = telemetry.bucket_ms()
        buckets = {b.index: b for b in plan.buckets}
        predicted = sum(self.link.predict_ms(buckets[i].strategy, buckets[i].nbytes) for i in seen)
        return sum(seen.values()) / predicted if predicted > 0 else None
