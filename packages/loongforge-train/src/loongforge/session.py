"""A training session: owns the run directory, runs steps, and does what belongs between two of them.

That is records, checkpoints, control socket, watchdog, signals. The command line and
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
from typing import TYPE_CHECKING

from loongforge.checkpoint.find import find_newest, require_complete
from loongforge.checkpoint.state import Restored, restore, take_snapshot
from loongforge.checkpoint.write import CheckpointWriter
from loongforge.composition import AUTOCAST, build_parts, total_or_none, total_steps
from loongforge.config import TrainConfig
from loongforge.control.live import Live
from loongforge.elastic.border import Members, MembersChanged, StepBorder
from loongforge.engine import Parts, StepEngine
from loongforge.errors import CheckpointError, ConfigError, LoongForgeError, NonFiniteError, SpikeError
from loongforge.forking import protect_forked_children
from loongforge.probe import operator_cost_us, probed
from loongforge.records import METRICS_FILE, StepRecord, drop_after
from loongforge.rundir import prepare
from loongforge.signals import StopRequest, watch_signals
from loongforge.sinks import JsonlSink, Sink, TerminalSink, build_sink
from loongforge.watchdog import Watchdog

__all__ = ["AUTOCAST", "Callback", "Result", "Session", "build_parts", "total_steps"]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger("loongforge")
Callback = Callable[[StepRecord], object]
FIRST_PROBE = 6


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a session ended."""

    steps: int
    exit_code: int
    """0 finished, 143 after SIGTERM, 130 after SIGINT."""
    metrics: Path
    checkpoint: Path | None
    resumed_from: Path | None


class Session:
    """Runs a training in its run directory.

    Args:
        config: The run.
        parts: What :func:`build_parts` made.
        callbacks: Called with each step record, in order, once it can be read.
    """

    def __init__(self, config: TrainConfig, parts: Parts, *, callbacks: Sequence[Callback] = ()) -> None:
        protect_forked_children()
        self.config = config
        self.parts = parts
        self.engine = StepEngine(parts, epochs=config.epochs)
        self.run_dir = Path(config.output)
        self.ranks = parts.ranks
        self.total = total_or_none(config, parts.source)
        self._callbacks = list(callbacks)
        self._losses: deque[float] = deque(maxlen=50)
        attempt = self.ranks.broadcast_text(f"{time.time_ns():x}-{os.getpid():x}")
        self.writer = CheckpointWriter(
            self.run_dir,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            attempt=attempt,
            config=config.checkpoint,
            shard_group=self._shard_group(),
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
        self.engine.validated = self._validated
        self._operator_cost: float | None = None
        if config.probe_interval and not config.compile and config.strategy in {"ddp", "zero1"}:
            self.engine.around = self._probe
        self._saved_step: int | None = None
        self._failed_saves = 0
        self.members: Members | None = None
        """Notices ranks that come and go; set in an elastic run."""
        self.handover: Callable[[], int] | None = None
        """Takes over the state of an elastic run that goes on, in place of a checkpoint's."""
        self.border: StepBorder | None = None
        """Where an elastic run stands if the step under way has to be done again."""
        self.stop: StopRequest | None = None
        """Signals that are watched for longer than this session; its own otherwise."""
        self._ending = False

    def train(self) -> Result:
        """Resume if asked, run to the end or to a stop request, and leave a final checkpoint."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with watch_signals() if self.stop is None else nullcontext(self.stop) as stop:
            resumed = self._begin()
            if self.members is not None:
                self._mark_border()
                self.engine.committed = self._mark_border
            self._open_sinks()
            self.watchdog.start()
            try:
                self._loop(stop)
                self.parts.recorder.flush()
                self._final_checkpoint()
            except (NonFiniteError, SpikeError):
                # The steps behind the one that ended the run have run, and their records say how.
                self.parts.recorder.flush()
                raise
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
            agreed = engine.at.agreed
            if agreed is not None and agreed.stop:
                self._let_go(agreed.stopping)
                self._stopped_by_peer = not stop.requested
                break
            if self._ending:
                break
        log.info("ended after step %d", engine.at.step)

    def _let_go(self, stopping: Sequence[int]) -> None:
        """In an elastic run ranks that were asked to stop leave, and the others go on if they are enough."""
        staying = self.ranks.world_size - len(stopping)
        if self.members is not None and staying >= self.config.elastic.min_ranks:
            raise MembersChanged(self.members.part(stopping, self.engine.at.step))

    def end(self) -> None:
        """End the run at this step border, on all ranks alike."""
        self._ending = True

    def _at_border(self) -> None:
        """What happens between two steps: guards, callbacks of the control, checkpoint."""
        self._raise_or_tell(self.parts.guard.failure)
        if self.live is not None:
            self.live.at_border()
        every = self.config.checkpoint.every
        if every and self.engine.at.step % every == 0:
            self._periodic_save()
        change = self.members.border(self.engine.at.step) if self.members is not None else None
        if change is not None:
            raise MembersChanged(change)

    def _begin(self) -> Restored | None:
        """Go to where the run stands: a checkpoint's state, or that of the ranks that were here before."""
        if self.handover is None:
            restored = self.resume()
            if restored is not None and restored.total is not None:
                self.total = restored.total
            return restored
        self.total = self.handover()
        return None

    def _mark_border(self) -> None:
        self.border = StepBorder.of(self.engine)

    def _validated(self, step: int) -> float | None:
        """Measure the loss on held-out samples after a step, where it is due."""
        every = self.config.validate_every
        due = self.validation is not None and every > 0 and step % every == 0
        return self.validation() if self.validation is not None and due else None

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

    # -- checkpoints -------------------------------------------------------------------------------

    def resume(self) -> Restored | None:
        """Find and restore the checkpoint the configuration names; the same one on all ranks."""
        folder = self._choose_checkpoint()
        if self.ranks.rank == 0:
            for entry in self.writer.clean():
                log.info("removed %s, left by an interrupted write", entry.name)
        self._prepare(folder)
        if folder is None:
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

    def _prepare(self, start: Path | None) -> None:
        """Look at what an earlier run left, on rank 0; a refusal is one on all ranks."""
        problem = ""
        if self.ranks.rank == 0:
            try:
                prepare(self.run_dir, start=start, resume=self.config.resume, earlier=self.config.earlier_run)
            except ConfigError as error:
                problem = str(error)
        problem = self.ranks.broadcast_text(problem)
        if problem:
            raise ConfigError(problem)

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
        """Write a checkpoint of the present step (all ranks together).

        Raises:
            CheckpointError: An earlier write in the background failed, on this rank or another: nothing new
                was begun, on any rank.
        """
        self.watchdog.beat(self.engine.at.step)
        if self.members is not None:
            self.members.check(ask=True)
        # A run that goes on from here must find the records of all steps up to here.
        self.parts.recorder.flush()
        self._agree_on_earlier_write()
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        snapshot = take_snapshot(self.engine, self.config, loss=loss)
        self.writer.write(snapshot, background=background)
        self._saved_step = self.engine.at.step

    def _agree_on_earlier_write(self) -> None:
        """Wait for the write before; when it failed anywhere, no rank begins the next."""
        failure: CheckpointError | None = None
        try:
            self.writer.wait()
        except CheckpointError as error:
            failure = error
        self._raise_everywhere(failure, "the checkpoint before")

    def _shard_group(self) -> ProcessGroup | None:
        """Return the group in which shards are written beside training, where the layout asks for it."""
        if self.config.checkpoint.layout != "sharded" or not self.parts.parallel.sharded:
            return None
        return self.ranks.host_group(timeout_s=self.config.checkpoint.timeout_s)

    def _final_checkpoint(self) -> None:
        """Write the last checkpoint in the foreground, and agree that every rank's part is on the disk."""
        failure: CheckpointError | None = None
        try:
            self._agree_on_earlier_write()
        except CheckpointError as error:
            log.warning("an earlier checkpoint failed: %s", error)
            self._saved_step = None
        if self._saved_step != self.engine.at.step and self.engine.at.step > 0:
            try:
                self.save(background=False)
            except CheckpointError as error:
                failure = error
        self._raise_everywhere(failure, "the last checkpoint")

    def _raise_everywhere(self, failure: CheckpointError | None, what: str) -> None:
        """Raise on all ranks when something failed on one."""
        failed = [rank for rank, row in enumerate(self.ranks.gather([float(failure is not None)])) if row[0]]
        if failure is not None:
            raise failure
        if failed:
            msg = f"{what} failed on rank(s) {failed}: see their logs; older ones are intact"
            raise CheckpointError(msg)

    def checkpoint_path(self) -> Path | None:
        """Return the newest complete checkpoint of the run directory."""
        return find_newest(self.run_dir, checksums=False).folder

    # -- records -----------------------------------------------------------------------------------

    def _open_sinks(self) -> None:
        # On the CPU a record is on its way to the disk before any callback sees it.
        lines = JsonlSink(self.run_dir, gather=self.ranks.device.type == "cuda")
        self._sinks.append(lines)
        self.parts.recorder.rests.append(lines.flush)
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
        self.parts.recorder.close()
        if self.live is not None:
            self.live.close()
            self.live = None
        for sink in self._sinks:
            sink.close()
        self._sinks.clear()
        self.parts.parallel.close()
        self.parts.memory.close()
        self.parts.source.close()
