"""The public entry: one object beside a model that averages its gradients over ranks by a plan."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from loongforge_comm import ddp
from loongforge_comm import state as saved_state
from loongforge_comm.agreement import Agreement, group_store
from loongforge_comm.channels import Channels
from loongforge_comm.config import SchedulerConfig, check_strategy
from loongforge_comm.gradients import gradient_specs, refuse_compiled, trainable_parameters
from loongforge_comm.groups import apply_overrides, load_overrides
from loongforge_comm.internals import accumulates, current_backward
from loongforge_comm.link import LinkModel
from loongforge_comm.liveness import Liveness
from loongforge_comm.measure import measure_channels
from loongforge_comm.modules import broadcast_model, broadcast_tensors, check_same_model, shared_buffers
from loongforge_comm.plan import CommPlan
from loongforge_comm.planner import plan_buckets
from loongforge_comm.reducer import BackwardRecord, Reducer, install_hooks
from loongforge_comm.telemetry import StatusFile, Telemetry
from loongforge_comm.waiting import BucketWaiter

LOG = logging.getLogger("loongforge_comm")
LATE_FIRST_GRADIENT = 0.9
_instances: Counter[tuple[int, ...]] = Counter()


class GradientScheduler:
    """Averages gradients beside backward, in planned buckets, with the numerics of stock DDP.

    Create it on every rank in the same order, keep calling the model itself, and call :meth:`step_end` after
    each
    optimizer step::

        scheduler = GradientScheduler(model)
        for step, batch in enumerate(loader):
            model(batch).backward()      # returns with grad = average over ranks
            optimizer.step(); optimizer.zero_grad()
            scheduler.step_end(step)

    Without a process group, or with one rank, it does nothing and costs nothing.

    What it keeps from stock DDP: initial broadcast, buffers of rank 0 before each synchronised forward,
    ``no_sync``
    accumulation, ``None`` for gradients that no rank computed. Differences: the model is not wrapped (mode
    ``plan-only`` excepted), gradients are views of flat buffers that the next synchronised backward
    overwrites, and
    parameters may be used or not by each rank's data without a graph walk.

    Not supported: ``create_graph=True`` through the averaged gradients, optimizers that run inside backward,
    gradients
    taken with ``torch.autograd.grad`` (they are not averaged).
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

        The link measurement and the plan are made at the first synchronised forward or backward, so that
        :meth:`load_state_dict` can come before and spare both.

        Args:
            model: module with parameters on CPU or CUDA, not compiled as a whole.
            config: settings, equal on every rank.
            process_group: ranks to average over; ``None`` for all.
            plan: plan to start with, for example read from a file; equal on all ranks.
            link: cost model to use in place of a measurement.
            ready_ms: predicted ready time by parameter name (``build_mdg(...).ready_ms()``), for the first
                plan.

        Raises:
            CompiledModelError: the model is a ``torch.compile`` wrapper.
            PlanMismatchError: ranks differ in parameters, settings or plan.
            RankFailureError: a rank did not arrive within ``agree_timeout_s``.
        """
        refuse_compiled(model)
        self.config = config or SchedulerConfig()
        self._model = model
        self._strategy: str = self.config.strategy
        self._wanted: str | None = None
        self._rebuild_wanted = False
        self._plan = plan
        self._link = link
        self._predicted = dict(ready_ms) if ready_ms is not None else None
        self._reducer: Reducer | None = None
        self._sync = True
        self._steps = 0
        self._rebuilds = 0
        self._analyses = 0
        self._warned: set[str] = set()
        self._closed = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.active = dist.is_available() and dist.is_initialized() and self._enough_ranks(process_group)
        self.module: nn.Module = model
        if self.active:
            self._set_up(process_group)

    def _enough_ranks(self, group: dist.ProcessGroup | None) -> bool:
        return dist.get_world_size(group) > 1 or self.config.allow_single_rank

    def _set_up(self, process_group: dist.ProcessGroup | None) -> None:
        config = self.config
        self._ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        self._rank = dist.get_rank()
        label = str(_instances[self._ranks])  # the group's ranks have made equally many before
        _instances[self._ranks] += 1
        self._agreement = Agreement(
            group_store(self._ranks, label), self._ranks, self._rank, config.agree_timeout_s
        )
        settings = {k: str(v) for k, v in asdict(config).items() if k not in ("status_path", "link_cache")}
        self._agreement.require_equal("scheduler settings", settings, "use one SchedulerConfig on all ranks")
        check_same_model(self._model, self._agreement, config.local_parameters)
        self._liveness: Liveness | None = None
        if config.heartbeat_interval_s and len(self._ranks) > 1:
            self._liveness = Liveness(
                group_store(self._ranks, f"{label}-beat"),
                self._ranks,
                self._rank,
                interval_s=config.heartbeat_interval_s,
                timeout_s=config.heartbeat_timeout_s,
            )
            self._liveness.start()
        self._channels = Channels(
            self._ranks, timeout_s=config.timeout_s, nccl_algorithms=config.nccl_algorithms
        )
        self._waiter = BucketWaiter(self._liveness, timeout_s=config.timeout_s)
        if config.broadcast_initial:
            broadcast_model(self._model, self._channels.ring, self._ranks[0], config.local_parameters)
        self._status = (
            StatusFile(config.status_path) if config.status_path and self._rank == self._ranks[0] else None
        )
        self._all_parameters = [p for _, p in self._model.named_parameters()]
        self._trainable_now = self._trainable_flags()
        self._hooked: dict[str, nn.Parameter] = {}
        self._forward_synced = True
        self._ready_history: list[dict[str, float]] = []
        self._telemetry: Telemetry | None = None
        self._peer_times: dict[str, object] = {}
        if config.mode == "plan-only":
            self._wrap_stock()
            return
        self._install_parameter_hooks()
        self._handles.append(self._model.register_forward_pre_hook(self._before_forward))
        self._handles.append(self._model.register_forward_hook(self._after_forward))

    def _wrap_stock(self) -> None:
        """Hand the plan to stock DDP; our own buffers are made only if ``reduce_now`` is called."""
        config = self.config
        if self._plan is None:
            self._plan = self._first_plan()
        saved_state.check_plan_fits(self._plan, self._model, config.local_parameters, len(self._ranks))
        self._agreement.require_equal("communication plan", self._plan.hash, "load one plan on all ranks")
        self.module = ddp.wrap(
            self._model,
            self._plan,
            self._channels.ring,
            local=config.local_parameters,
            broadcast_buffers=config.buffers == "forward",
            compress=config.compress == "bf16",
            find_unused_parameters=config.find_unused_parameters,
        )

    # ---- plan
    # -----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> CommPlan:
        """The plan in use; made now (a collective call) when there is none yet."""
        self._require_active("plan")
        return self._ready_reducer().plan

    @property
    def link(self) -> LinkModel | None:
        """The cost model in use, ``None`` before the first plan."""
        return self._link

    def _ready_reducer(self) -> Reducer:
        if self._reducer is None:
            if self._plan is None:
                self._plan = self._first_plan()
            self._use(self._plan)
        assert self._reducer is not None
        return self._reducer

    def _first_plan(self) -> CommPlan:
        self._analyses += 1
        return self._make_plan(self._predicted, "mdg" if self._predicted else "registration")

    def _make_plan(self, ready_ms: Mapping[str, float] | None, source: str, scale: float = 1.0) -> CommPlan:
        """Compute on the first rank and hand the text to the others, so that rounding cannot split the
        ranks.
        """
        link = self._measured_link()
        text: str | None = None
        if self._rank == self._ranks[0]:
            specs = gradient_specs(self._model, ready_ms=ready_ms, local=self.config.local_parameters)
            specs = apply_overrides(specs, load_overrides(self.config.group_overrides))
            fires = self._reducer.fires() if self._reducer is not None else {}
            specs = tuple(replace(spec, fires=fires.get(spec.name, spec.fires)) for spec in specs)
            text = plan_buckets(
                specs,
                link.scaled(scale) if scale != 1.0 else link,
                strategy=self._strategy,
                simple_bucket_mib=self.config.simple_bucket_mib,
                max_bucket_mib=self.config.max_bucket_mib,
                source=source,
                step=self._steps,
            ).to_json()
        return CommPlan.from_json(str(self._agreement.exchange("plan", text)[0]))

    def _measured_link(self) -> LinkModel:
        if self._link is None:
            device = next(iter(trainable_parameters(self._model).values())).device
            self._link = measure_channels(
                self._channels,
                self._agreement,
                device,
                budget_s=self.config.link_budget_s,
                cache=self.config.link_cache,
            )
        return self._link

    def _use(self, plan: CommPlan) -> None:
        """Check the plan against the model and the other ranks, then build buffers for it."""
        parameters = trainable_parameters(self._model, self.config.local_parameters)
        saved_state.check_plan_fits(plan, self._model, self.config.local_parameters, len(self._ranks))
        self._agreement.require_equal("communication plan", plan.hash, "load one plan on all ranks")
        known = self._reducer is not None or plan.source == "measured"
        contributors = self._reducer.contributors if self._reducer is not None else len(self._ranks)
        self._reducer = Reducer(
            plan,
            parameters,
            self._channels,
            contributors=contributors,
            overlap=self.config.mode == "hooks",
            compress=self.config.compress == "bf16",
            wait=self._waiter.wait,
            deferred_first=not known,
        )
        self._reducer.sync = self._sync
        self._reducer.on_finish = self._finished
        self._waiter.plan = plan
        self._plan = plan
        self._ready_history = []
        if self._telemetry is None:
            self._telemetry = Telemetry(plan)
        else:
            self._telemetry.use_plan(plan)
        self._reducer.profile = self._profiling()

    # ---- hooks
    # ----------------------------------------------------------------------------------------------------

    def _install_parameter_hooks(self) -> None:
        fresh = {
            name: p
            for name, p in trainable_parameters(self._model, self.config.local_parameters).items()
            if name not in self._hooked
        }
        self._handles += install_hooks(fresh, self._hook_target)
        self._hooked.update(fresh)

    def _hook_target(self) -> Reducer | None:
        if not self._sync or self._closed:
            return None
        return self._ready_reducer()

    def _trainable_flags(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad for p in self._all_parameters)

    def _before_forward(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if self._closed or not torch.is_grad_enabled() or current_backward() >= 0:
            return
        if self._reducer is not None and self._reducer.armed:
            self._recover()
        flags = self._trainable_flags()
        if flags != self._trainable_now:
            self._parameters_changed(flags)
        if self.config.buffers == "forward" and self._forward_synced:
            self.sync_buffers()
        self._forward_synced = self._sync
        if self._sync:
            self._ready_reducer()

    def _after_forward(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Arm at the first output gradient: it belongs to the outermost backward and marks its start."""
        if self._closed or not torch.is_grad_enabled() or current_backward() >= 0:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                leaf.register_hook(self._output_gradient)  # type: ignore[no-untyped-call]

    def _output_gradient(self, gradient: Tensor) -> None:
        reducer = self._reducer
        if reducer is None or not self._sync or self._closed or reducer.launched:
            return
        if accumulates(next(p for p in self._hooked.values() if p.requires_grad)):
            reducer.arm(nested=False)

    def _recover(self) -> None:
        """An earlier backward raised before its end."""
        reducer = self._ready_reducer()
        sent = reducer.launched
        reducer.abandon()
        if sent:
            msg = (
                f"the last backward ended with an error after {sent} buckets had been sent; the other ranks "
                "wait for "
                "the rest of that step. Restart from a checkpoint, or drop the step on all ranks"
            )
            raise RuntimeError(msg)

    def _parameters_changed(self, flags: tuple[bool, ...]) -> None:
        """Some parameters were frozen or unfrozen: all ranks must have done so before the same forward."""
        names = [n for n, p in self._model.named_parameters() if p.requires_grad]
        self._agreement.require_equal(
            "set of trainable parameters", names, "freeze and unfreeze on all ranks before the same step"
        )
        self._trainable_now = flags
        self._install_parameter_hooks()
        if self._reducer is not None:
            self._replan("parameters frozen or unfrozen")

    def _finished(self, record: BackwardRecord) -> None:
        reducer = self._ready_reducer()
        if self._telemetry is not None:
            self._telemetry.add(record)
        if not record.captured and self._profiling() and reducer.last_ready:
            self._ready_history.append(reducer.last_ready)
            del self._ready_history[:-8]

    # ---- user calls
    # -----------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally: backward inside the context sends nothing."""
        before, self._sync = self._sync, False
        if self.active and self._reducer is not None:
            self._reducer.sync = False
        stock = self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()
        try:
            with stock:
                yield
        finally:
            self._sync = before
            if self.active and self._reducer is not None:
                self._reducer.sync = before

    def reduce_now(self) -> None:
        """Average the gradients that exist now, by the same buckets (after a CUDA graph replay, or by hand).

        ``grad`` tensors keep their identity and address. Every rank must call it.
        """
        if self.active:
            self._ready_reducer().reduce_now()

    def attach_gradients(self) -> None:
        """Make every ``grad`` a zeroed view of the flat buffers, so that a captured graph writes there
        directly.
        """
        if self.active:
            self._ready_reducer().attach_views()

    def sync_buffers(self) -> None:
        """Copy rank 0's module buffers to all ranks now (before a checkpoint or an evaluation)."""
        if self.active:
            buffers = shared_buffers(self._model, self.config.local_parameters)
            if buffers:
                broadcast_tensors(buffers, self._channels.ring, self._ranks[0])

    def switch_strategy(self, name: str) -> None:
        """Ask for ``simple`` or ``hybrid``; it takes effect on all ranks at the next step border after the
        request
        has travelled with a reduction. One rank's request is enough; of several the lowest rank's wins.
        """
        check_strategy(name)
        if self.config.mode == "plan-only":
            msg = (
                "mode is 'plan-only', where stock DDP fixes its buckets at the start; use mode 'hooks' to "
                "switch"
            )
            raise ValueError(msg)
        self._wanted = name
        if self.active:
            self._ready_reducer().request = True

    def rebuild(self) -> None:
        """Ask for a new plan from measured ready times at the next step border."""
        self._rebuild_wanted = True
        if self.active:
            self._ready_reducer().request = True

    def step_end(self, step: int | None = None) -> None:
        """Mark the step border: the only place where plan and strategy change. Call it once per optimizer
        step.

        Args:
            step: the trainer's step number, for messages; counted here when ``None``.
        """
        if not self.active:
            return
        if self.config.mode == "plan-only":
            self._steps += 1
            return
        reducer = self._ready_reducer()
        if reducer.armed:
            msg = (
                "step_end() was called while a synchronised backward has not finished: its end was not seen, "
                "which "
                "happens when every gradient came from inside reentrant checkpoints and the model's forward "
                "was not "
                "called directly. Call the model itself, or use_reentrant=False"
            )
            raise RuntimeError(msg)
        self._steps += 1
        label = self._steps if step is None else step
        if self._liveness is not None:
            self._liveness.step = label
        self._waiter.step = label
        asked = reducer.take_request()
        if asked or self._rebuild_due():
            self._border()
        every = self.config.heartbeat_every
        if every and self._steps % every == 0:
            self._exchange_times()
        self._ready_reducer().profile = self._profiling()
        self._watch_overlap()
        if self._status is not None and self._status.due:
            self._status.write({"step": label, **self.stats()})

    def _rebuild_due(self) -> bool:
        config = self.config
        first = (
            self._plan is not None and self._plan.source != "measured" and self._steps == config.warmup_steps
        )
        later = bool(config.rebuild_interval) and self._steps % config.rebuild_interval == 0
        return config.mode == "hooks" and (first or later)

    def _profiling(self) -> bool:
        config = self.config
        until = (
            config.rebuild_interval - self._steps % config.rebuild_interval if config.rebuild_interval else 9
        )
        return self._steps <= config.warmup_steps or until <= 3

    def _border(self) -> None:
        """All ranks are here for the same reason: exchange wishes and times, then replan alike."""
        wishes = self._agreement.exchange("border", [self._wanted, self._rebuild_wanted])
        pairs = [w if isinstance(w, list) else [None, False] for w in wishes]
        switch = next((name for name, _ in pairs if name is not None), None)
        self._wanted, self._rebuild_wanted = None, False
        self._ready_reducer().request = False
        if switch is not None and switch != self._strategy:
            self._strategy = str(switch)
            self._replan(f"strategy {switch}")
        elif self._rebuild_due() or any(rebuild for _, rebuild in pairs):
            self._replan("measured ready times")

    def _replan(self, reason: str) -> None:
        """New plan from the mean over ranks of the median measured ready times, with the link corrected
        likewise.
        """
        names = [spec.name for spec in self._ready_reducer().plan.gradients]
        mine = _median_times(self._ready_history, names)
        scale = self._link_scale()
        parts = self._agreement.exchange("ready-times", [mine, scale])
        tables = [part[0] for part in parts if isinstance(part, list) and part[0]]
        scales = [float(part[1]) for part in parts if isinstance(part, list) and part[1]]
        factor = min(max(min(scales), 0.7), 2.0) if scales else 1.0
        if tables:
            ready = {name: _mean([t[i] for t in tables]) for i, name in enumerate(names)}
            plan = self._make_plan(ready, "measured", factor)
        else:
            old = {spec.name: spec.ready_ms for spec in self._ready_reducer().plan.gradients}
            plan = self._make_plan(old, self._ready_reducer().plan.source, factor)
        self._rebuilds += 1
        LOG.info("plan %s rebuilt at step %d (%s)", plan.hash, self._steps, reason)
        self._use(plan)

    def _link_scale(self) -> float | None:
        """Measured over predicted collective time, summed over buckets; ``None`` without measurements."""
        if self._telemetry is None or self._link is None:
            return None
        seen = self._telemetry.bucket_ms()
        buckets = {b.index: b for b in self._ready_reducer().plan.buckets}
        predicted = sum(
            self._link.predict_ms(buckets[i].strategy, buckets[i].nbytes) for i in seen if i in buckets
        )
        return sum(seen.values()) / predicted if predicted > 0 else None

    def _exchange_times(self) -> None:
        """Per-rank bucket times: the minimum over ranks is the collective, the rest is waiting for
        stragglers.
        """
        assert self._telemetry is not None
        mine = {str(i): ms for i, ms in self._telemetry.bucket_ms().items()}
        summary = self._telemetry.summary()
        parts = self._agreement.exchange("bucket-times", [mine, summary["backward_ms_mean"]])
        tables = [part[0] for part in parts if isinstance(part, list)]
        self._peer_times = saved_state.straggler_table(self._ready_reducer().plan, self._ranks, tables, parts)

    def _watch_overlap(self) -> None:
        share = self._telemetry.first_gradient_share() if self._telemetry is not None else None
        late = share is not None and share > LATE_FIRST_GRADIENT and len(self._hooked) > 4
        if late and self._steps >= 3 and "late" not in self._warned:
            self._warned.add("late")
            LOG.warning(
                "the first gradient arrives after %.0f %% of backward, so nothing can overlap; this is what "
                "torch.compile of the whole model does. Compile the repeated blocks instead "
                "(for block in model.blocks: block.compile())",
                100 * (share or 0.0),
            )

    # ---- ranks that stop early, slow checkpoints
    # ------------------------------------------------------------------

    def agree_continue(self, *, has_batch: bool, rule: str = "stop") -> bool:
        """Agree whether the next step takes place when ranks may run out of data at different times.

        Args:
            has_batch: this rank has data for one more step.
            rule: ``stop``: end for all as soon as one rank has none. ``join``: go on while one rank has data;
                ranks
                without call :meth:`shadow_step` in place of forward and backward, and averages divide by the
                ranks
                that had data.

        Returns:
            True when the step takes place. Costs one store exchange.
        """
        if rule not in ("stop", "join"):
            msg = f"rule is {rule!r}, allowed are 'stop' and 'join'"
            raise ValueError(msg)
        if not self.active:
            return has_batch
        votes = [bool(vote) for vote in self._agreement.exchange("continue", has_batch)]
        live = sum(votes)
        if rule == "stop" or not live:
            return all(votes)
        self._ready_reducer().contributors = live
        return True

    def shadow_step(self) -> None:
        """Take part in the step's collectives without data (see :meth:`agree_continue`)."""
        if self.active:
            if self.config.buffers == "forward":
                self.sync_buffers()
            for parameter in self._hooked.values():
                parameter.grad = None
            self.reduce_now()

    def barrier(self, name: str, *, timeout_s: float) -> None:
        """Wait for all ranks with a limit of its own, for example around a slow checkpoint of rank 0.

        Uses the store, not the collective library, so it does not count against ``timeout_s`` of the buckets.
        """
        if self.active:
            self._agreement.exchange(f"barrier/{name}", 1, timeout_s=timeout_s)

    def agree_found_inf(self, found_inf: Tensor) -> None:
        """Make an overflow on one rank count on all, in place (needed only with local parameters)."""
        if self.active:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self._channels.ring)

    def gather_local(self) -> dict[str, list[Tensor]]:
        """All-gather the parameters that stay per rank: name to one tensor per rank, for checkpoints."""
        if not self.active:
            return {}
        return saved_state.gather_local(self._model, self.config.local_parameters, self._channels.peers)

    # ---- state
    # ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, object]:
        """Figures of this rank: a flat part for logs, and ``groups`` and ``ranks`` for the monitor."""
        result: dict[str, object] = {
            "active": self.active,
            "mode": self.config.mode,
            "strategy": self._strategy,
        }
        if not self.active or self._reducer is None or self._telemetry is None:
            return result
        plan = self._reducer.plan
        result.update(
            plan_hash=plan.hash,
            plan_source=plan.source,
            buckets=len(plan.buckets),
            gradient_bytes=plan.nbytes,
            buffer_bytes=self._reducer.buffer_bytes,
            world_size=len(self._ranks),
            contributors=self._reducer.contributors,
            steps=self._steps,
            rebuilds=self._rebuilds,
            analyses=self._analyses,
            predicted_exposed_ms=plan.exposed_ms,
            whole_model_compile_suspected="late" in self._warned,
            **self._telemetry.summary(),
            groups=self._telemetry.groups(),
            ranks=self._peer_times,
        )
        return result

    def state_dict(self) -> dict[str, object]:
        """Plan, link and counters as plain data, with version and topology. Collective if no plan exists
        yet.
        """
        if not self.active:
            return saved_state.pack(None, self._link, 1, self._steps, self._rebuilds, self._strategy)
        reducer = self._ready_reducer()
        fires = reducer.fires()
        plan = replace(
            reducer.plan,
            gradients=tuple(replace(g, fires=fires[g.name]) for g in reducer.plan.gradients),
        )
        return saved_state.pack(
            plan, self._link, len(self._ranks), self._steps, self._rebuilds, self._strategy
        )

    def load_state_dict(self, state: Mapping[str, object], *, on_mismatch: str = "refuse") -> None:
        """Take plan, link and counters from :meth:`state_dict`; then nothing is measured or planned again.

        Args:
            state: what ``state_dict`` returned.
            on_mismatch: ``refuse`` raises when the world size or the parameters differ; ``replan`` keeps the
                counters
                and makes a new plan.

        Raises:
            ValueError: wrong version, or a mismatch that is named.
        """
        loaded = saved_state.unpack(state)
        self._steps, self._rebuilds = loaded.steps, loaded.rebuilds
        self._strategy = loaded.strategy
        if not self.active or loaded.plan is None:
            return
        try:
            saved_state.check_plan_fits(
                loaded.plan, self._model, self.config.local_parameters, len(self._ranks)
            )
        except ValueError:
            if on_mismatch != "replan":
                raise
            return
        self._link = loaded.link
        self._reducer = None
        self._plan = loaded.plan
        if self.config.mode == "plan-only":
            self._wrap_stock()

    def _require_active(self, what: str) -> None:
        if not self.active:
            msg = (
                f"{what} needs an initialised process group of at least two ranks; start with torchrun, or "
                "set "
                "allow_single_rank=True"
            )
            raise RuntimeError(msg)

    def close(self) -> None:
        """Remove the hooks and end the threads. Gradients keep their values."""
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.active:
            if self._status is not None and self._reducer is not None:
                self._status.write({"step": self._steps, "closed": True, **self.stats()}, force=True)
            if self._liveness is not None:
                self._liveness.close()
            self._channels.close()

    def __enter__(self) -> GradientScheduler:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _median_times(history: Sequence[Mapping[str, float]], names: Sequence[str]) -> list[float]:
    """Median ready time per name; a gradient never seen counts as ready with the last one."""
    kept = history[1:] if len(history) > 1 else history
    if not kept:
        return []
    last = median(max(times.values(), default=0.0) for times in kept)
    return [median([times[n] for times in kept if n in times] or [last]) for n in names]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
