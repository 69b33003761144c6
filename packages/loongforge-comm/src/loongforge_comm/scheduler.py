"""The public entry: one object beside a model that averages its gradients over ranks by a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loongforge_comm import ddp
from loongforge_comm import state as saved_state
from loongforge_comm.config import SchedulerConfig, check_strategy
from loongforge_comm.gradients import refuse_compiled, trainable_parameters
from loongforge_comm.link import LinkModel
from loongforge_comm.modules import SharedBuffers, broadcast_model, check_same_model
from loongforge_comm.plan import CommPlan
from loongforge_comm.planning import Planning
from loongforge_comm.rank_calls import RankCalls
from loongforge_comm.records import BackwardRecord
from loongforge_comm.reducer import Reducer
from loongforge_comm.reporting import Reporting
from loongforge_comm.stock_times import StockTimes
from loongforge_comm.team import Team
from loongforge_comm.watch import ModelWatch


class GradientScheduler(RankCalls):
    """Averages gradients beside backward, in planned buckets, with the numerics of stock DDP.

    Create it on every rank in the same order, keep calling the model itself, and call :meth:`step_end` after
    each optimizer step::

        scheduler = GradientScheduler(model)
        for step, batch in enumerate(loader):
            model(batch).backward()      # returns with grad = average over ranks
            optimizer.step(); optimizer.zero_grad()
            scheduler.step_end(step)

    Without a process group, or with one rank, it does nothing and costs nothing.

    What it keeps from stock DDP: initial broadcast, buffers of rank 0 before each synchronised forward,
    ``no_sync`` accumulation, ``None`` for gradients that no rank computed. Differences: the model is not
    wrapped (mode ``plan-only`` excepted), gradients are views of flat buffers that the next synchronised
    backward overwrites, and each rank's data may use parameters or not without a graph walk.

    Not supported: ``create_graph=True`` through the averaged gradients, optimizers that run inside backward,
    and gradients taken with ``torch.autograd.grad`` (they are not averaged).
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        config: SchedulerConfig | None = None,
        process_group: dist.ProcessGroup | None = None,
        plan: CommPlan | None = None,
        link: LinkModel | None = None,
        ready_ms: Mapping[str, float] | None = None,
    ) -> None:
        """Check that all ranks hold the same model, copy rank 0's tensors, install the hooks.

        Link and plan are made at the first synchronised forward or backward, unless
        :meth:`load_state_dict` comes before.

        Args:
            model: module with parameters on CPU or CUDA, not compiled as a whole.
            config: settings, equal on every rank.
            process_group: ranks to average over; ``None`` for all.
            plan: plan to start with, for example read from a file; equal on all ranks.
            link: cost model to use in place of a measurement.
            ready_ms: ready time by parameter name for the first plan (``build_mdg(...).ready_ms()``).

        Raises:
            CompiledModelError: the model is a ``torch.compile`` wrapper.
            PlanMismatchError: ranks differ in parameters, settings or plan.
            RankFailureError: a rank did not arrive within ``agree_timeout_s``.
        """
        refuse_compiled(model)
        self.config = config or SchedulerConfig()
        self.module: nn.Module = model
        self._model = model
        self._plan = plan
        self._reducer: Reducer | None = None
        self._watch: ModelWatch | None = None
        self._stock_times: StockTimes | None = None
        self._wanted: str | None = None
        self._rebuild_wanted = False
        self._steps = 0
        self._saved: saved_state.LoadedState | None = None
        enough = dist.is_available() and dist.is_initialized()
        self.active = enough and (dist.get_world_size(process_group) > 1 or self.config.allow_single_rank)
        if self.active:
            self._team = Team(process_group, self.config)
            try:
                self._set_up(link, ready_ms)
            except BaseException:
                self._team.close()
                raise

    def _set_up(
        self,
        link: LinkModel | None,
        ready_ms: Mapping[str, float] | None,
    ) -> None:
        config, local = self.config, self.config.local_parameters
        check_same_model(self._model, self._team.agreement, local)
        self._buffers = SharedBuffers(self._model, local)
        self._planning = Planning(self._model, self._team, config, link, ready_ms)
        if config.broadcast_initial:
            broadcast_model(self._model, self._team.channels.ring, self._team.ranks[0], local)
        self._reporting = Reporting(config, first=self._team.first)
        if config.mode == "plan-only":
            self._wrap_stock()
            return
        self._watch = ModelWatch(
            self._model,
            config,
            self._team.agreement,
            reducer=self._ready_reducer,
            current=lambda: self._reducer,
            parameters_changed=lambda: self._replan("parameters frozen or unfrozen"),
            sync_buffers=self.sync_buffers,
        )

    def _wrap_stock(self) -> None:
        """Hand the plan to stock DDP; our own buffers are made only if ``reduce_now`` is called."""
        config = self.config
        plan = self._plan = self._plan or self._planning.first()
        saved_state.check_plan_fits(plan, self._model, config.local_parameters, len(self._team.ranks))
        self._team.agreement.require_equal("communication plan", plan.hash, "load one plan on all ranks")
        group, compress = self._team.channels.ring, config.compress == "bf16"
        self.module = ddp.wrap(self._model, plan, group, config)
        self._reporting.use_plan(plan)
        if config.status_path is not None:
            self._stock_times = StockTimes(self.module, group, self._reporting.add, compress=compress)
        elif compress:
            ddp.compress(self.module, group)

    # ---- plan

    @property
    def plan(self) -> CommPlan:
        """The plan in use; made now (a collective call) when there is none yet."""
        if not self.active:
            msg = (
                "plan needs an initialised process group of at least two ranks; start with torchrun, or set "
                "allow_single_rank=True"
            )
            raise RuntimeError(msg)
        if self.config.mode == "plan-only" and self._plan is not None:
            return self._plan
        return self._ready_reducer().plan

    @property
    def link(self) -> LinkModel | None:
        """The cost model in use, ``None`` before the first plan."""
        return self._planning.link if self.active else None

    def _ready_reducer(self) -> Reducer:
        if self._reducer is None:
            return self._use(self._plan or self._planning.first())
        return self._reducer

    def _use(self, plan: CommPlan) -> Reducer:
        """Check the plan against the model and the other ranks, build its buffers, lead the hooks there."""
        local = self.config.local_parameters
        saved_state.check_plan_fits(plan, self._model, local, len(self._team.ranks))
        self._team.agreement.require_equal("communication plan", plan.hash, "load one plan on all ranks")
        old = self._reducer
        reducer = Reducer(
            plan,
            trainable_parameters(self._model, local),
            self._team.channels,
            contributors=old.contributors if old is not None else len(self._team.ranks),
            overlap=self.config.mode == "hooks",
            compress=self.config.compress == "bf16",
            wait=self._team.waiter.wait,
            deferred_first=old is None and plan.source != "measured",
            device_times_every=self.config.device_times_every,
        )
        reducer.on_sent = self._team.waiter.sent
        reducer.on_finish = self._finished
        reducer.profile = self._planning.profiling(self._steps)
        self._team.waiter.plan = plan
        self._plan = plan
        self._reporting.use_plan(plan)
        self._take(reducer)
        return reducer

    def _take(self, reducer: Reducer | None) -> None:
        self._reducer = reducer
        if self._watch is not None:
            self._watch.aim()

    def _finished(self, record: BackwardRecord) -> None:
        self._reporting.add(record)
        if self._reducer is not None and not record.captured and self._planning.profiling(self._steps):
            self._planning.observe(self._reducer.last_ready)

    def _replan(self, reason: str) -> None:
        telemetry = self._reporting.telemetry
        if self._reducer is None or telemetry is None:
            return
        plan = self._planning.remake(
            self._reducer.plan, self._reducer.fires(), telemetry, step=self._steps, reason=reason
        )
        self._use(plan)

    # ---- during a step

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally: backward inside the context sends nothing."""
        stock = self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()
        own = self._watch.quiet() if self._watch is not None else nullcontext()
        with own, stock:
            yield

    def reduce_now(self) -> None:
        """Average the gradients that exist now, by the same buckets (after a CUDA graph replay, or by hand).

        ``grad`` tensors keep their identity and address. Every rank must call it.
        """
        if self.active:
            self._ready_reducer().reduce_now()

    def attach_gradients(self) -> None:
        """Make every ``grad`` a zeroed view of the flat buffers; a captured graph then writes there."""
        if self.active:
            self._ready_reducer().attach_views()

    # ---- step border

    def switch_strategy(self, name: str) -> None:
        """Ask for ``simple`` or ``hybrid``; all ranks change at the border after the request has travelled.

        One rank's request is enough; of several the lowest rank's wins.

        Raises:
            ValueError: unknown name, or mode ``plan-only``.
        """
        check_strategy(name)
        self._refuse_stock("switch strategies")
        self._wanted = name
        if self.active:
            self._ready_reducer().request = True

    def rebuild(self) -> None:
        """Ask for a new plan from measured ready times at the next step border.

        Raises:
            ValueError: mode ``plan-only``.
        """
        self._refuse_stock("rebuild the plan")
        self._rebuild_wanted = True
        if self.active:
            self._ready_reducer().request = True

    def _refuse_stock(self, what: str) -> None:
        if self.config.mode == "plan-only":
            msg = f"mode is 'plan-only', where stock DDP fixes its buckets; use mode 'hooks' to {what}"
            raise ValueError(msg)

    def step_end(self, step: int | None = None) -> None:
        """Mark the step border, where plan and strategy may change. Call it once per optimizer step.

        Args:
            step: the trainer's step number, for messages; counted here when ``None``.
        """
        if not self.active:
            return
        self._steps += 1
        label = self._steps if step is None else step
        self._team.waiter.check()
        self._team.at_step(label)
        if self.config.mode != "plan-only":
            self._plan_border()
        elif self._stock_times is not None:
            self._stock_times.flush()
        every = self.config.heartbeat_every
        if every and self._steps % every == 0:
            self._reporting.exchange_times(self.plan, self._team.agreement)
        parameters = len(self._watch.hooked) if self._watch is not None else 0
        self._reporting.warn_of_late_gradients(parameters=parameters, steps=self._steps)
        if self._reporting.due:
            self._reporting.write(label, self.stats())

    def check(self) -> None:
        """Raise when a rank was found silent since, on CUDA, where the host does not wait for buckets.

        Raises:
            RankFailureError: naming the rank.
        """
        if self.active:
            self._team.waiter.check()

    def _plan_border(self) -> None:
        reducer = self._ready_reducer()
        if reducer.armed:
            msg = (
                "step_end() was called while a synchronised backward has not finished: its end was not seen, "
                "which happens when every gradient came from inside reentrant checkpoints and the model's "
                "forward was not called directly. Call the model itself, or use_reentrant=False"
            )
            raise RuntimeError(msg)
        due = self._planning.rebuild_due(reducer.plan, self._steps)
        if reducer.take_request() or due:
            self._border(due=due)
        self._ready_reducer().profile = self._planning.profiling(self._steps)

    def _border(self, *, due: bool) -> None:
        """All ranks are here for the same reason: exchange wishes, then change alike."""
        wishes = self._team.agreement.exchange("border", [self._wanted, self._rebuild_wanted])
        pairs = [wish for wish in wishes if isinstance(wish, list)]
        switch = next((str(name) for name, _ in pairs if name is not None), None)
        self._wanted, self._rebuild_wanted = None, False
        self._ready_reducer().request = False
        if switch is not None and switch != self._planning.strategy:
            self._planning.strategy = switch
            self._replan(f"strategy {switch}")
        elif due or any(rebuild for _, rebuild in pairs):
            self._replan("measured ready times")

    def stats(self) -> dict[str, object]:
        """Figures of this rank: a flat part for logs, and ``groups`` and ``ranks`` for the monitor."""
        strategy = self._planning.strategy if self.active else self.config.strategy
        result: dict[str, object] = {
            "active": self.active,
            "mode": self.config.mode,
            "strategy": strategy,
        }
        if not self.active or self._plan is None or self._reporting.telemetry is None:
            return result
        reducer = self._reducer
        return result | {
            "buffer_bytes": reducer.buffer_bytes if reducer is not None else 0,
            "world_size": len(self._team.ranks),
            "contributors": reducer.contributors if reducer is not None else len(self._team.ranks),
            "steps": self._steps,
            "rebuilds": self._planning.rebuilds,
            "analyses": self._planning.analyses,
            **self._reporting.figures(self._plan),
        }

    def state_dict(self) -> dict[str, object]:
        """Plan, link and counters as plain data. Collective if no plan exists yet."""
        if not self.active:
            return saved_state.pack_again(self._saved, steps=self._steps, strategy=self.config.strategy)
        plan = self.plan
        if self._reducer is not None:
            fires = self._reducer.fires()
            plan = replace(plan, gradients=tuple(replace(g, fires=fires[g.name]) for g in plan.gradients))
        return saved_state.pack(
            plan,
            self._planning.link,
            world_size=len(self._team.ranks),
            steps=self._steps,
            rebuilds=self._planning.rebuilds,
            strategy=self._planning.strategy,
        )

    def load_state_dict(self, state: Mapping[str, object], *, on_mismatch: str = "refuse") -> None:
        """Take plan, link and counters from :meth:`state_dict`; then nothing is measured or planned again.

        Args:
            state: what ``state_dict`` returned.
            on_mismatch: ``refuse`` raises when the world size or the parameters differ; ``replan`` keeps the
                counters and makes a new plan.

        Raises:
            ValueError: wrong version, or a mismatch that is named.
        """
        loaded = self._saved = saved_state.unpack(state)
        self._steps = loaded.steps
        if not self.active:
            return
        self._planning.rebuilds, self._planning.strategy = loaded.rebuilds, loaded.strategy
        if loaded.plan is None:
            return
        local = self.config.local_parameters
        try:
            saved_state.check_plan_fits(loaded.plan, self._model, local, len(self._team.ranks))
        except ValueError:
            if on_mismatch != "replan":
                raise
            return
        self._planning.link = loaded.link
        self._take(None)
        self._plan = loaded.plan
        if self.config.mode == "plan-only":
            self._wrap_stock()

    def close(self) -> None:
        """Remove the hooks and end the threads. Gradients keep their values."""
        if not self.active:
            return
        if self._reporting.telemetry is not None:
            self._reporting.write(self._steps, self.stats(), closed=True)
        if self._watch is not None:
            self._watch.close()
        self._team.close()

    def __enter__(self) -> GradientScheduler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
