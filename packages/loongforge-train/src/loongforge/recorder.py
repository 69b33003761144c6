"""Turns finished steps into step records, once the device has passed the step's last mark."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loongforge.clock import StepClock
from loongforge.nvml import Utilisation
from loongforge.records import StepRecord

MOST_GATHERED = 8
"""Steps of a GPU run whose values are copied to the host together."""
MOST_BEHIND = 8
"""Steps that may end after those gathered together before their values are waited for: so far the host may be
ahead of the device."""
MOST_UNREAD = MOST_GATHERED + MOST_BEHIND - 1
"""Steps without a record, at the end of any step."""
WRITE_EVERY_S = 0.25
"""Seconds for which steps of a GPU run are gathered, :data:`MOST_GATHERED` at most. After a step the CPU's
caches hold anything but this code, so that several records cost little more than one. A killed run lacks the
records of two gatherings, one that waits for its copy and one that is not complete: :data:`MOST_UNREAD` steps
at most."""
MEMORY_EVERY_S = 1.0
"""Seconds between two looks at the allocator, whose statistics cost a fraction of a millisecond; the records
in between repeat the last look."""

Listener = Callable[[StepRecord, Sequence[Sequence[int]]], None]


@dataclass(kw_only=True, slots=True)
class PendingStep:
    """A step whose device values have not been read yet: what is known when it ends, nothing derived."""

    step: int
    epoch: int
    time_unix: float
    clock: StepClock
    loss: Tensor
    micro_losses: Sequence[float | Tensor]
    """Tensors that no later step writes into."""
    norm: Tensor
    skipped: Tensor
    lr: float
    samples: int | None = None
    tokens: int | None = None
    sample_ids: Sequence[Sequence[int]] = ()
    fused: bool | None = None
    fusion_reason: str | None = None
    graph: bool | None = None
    graph_reason: str | None = None
    data: Mapping[str, float] = field(default_factory=dict)
    mem: Mapping[str, float] = field(default_factory=dict)
    comm: Mapping[str, float] = field(default_factory=dict)
    filled: int = 0
    checkpoint_ms: float = 0.0
    validation_loss: float | None = None
    probe: Mapping[str, float] = field(default_factory=dict)

    def scalars(self) -> list[float | Tensor]:
        """Return loss, norm, skipped and micro-losses."""
        return [self.loss, self.norm, self.skipped, *self.micro_losses]


class _Gathering:
    """Steps whose values travel to the host in one copy, behind the last step's own work.

    Reading a device value directly would wait for everything enqueued so far, later steps included.
    """

    def __init__(self, steps: list[PendingStep]) -> None:
        self.steps = steps
        self._values: Tensor | list[float]
        self._copied: torch.cuda.Event | None = None
        stream = steps[-1].clock.stream
        scalars = [value for step in steps for value in step.scalars()]
        if stream is None:
            self._values = [float(value) for value in scalars]
            return
        device = steps[-1].loss.device
        with torch.no_grad():
            packed = torch.stack([_scalar(value, device) for value in scalars])
            self._values = torch.empty(packed.shape, pin_memory=packed.is_cuda)
            self._values.copy_(packed, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record(stream)

    def passed(self) -> bool:
        """Tell whether the values can be read (never waits)."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[list[float]]:
        """Return the values of each step; waits for their copy, long done unless the run is ending."""
        if self._copied is not None:
            self._copied.synchronize()
        values = self._values.tolist() if isinstance(self._values, Tensor) else self._values
        found, first = [], 0
        for step in self.steps:
            last = first + 3 + len(step.micro_losses)
            found.append(values[first:last])
            first = last
        return found


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a float32 scalar on a device."""
    if isinstance(value, Tensor) and value.dtype == torch.float32 and value.device == device:
        return value
    return torch.as_tensor(value, dtype=torch.float32).to(device, non_blocking=True)


class Recorder:
    """Collects pending steps and hands complete records to listeners, in step order.

    Args:
        device: Device of the run.
        rank: This process's rank.
        gpu_util: Returns the GPU's utilisation (0 to 100) or None, without waiting for the driver.
        write_every_s: Seconds for which steps are gathered. Default :data:`WRITE_EVERY_S` on a GPU, whose
            values come late anyway, 0 elsewhere: every step is written when it ends.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int,
        *,
        gpu_util: Callable[[], float | None] | None = None,
        write_every_s: float | None = None,
    ) -> None:
        self._device = device
        self._rank = rank
        self._gpu_util = gpu_util
        self._gathered: list[PendingStep] = []
        self._under_way: deque[_Gathering] = deque()
        self.unread = 0
        """Steps without a record so far."""
        self._previous: StepClock | None = None
        self._checkpoint_ms = 0.0
        self._probe: Mapping[str, float] = {}
        late = WRITE_EVERY_S if device.type == "cuda" else 0.0
        self._write_every_s = late if write_every_s is None else write_every_s
        self._gathered_at = -math.inf
        self._memory_at = -math.inf
        self._memory: tuple[int | None, int | None, int | None] = (None, None, None)
        self.listeners: list[Listener] = []
        self.rests: list[Callable[[], None]] = []
        """Called after the last record of those that were written in one go."""

    def submit(self, pending: PendingStep) -> None:
        """Take a finished step; now and then write the steps that the device has passed."""
        if self._checkpoint_ms or self._probe:
            pending.checkpoint_ms, self._checkpoint_ms = self._checkpoint_ms, 0.0
            pending.probe, self._probe = self._probe, {}
        gathered = self._gathered
        gathered.append(pending)
        self.unread += 1
        due = pending.clock.ended - self._gathered_at >= self._write_every_s
        if due or len(gathered) >= MOST_GATHERED:
            self.write_passed()
        elif self._under_way and self._is_ahead():
            self._write(self._under_way.popleft())

    def write_passed(self) -> None:
        """Send the values of the gathered steps on their way, and write what has arrived.

        Waits for nothing but what the host is too far ahead of.
        """
        self._send()
        while self._under_way and (self._is_ahead() or self._under_way[0].passed()):
            self._write(self._under_way.popleft())

    def _is_ahead(self) -> bool:
        return self.unread - len(self._under_way[0].steps) >= MOST_BEHIND

    def _send(self) -> None:
        if self._gathered:
            self._gathered_at = self._gathered[-1].clock.ended
            self._under_way.append(_Gathering(self._gathered))
            self._gathered = []

    def note_checkpoint(self, ms: float) -> None:
        """Add host time spent on a checkpoint at the step border; it stands in the next record."""
        self._checkpoint_ms += ms

    def note_probe(self, probe: Mapping[str, float]) -> None:
        """Attach the counts of a probed step to its record."""
        self._probe = dict(probe)

    def flush(self) -> None:
        """Write every pending step; waits for the device (checkpoint and end of the run only)."""
        self._send()
        while self._under_way:
            self._write(self._under_way.popleft())

    def close(self) -> None:
        """End the thread that asks for the GPU's utilisation."""
        if isinstance(self._gpu_util, Utilisation):
            self._gpu_util.close()

    def _look_at_memory(self) -> None:
        """Take peak and reserved bytes and retries of the allocator, at most once a second."""
        now = time.monotonic()
        if self._device.type != "cuda" or now - self._memory_at < MEMORY_EVERY_S:
            return
        self._memory_at = now
        found = torch.cuda.memory_stats_as_nested_dict(self._device)
        if found:
            peak, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
            self._memory = (peak["peak"], reserved["current"], found["num_alloc_retries"])

    def _write(self, gathering: _Gathering) -> None:
        self.unread -= len(gathering.steps)
        self._look_at_memory()
        utilisation = None if self._gpu_util is None else self._gpu_util()
        try:
            for pending, values in zip(gathering.steps, gathering.read(), strict=True):
                record = self._record(pending, values, utilisation)
                if self._previous is not None:
                    self._previous.release()
                self._previous = pending.clock
                for listener in self.listeners:
                    listener(record, pending.sample_ids)
        finally:
            for rest in self.rests:
                rest()

    def _record(self, pending: PendingStep, values: Sequence[float], utilisation: float | None) -> StepRecord:
        loss, norm, skipped, *micro_losses = values
        clock, comm, probe = pending.clock, pending.comm, pending.probe
        phases = clock.phases_ms()
        exposed = comm.get("exposed_ms")
        peak, reserved, retries = self._memory
        record = StepRecord(
            step=pending.step,
            epoch=pending.epoch,
            rank=self._rank,
            time_unix=pending.time_unix,
            loss=loss,
            micro_losses=micro_losses,
            grad_norm=norm,
            lr=pending.lr,
            samples=pending.samples,
            tokens=pending.tokens,
            step_ms=clock.total_ms(self._previous),
            data_wait_ms=phases["data"],
            h2d_ms=phases.get("h2d", 0.0),
            forward_ms=phases.get("forward", 0.0),
            backward_ms=max(0.0, phases.get("backward", 0.0) - (exposed or 0.0)),
            comm_exposed_ms=None if exposed is None else exposed + phases.get("comm", 0.0),
            comm_overlap=comm.get("overlap"),
            optimizer_ms=phases.get("optimizer", 0.0),
            checkpoint_ms=pending.checkpoint_ms,
            validation_loss=pending.validation_loss,
            gpu_util=utilisation,
            mem_peak_bytes=peak,
            mem_reserved_bytes=reserved,
            alloc_retries=retries,
            alloc_ms=pending.mem.get("alloc_ms"),
            fused=pending.fused,
            fusion_reason=pending.fusion_reason,
            graph=pending.graph,
            graph_reason=pending.graph_reason,
            filled_samples=pending.filled,
            skipped=bool(skipped),
            launch_ms=clock.host_ms("forward", "backward", "optimizer"),
            ops=int(probe["ops"]) if probe else None,
            op_cost_us=probe.get("op_cost_us"),
            sync_count=int(probe["sync_count"]) if probe else None,
            sync_ms=probe.get("sync_ms"),
            heartbeat=comm.get("heartbeat_age_s"),
            data={"host_wait_ms": clock.host_wait_ms(), **pending.data},
            mem=pending.mem,
            comm=comm,
        )
        since = clock.began if self._previous is None else self._previous.ended
        _derive(record, 1e3 * (clock.ended - since))
        return record


def _derive(record: StepRecord, wall_ms: float) -> None:
    """Fill in rates and the part of the step that no phase explains."""
    step_ms = record.step_ms or 0.0
    explained = (
        (record.data_wait_ms or 0.0)
        + (record.h2d_ms or 0.0)
        + (record.forward_ms or 0.0)
        + (record.backward_ms or 0.0)
        + (record.comm_exposed_ms or 0.0)
        + (record.optimizer_ms or 0.0)
        + (record.checkpoint_ms or 0.0)
    )
    record.host_gap_ms = max(0.0, step_ms - explained)
    period = max(step_ms, wall_ms)
    if period > 0:
        record.samples_per_s = None if record.samples is None else 1e3 * record.samples / period
        record.tokens_per_s_gpu = None if record.tokens is None else 1e3 * record.tokens / period
