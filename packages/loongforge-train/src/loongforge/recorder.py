"""Turns finished steps into step records, once the device has passed the step's last mark."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loongforge.clock import StepClock
from loongforge.nvml import Utilisation
from loongforge.records import StepRecord

MOST_UNREAD = 8
"""Steps that may wait for the device; the oldest is waited for beyond that, long after it was enqueued."""

WRITE_EVERY_S = 0.25
"""Seconds for which records of a GPU run are gathered, :data:`MOST_UNREAD` at most. After a step the CPU's
caches hold anything but this code, so that several records cost little more than one."""
MEMORY_EVERY_S = 1.0
"""Seconds between two looks at the allocator, whose statistics cost up to half a millisecond; the records in
between repeat the last look."""

_staging: defaultdict[tuple[torch.device, int], list[tuple[Tensor, torch.cuda.Event]]] = defaultdict(list)
"""Pinned memory for the values of a step and the event behind their copy, used again once they were read; by
device and number of values."""

Listener = Callable[[StepRecord, Sequence[Sequence[int]]], None]


@dataclass(kw_only=True)
class PendingStep:
    """A step whose device values have not been read yet."""

    step: int
    epoch: int
    time_unix: float
    clock: StepClock
    loss: Tensor
    micro_losses: Sequence[float | Tensor]
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
    ops: int | None = None
    op_cost_us: float | None = None
    sync_count: int | None = None
    sync_ms: float | None = None
    memory: Mapping[str, int] = field(default_factory=dict)
    values: Tensor | list[float] | None = None
    """Loss, norm, skipped and micro-losses in host memory; valid once ``copied`` has passed."""
    copied: torch.cuda.Event | None = None

    def stage(self) -> None:
        """Start the copy of the step's values into pinned host memory, behind the step's own work.

        Reading a device value directly would wait for everything enqueued so far, later steps included.
        """
        device = self.loss.device
        scalars = [self.loss, self.norm, self.skipped, *self.micro_losses]
        if device.type != "cuda":
            self.values = [float(value) for value in scalars]
            return
        packed = torch.stack([_scalar(value, device) for value in scalars])
        free = _staging[device, len(scalars)]
        if not free:
            free.append((torch.empty(packed.shape, pin_memory=True), torch.cuda.Event()))  # type: ignore[no-untyped-call]
        self.values, self.copied = free.pop()
        self.values.copy_(packed, non_blocking=True)
        self.copied.record(self.clock.stream)

    def passed(self) -> bool:
        """Tell whether the values can be read (never waits)."""
        return self.copied is None or bool(self.copied.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[float]:
        """Return the values; waits for their copy, which is long done unless the run is ending."""
        if self.copied is None or not isinstance(self.values, Tensor):
            return list(self.values or ())
        self.copied.synchronize()
        read: list[float] = self.values.tolist()
        _staging[self.loss.device, len(read)].append((self.values, self.copied))
        self.values, self.copied = read, None
        return read


def _scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """Return a float32 scalar on a device."""
    if isinstance(value, Tensor) and value.dtype == torch.float32 and value.device == device:
        return value.detach()
    return torch.as_tensor(value, dtype=torch.float32).detach().to(device, non_blocking=True)


class Recorder:
    """Collects pending steps and hands complete records to listeners, in step order.

    Args:
        device: Device of the run.
        rank: This process's rank.
        gpu_util: Returns the GPU's utilisation (0 to 100) or None, without waiting for the driver.
        write_every_s: Seconds between two looks at what can be written. Default :data:`WRITE_EVERY_S` on a
            GPU, whose values come late anyway, 0 elsewhere: after every step.
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
        self._pending: deque[PendingStep] = deque()
        self._previous: StepClock | None = None
        self._previous_end: float | None = None
        self._checkpoint_ms = 0.0
        self._probe: dict[str, float] = {}
        late = WRITE_EVERY_S if device.type == "cuda" else 0.0
        self._write_every_s = late if write_every_s is None else write_every_s
        self._wrote_at = -math.inf
        self._memory_at = -math.inf
        self._memory_known: Mapping[str, int] = {}
        self.listeners: list[Listener] = []

    def submit(self, pending: PendingStep) -> None:
        """Take a finished step; now and then write every step that the device has passed."""
        pending.checkpoint_ms, self._checkpoint_ms = self._checkpoint_ms, 0.0
        if self._probe:
            pending.ops, pending.sync_count = int(self._probe["ops"]), int(self._probe["sync_count"])
            pending.sync_ms, pending.op_cost_us = self._probe["sync_ms"], self._probe["op_cost_us"]
            self._probe = {}
        if self._device.type == "cuda":
            pending.memory = self._memory()
        pending.stage()
        self._pending.append(pending)
        if len(self._pending) >= MOST_UNREAD or time.monotonic() - self._wrote_at >= self._write_every_s:
            self.write_passed()

    def write_passed(self) -> None:
        """Write every step that the device has passed, and wait for none but what is too many."""
        self._wrote_at = time.monotonic()
        while self._pending and (len(self._pending) > MOST_UNREAD or self._pending[0].passed()):
            self._write(self._pending.popleft())

    def _memory(self) -> Mapping[str, int]:
        """Return peak and reserved bytes and retries of the allocator, at most a second old."""
        now = time.monotonic()
        if now - self._memory_at >= MEMORY_EVERY_S:
            self._memory_at = now
            found = torch.cuda.memory_stats(self._device)
            names = {
                "peak": "allocated_bytes.all.peak",
                "reserved": "reserved_bytes.all.current",
                "retries": "num_alloc_retries",
            }
            self._memory_known = {short: int(found.get(name, 0)) for short, name in names.items()}
        return self._memory_known

    def note_checkpoint(self, ms: float) -> None:
        """Add host time spent on a checkpoint at the step border; it stands in the next record."""
        self._checkpoint_ms += ms

    def note_probe(self, probe: Mapping[str, float]) -> None:
        """Attach the counts of a probed step to its record."""
        self._probe = dict(probe)

    def flush(self) -> None:
        """Write every pending step; waits for the device (checkpoint and end of the run only)."""
        while self._pending:
            self._write(self._pending.popleft())

    def restart(self) -> None:
        """Forget the end of the last step, after a pause that is not part of the next one."""
        if self._previous is not None:
            self._previous.release()
        self._previous, self._previous_end = None, None

    def close(self) -> None:
        """End the thread that asks for the GPU's utilisation."""
        if isinstance(self._gpu_util, Utilisation):
            self._gpu_util.close()

    def _write(self, pending: PendingStep) -> None:
        record = self._record(pending, pending.read())
        if self._previous is not None:
            self._previous.release()
        self._previous, self._previous_end = pending.clock, pending.clock.ended
        for listener in self.listeners:
            listener(record, pending.sample_ids)

    def _record(self, pending: PendingStep, values: Sequence[float]) -> StepRecord:
        loss, norm, skipped, *micro_losses = values
        clock = pending.clock
        since = self._previous_end if self._previous_end is not None else clock.began
        step_ms = clock.since_ms(self._previous) if self._previous is not None else clock.total_ms()
        exposed = pending.comm.get("exposed_ms")
        backward = clock.device_ms("backward")
        forward = max(0.0, clock.device_ms("window") - backward)
        finish = clock.device_ms("comm")
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
            step_ms=step_ms,
            data_wait_ms=clock.stall_ms(),
            h2d_ms=clock.device_ms("h2d"),
            forward_ms=forward,
            backward_ms=max(0.0, backward - (exposed or 0.0)),
            comm_exposed_ms=None if exposed is None else exposed + finish,
            comm_overlap=pending.comm.get("overlap"),
            optimizer_ms=clock.device_ms("optimizer"),
            checkpoint_ms=pending.checkpoint_ms,
            validation_loss=pending.validation_loss,
            gpu_util=None if self._gpu_util is None else self._gpu_util(),
            mem_peak_bytes=pending.memory.get("peak"),
            mem_reserved_bytes=pending.memory.get("reserved"),
            alloc_retries=pending.memory.get("retries"),
            alloc_ms=pending.mem.get("alloc_ms"),
            fused=pending.fused,
            fusion_reason=pending.fusion_reason,
            graph=pending.graph,
            graph_reason=pending.graph_reason,
            filled_samples=pending.filled,
            skipped=bool(skipped),
            launch_ms=clock.host_ms("window") + clock.host_ms("optimizer"),
            ops=pending.ops,
            op_cost_us=pending.op_cost_us,
            sync_count=pending.sync_count,
            sync_ms=pending.sync_ms,
            heartbeat=pending.comm.get("heartbeat_age_s"),
            data={"host_wait_ms": clock.host_ms("data"), **pending.data},
            mem=pending.mem,
            comm=pending.comm,
        )
        wall_ms = 1e3 * (clock.ended - since)
        _derive(record, wall_ms)
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
