"""A training session: builds the parts, runs steps, and does what belongs between two steps.

``build_parts`` composes the pillars around a model; :class:`Session` owns the run directory (records,
checkpoints, control socket, watchdog) and the loop. The command line and
:class:`loongforge.trainer.LoongTrainer` both use it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from loongforge.batches import CountsLoss
from loongforge.checkpoint.find import find_newest, require_complete
from loongforge.checkpoint.state import Restored, restore, take_snapshot
from loongforge.checkpoint.write import CheckpointWriter
from loongforge.config import TrainConfig
from loongforge.control.live import Live
from loongforge.ema import WeightAverage
from loongforge.engine import Parts, StepEngine
from loongforge.errors import CheckpointError, ConfigError, LoongForgeError
from loongforge.fusing import build_runner, has_hooks, patch_operators
from loongforge.guards import Guard
from loongforge.nvml import utilisation_reader
from loongforge.optim import build_schedule, default_groups
from loongforge.parallel import build_parallel
from loongforge.pillars import MemoryPillar, build_memory
from loongforge.probe import operator_cost_us, probed
from loongforge.ranks import Ranks
from loongforge.recorder import Recorder
from loongforge.records import METRICS_FILE, StepRecord, drop_after
from loongforge.signals import StopRequest, watch_signals
from loongforge.sinks import JsonlSink, Sink, TerminalSink, build_sink
from loongforge.sources import BatchSource
from loongforge.watchdog import Watchdog

log = logging.getLogger("loongforge")
Groups = Callable[[nn.Module, float], list[dict[str, object]]]
Callback = Callable[[StepRecord], object]
FIRST_PROBE = 6
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a session ended."""

    steps: int
    exit_code: int
    """0 finished, 143 after SIGTERM, 130 after SIGINT."""
    metrics: Path
    checkpoint: Path | None
    resumed_from: Path | None


def build_parts(
    config: TrainConfig,
    model: nn.Module,
    source: BatchSource,
    ranks: Ranks,
    *,
    module: nn.Module | None = None,
    groups: Groups = default_groups,
    optimizer: Optimizer | None = None,
    schedule: LRScheduler | None = None,
    memory: MemoryPillar | None = None,
) -> Parts:
    """Compose model, pillars and optimizer into the parts of a step.

    Args:
        config: The run.
        model: Bare model, already with its initial weights (equal on all ranks).
        source: Micro-batches of this rank.
        ranks: This process among its peers.
        module: What the forward calls when it is not the model itself (a compiled or adapted one).
        groups: Makes optimizer groups of a model.
        optimizer: A ready optimizer, instead of AdamW over ``groups``.
        schedule: A ready schedule, instead of the configured one.
        memory: The memory pillar, when it had to be made before the model was.
    """
    memory = memory or build_memory(config.pillars, ranks.device)
    with memory.persistent():
        model.to(ranks.device)
    foreign_hooks = has_hooks(model)
    if config.pillars.fused_ops:
        patch_operators(model)
    called = module if module is not None else model
    if config.compile:
        called = torch.compile(called)  # type: ignore[assignment]
    parallel = build_parallel(model, called, ranks, config)
    if optimizer is None:
        optimizer = parallel.optimizer(groups(model, config.weight_decay), config)
    if schedule is None:
        schedule = build_schedule(optimizer, config, total_steps(config, source))
    memory.attach(model, optimizer)
    device = ranks.device
    scaler = torch.amp.GradScaler(device.type) if config.precision == "fp16" else None
    return Parts(
        model=model,
        runner=build_runner(
            config,
            parallel.module,
            ranks,
            scaler=scaler,
            foreign_hooks=foreign_hooks,
            counts=isinstance(model, CountsLoss),
        ),
        parallel=parallel,
        optimizer=optimizer,
        schedule=schedule,
        source=source,
        ranks=ranks,
        memory=memory,
        recorder=Recorder(device, ranks.rank, gpu_util=utilisation_reader(device)),
        guard=Guard(config.guards),
        accumulation=config.accumulation,
        seed=config.seed,
        clip_norm=config.clip_norm,
        autocast=AUTOCAST[config.precision],
        scaler=scaler,
        average=WeightAverage(model, config.ema_decay) if config.ema_decay is not None else None,
        drop_ragged=config.drop_ragged,
        keep_gradients=config.pillars.graph,
    )


def total_steps(config: TrainConfig, source: BatchSource) -> int:
    """Return the optimizer steps of the whole run, by steps or by epochs (ragged windows count)."""
    per_epoch = source.batches_per_epoch()
    by_epochs = None
    if config.epochs is not None and per_epoch is not None:
        windows = per_epoch / config.accumulation
        by_epochs = config.epochs * (math.floor(windows) if config.drop_ragged else math.ceil(windows))
    limits = [limit for limit in (config.steps, by_epochs) if limit is not None]
    if not limits:
        msg = "epochs is set but the loader has no length: pass --steps N as well"
        raise ConfigError(msg)
    return min(limits)


class Session:
    """Runs a training in its run directory.

    Args:
        config: The run.
        parts: What :func:`build_parts` made.
        callbacks: Called with each step record, in order, once it can be read.
    """

    def __init__(self, config: TrainConfig, parts: Parts, *, callbacks: Sequence[Callback] = ()) -> None:
        self.config = config
        self.parts = parts
        self.engine = StepEngine(parts, epochs=config.epochs)
        self.run_dir = Path(config.output)
        self.ranks = parts.ranks
        self.total = _total_or_none(config, parts.source)
        self._callbacks = list(callbacks)
        self._losses: deque[float] = deque(maxlen=50)
        attempt = self.ranks.broadcast_text(f"{time.time_ns():x}-{os.getpid():x}")
        self.writer = CheckpointWriter(
            self.run_dir,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            attempt=attempt,
            config=config.checkpoint,
        )
        self.watchdog = Watchdog(
            self.run_dir / "stacks",
            rank=self.ranks.rank,
            limit_s=config.guards.hang_timeout_s,
            action=config.guards.hang_action,
        )
        self._sinks: list[Sink] = []
        self.live: Live | None = None
        self.validation: Callable[[], float] | None = None
        """Measures the loss on held-out samples; set by what builds the run."""
        self._operator_cost: float | None = None
        if config.probe_interval and not config.compile and config.strategy in {"ddp", "zero1"}:
            self.engine.around = self._probe
        self._saved_step: int | None = None
        self._failed_saves = 0

    def train(self) -> Result:
        """Resume if asked, run to the end or to a stop request, and leave a final checkpoint."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with watch_signals() as stop:
            resumed = self.resume()
            self._open_sinks()
            self.watchdog.start()
            try:
                self._loop(stop)
                self.parts.recorder.flush()
                self._final_checkpoint()
            finally:
                self.close()
        return Result(
            steps=self.engine.at.step,
            exit_code=stop.exit_code or (143 if self._stopped_by_peer else 0),
            metrics=self.run_dir / METRICS_FILE,
            checkpoint=self.checkpoint_path(),
            resumed_from=resumed.folder if resumed else None,
        )

    def _loop(self, stop: StopRequest) -> None:
        engine, limit = self.engine, self.config.steps
        self._stopped_by_peer = False
        while limit is None or engine.at.step < limit:
            engine.at.stop_requested = stop.requested
            if self.ranks.world_size == 1 and stop.requested:
                break
            if not engine.run_step():
                break
            self.watchdog.beat(engine.at.step)
            self._at_border()
            if engine.at.agreed is not None and engine.at.agreed.stop:
                self._stopped_by_peer = not stop.requested
                break
        log.info("ended after step %d", engine.at.step)

    def _at_border(self) -> None:
        """What happens between two steps: guards, callbacks of the control, checkpoint."""
        self._raise_or_tell(self.parts.guard.failure)
        if self.live is not None:
            self.live.at_border()
        validate = self.config.validate_every
        if self.validation is not None and validate and self.engine.at.step % validate == 0:
            self.parts.recorder.note_validation(self.validation())
        every = self.config.checkpoint.every
        if every and self.engine.at.step % every == 0:
            self._periodic_save()

    def _periodic_save(self) -> None:
        """Write a checkpoint in mid-run; a failure is logged, and fatal when it repeats."""
        began = time.perf_counter()
        try:
            self.save()
            self._failed_saves = 0
        except CheckpointError as error:
            self._failed_saves += 1
            log.warning("checkpoint at step %d failed: %s", self.engine.at.step, error)
            if self._failed_saves > self.config.checkpoint.failures_allowed:
                self._raise_or_tell(error)
        self.parts.recorder.note_checkpoint(1e3 * (time.perf_counter() - began))

    def _raise_or_tell(self, failure: LoongForgeError | None) -> None:
        """Raise at once on one rank; with several, tell the others first through the next vote."""
        if failure is None:
            return
        if self.ranks.world_size == 1:
            raise failure
        self.engine.at.failed = failure

    def _probe(self, step: int) -> AbstractContextManager[object]:
        """Probe the sixth step (after warm-ups and captures) and then every ``probe_interval``-th."""
        if step < FIRST_PROBE or (step - FIRST_PROBE) % self.config.probe_interval:
            return nullcontext()
        if self._operator_cost is None:
            self._operator_cost = operator_cost_us(self.ranks.device)
        return probed(self._operator_cost, self.parts.recorder.note_probe)

    # -- checkpoints
    # --------------------------------------------------------------------------------------------

    def resume(self) -> Restored | None:
        """Find and restore the checkpoint the configuration names; the same one on all ranks."""
        folder = self._choose_checkpoint()
        if self.ranks.rank == 0:
            for entry in self.writer.clean():
                log.info("removed %s, left by an interrupted write", entry.name)
        if folder is None:
            if self.ranks.rank == 0:
                drop_after(self.run_dir / METRICS_FILE, 0)
            self.ranks.barrier()
            return None
        restored = restore(self.engine, self.config, folder)
        for note in restored.notes:
            log.warning("resume: %s", note)
        if self.ranks.rank == 0:
            dropped = drop_after(self.run_dir / METRICS_FILE, restored.step)
            log.info("resumed from %s at step %d (%d later records dropped)", folder, restored.step, dropped)
        self.ranks.barrier()
        self._saved_step = restored.step if folder.parent == self.run_dir else None
        return restored

    def _choose_checkpoint(self) -> Path | None:
        """Decide on rank 0 and tell all; an error on rank 0 is an error on all (fault T03)."""
        text = ""
        if self.ranks.rank == 0:
            try:
                text = self._search()
            except CheckpointError as error:
                text = f"!{error}"
        text = self.ranks.broadcast_text(text)
        if text.startswith("!"):
            raise CheckpointError(text[1:])
        return Path(text) if text else None

    def _search(self) -> str:
        checksums = self.config.checkpoint.verify
        if self.config.resume == "never":
            return ""
        if self.config.resume != "auto":
            named = Path(self.config.resume)
            if named.is_dir() and not (named / "loongforge_state").exists():
                found = find_newest(named, checksums=checksums)
                if found.folder is not None:
                    return str(found.folder)
            require_complete(named, checksums=checksums)
            return str(named)
        found = find_newest(self.run_dir, checksums=checksums)
        for path, reason in found.passed_over:
            log.warning("passed over %s: %s", path.name, reason)
        return str(found.folder) if found.folder is not None else ""

    def save(self, *, background: bool | None = None) -> None:
        """Write a checkpoint of the present step (all ranks together)."""
        self.watchdog.beat(self.engine.at.step)
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        snapshot = take_snapshot(self.engine, self.config, loss=loss)
        self.writer.write(snapshot, background=background)
        self._saved_step = self.engine.at.step

    def _final_checkpoint(self) -> None:
        """Write the last checkpoint in the foreground, and agree that every rank's part is on the disk."""
        failure: CheckpointError | None = None
        try:
            self.writer.wait()
        except CheckpointError as error:
            log.warning("an earlier checkpoint failed: %s", error)
            self._saved_step = None
        if self._saved_step != self.engine.at.step and self.engine.at.step > 0:
            try:
                self.save(background=False)
            except CheckpointError as error:
                failure = error
        failed = [rank for rank, row in enumerate(self.ranks.gather([float(failure is not None)])) if row[0]]
        if failure is not None:
            raise failure
        if failed:
            msg = f"the last checkpoint failed on rank(s) {failed}: see their logs; older ones are intact"
            raise CheckpointError(msg)

    def checkpoint_path(self) -> Path | None:
        """Return the newest complete checkpoint of the run directory."""
        return find_newest(self.run_dir, checksums=False).folder

    # -- records
    # ------------------------------------------------------------------------------------------------

    def _open_sinks(self) -> None:
        self._sinks.append(JsonlSink(self.run_dir))
        if self.ranks.rank == 0:
            self._sinks.append(TerminalSink(total=self.total, interval=self.config.log_interval))
        for name in self.config.sinks:
            if self.ranks.rank == 0 or name == "prometheus":
                from loongforge.config import to_dict

                self._sinks.append(build_sink(name, self.run_dir, self.ranks.rank, to_dict(self.config)))
        self.parts.recorder.listeners.append(self._on_record)
        if self.config.control:
            self.live = Live(self, rank=self.ranks.rank)
            self.parts.recorder.listeners.append(self.live.on_record)

    def _on_record(self, record: StepRecord, sample_ids: Iterable[Sequence[int]]) -> None:
        self.parts.guard.observe(record, list(sample_ids))
        if record.loss is not None and math.isfinite(record.loss) and not record.skipped:
            self._losses.append(record.loss)
        for sink in self._sinks:
            sink.write(record)
        for callback in self._callbacks:
            callback(record)

    def close(self) -> None:
        """Stop threads and give resources back; safe to call twice."""
        self.watchdog.close()
        if self.live is not None:
            self.live.close()
            self.live = None
        for sink in self._sinks:
            sink.close()
        self._sinks.clear()
        self.parts.parallel.close()
        self.parts.memory.close()
        self.parts.source.close()


def _total_or_none(config: TrainConfig, source: BatchSource) -> int | None:
    try:
        return total_steps(config, source)
    except ConfigError:
        return config.steps
