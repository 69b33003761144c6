"""The state machine of one backward: counts ready gradients, launches buckets in order, waits at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loongforge_comm.algorithms import sparse_all_reduce
from loongforge_comm.border import RequestWord
from loongforge_comm.channels import Channels, Flight
from loongforge_comm.errors import DivergentGradientError
from loongforge_comm.flat import FlatStore
from loongforge_comm.internals import at_end_of_backward, cuda_event, current_backward, nested_backward
from loongforge_comm.packing import pack, publish
from loongforge_comm.plan import CommPlan
from loongforge_comm.records import BackwardRecord, DeviceTimes, ReadyTimes

WaitBucket = Callable[[int, Flight], None]


class Reducer:
    """Averages gradients over ranks by the buckets of a plan. One instance per plan; hooks call into it.

    Rules that make it safe whatever each rank's data does:

    * buckets are launched strictly in plan order, and every bucket is launched in every synchronised
      backward;
    * a parameter without a gradient here sends zeros, and its use flag says so to the others;
    * a parameter with a gradient on no rank keeps ``grad`` as it was (``None`` stays ``None``);
    * a gradient that changes after its bucket left is an error, not a wrong average.

    A step that is bound by the host pays for every call made per gradient. :meth:`fired` therefore does two
    subtractions; times of single gradients are taken only while ``profile`` is set, and everything else is
    done once per bucket or once per backward.
    """

    def __init__(
        self,
        plan: CommPlan,
        parameters: Mapping[str, nn.Parameter],
        channels: Channels,
        *,
        contributors: int,
        overlap: bool,
        compress: bool,
        wait: WaitBucket,
        deferred_first: bool = True,
        device_times_every: int = 10,
    ) -> None:
        self.plan = plan
        self.contributors = contributors
        self.overlap = overlap
        self.request = False
        self.profile = False
        self.last = BackwardRecord()
        self.last_ready: dict[str, float] = {}
        self.on_sent: Callable[[], None] | None = None
        self.on_finish: Callable[[BackwardRecord], None] | None = None
        self._parameters = dict(parameters)
        self._channels = channels
        self._compress = compress
        self._wait = wait
        self._lock = threading.RLock()
        self._store = FlatStore(plan, {name: p.device for name, p in parameters.items()})
        self._bucket_of: dict[str, list[int]] = {}
        for bucket in plan.buckets:
            for piece in bucket.pieces:
                self._bucket_of.setdefault(piece.name, []).append(bucket.index)
        self._members = {
            index: [self._parameters[name] for name in flat.names]
            for index, flat in self._store.buckets.items()
        }
        # What each bucket waits for. One more than its gradients, which never comes, where something else
        # sends it: sparse buckets, the place after the last bucket, and all buckets of a deferred backward.
        sizes = [len({piece.name for piece in bucket.pieces}) for bucket in plan.buckets]
        sparse = [bucket.strategy == "sparse" for bucket in plan.buckets]
        self._to_wait_for = [*(n + held for n, held in zip(sizes, sparse, strict=True)), 1]
        self._after_backward = [*(n + 1 for n in sizes), 1]
        self._fires_expected = {spec.name: spec.fires for spec in plan.gradients}
        self._sparse = {spec.name for spec in plan.gradients if spec.sparse}
        self._deferred = deferred_first
        self._nccl = {
            index: flat.buffer.is_cuda and _is_nccl(channels.ring)
            for index, flat in self._store.buckets.items()
        }
        self._word = RequestWord()
        self._cuda = any(p.is_cuda for p in parameters.values())
        self._device_times_every = device_times_every
        self._backwards = 0
        self._reset()

    # ---- life of one backward

    def _reset(self) -> None:
        self._armed = False
        self._callback_task = -1
        self._counting = False
        self._again = False
        self._next = 0
        self._waiting = self._after_backward
        self._left = dict(self._fires_expected)
        self._ready = ReadyTimes()
        self._flights: dict[int, Flight] = {}
        self._missing: dict[int, list[int]] = {}
        self._record = BackwardRecord()

    @property
    def armed(self) -> bool:
        """A synchronised backward has begun and has not finished."""
        return self._armed

    @property
    def launched(self) -> int:
        """Buckets sent in the current backward."""
        return self._next

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the flat buffers."""
        return self._store.nbytes

    def arm(self, *, nested: bool | None = None) -> None:
        """Note the start of a backward and ask autograd to call back at its end."""
        if not self._armed:
            self._armed = True
            self._record = self._begin(deferred=self._deferred or not self.overlap)
        if self._callback_task < 0 and not (nested if nested is not None else nested_backward()):
            self._callback_task = current_backward()
            at_end_of_backward(self._end_of_backward)

    def _begin(self, *, deferred: bool) -> BackwardRecord:
        record = BackwardRecord(begin=time.perf_counter(), deferred=deferred, on_device=self._cuda)
        self._waiting = list(self._after_backward if deferred else self._to_wait_for)
        self._backwards += 1
        every = self._device_times_every
        wanted = self.profile or (every > 0 and self._backwards % every == 0)
        if self._cuda and wanted and not self._capturing():
            record.device = DeviceTimes(begin=cuda_event())
        return record

    def fired(self, name: str) -> None:
        """A gradient was accumulated (called by the parameter's hook)."""
        with self._lock:
            try:
                rest = self._left[name] - 1
            except KeyError:
                return  # the plan does not average this parameter
            if not self._counting:
                self._begin_counting(name)
            self._left[name] = rest
            if rest:
                if rest < 0:
                    self._fired_again(name)
                return
            waiting = self._waiting
            for index in self._bucket_of[name]:
                waiting[index] -= 1
            while waiting[self._next] <= 0:
                self._launch(self._next)

    def _begin_counting(self, name: str) -> None:
        """What is done once per backward, or per gradient while profiling or inside a nested backward."""
        if not self._armed or self._callback_task < 0:
            self.arm()
        now = time.perf_counter()
        if not self._record.first_ready:
            self._record.first_ready = now
        if self.profile:
            self._ready.note(name, now, event=self._parameters[name].is_cuda)
        self._counting = self._callback_task >= 0 and not self.profile

    def _fired_again(self, name: str) -> None:
        """More often than expected: too late if its bucket is on the way, else something to learn."""
        self._again = True
        bucket = self._bucket_of[name][0]
        if bucket < self._next:
            count = self._fires_expected[name] - self._left[name]
            raise DivergentGradientError(self._fired_late(name, count, bucket))

    def _fired_late(self, name: str, count: int, bucket: int) -> str:
        return (
            f"gradient of {name!r} was accumulated for the {count}. time after bucket {bucket} had been "
            f"sent; {self._fires_expected[name]} were seen before (a block under reentrant checkpoint or an "
            "inner backward?). The step must be dropped on all ranks. Use use_reentrant=False, or "
            "mode='simple', which sends after backward"
        )

    def _end_of_backward(self) -> None:
        with self._lock:
            if self._armed:
                self.finish()

    def finish(self) -> BackwardRecord:
        """Send what is left, wait for every bucket and put the averages into ``grad``."""
        record = self._record
        record.end = time.perf_counter()
        if not record.begin:
            record.begin = record.end
        record.captured = self._capturing()
        device = record.device = None if record.captured else record.device
        if device is not None:
            device.end = cuda_event()
        try:
            self._send_rest()
            if self.on_sent is not None and not record.captured:
                self.on_sent()
            for index, flight in self._flights.items():
                self._wait(index, flight)
            self._publish(captured=record.captured)
            record.finish = time.perf_counter()
            if device is not None:
                device.finish = cuda_event()
            self._note_spans(record)
            self.last = record
            self.last_ready = self._ready.relative(record.begin)
            if not record.captured and record.first_ready:
                self._learn_fires()
        finally:
            self._reset()
        if self.on_finish is not None:
            self.on_finish(record)
        return record

    def _send_rest(self) -> None:
        while self._next < len(self.plan.buckets):
            if self.plan.buckets[self._next].strategy == "sparse":
                self._reduce_sparse(self._next)
            else:
                self._launch(self._next)

    def _note_spans(self, record: BackwardRecord) -> None:
        for index, flight in self._flights.items():
            if flight.landed:
                record.spans[index] = (flight.launched, flight.landed)
            if record.device is not None and flight.start_event is not None and flight.done_event is not None:
                record.device.spans[index] = (flight.start_event, flight.done_event)

    def _learn_fires(self) -> None:
        """How often each gradient was accumulated: all after the first backward, later only what is more."""
        if not (self._deferred or self._again):
            return
        expected = self._fires_expected
        for name, left in self._left.items():
            count = expected[name] - left
            if count > expected[name] or (self._deferred and count > 0):
                expected[name] = count
        self._deferred = False

    def reduce_now(self) -> BackwardRecord:
        """Average the gradients that exist now; tensors in ``grad`` keep their identity and address."""
        with self._lock:
            held = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            self._armed = True
            self._record = self._begin(deferred=True)
            record = self.finish()
            for name, gradient in held.items():
                current = self._parameters[name].grad
                if current is not gradient and current is not None and name not in self._sparse:
                    gradient.copy_(current)
                    self._parameters[name].grad = gradient
            return record

    def _capturing(self) -> bool:
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def abandon(self) -> None:
        """Forget a backward that did not finish."""
        with self._lock:
            self._reset()

    # ---- one bucket

    def _launch(self, index: int) -> None:
        flat = self._store.buckets[index]
        side = self._channels.stream(flat.buffer.device) if flat.buffer.is_cuda else None
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(flat.buffer.device))
        average = self._backend_averages(index)
        with torch.cuda.stream(side) if side is not None else nullcontext():
            self._missing[index] = pack(
                flat,
                self._members[index],
                scale=1.0 if average else 1.0 / self.contributors,
                request=self.request,
            )
        self._flights[index] = self._channels.launch(
            flat.buffer,
            self.plan.buckets[index].strategy,
            average=average,
            compress=self._compress,
            timed=self._record.device is not None and not self._capturing(),
        )
        self._next = index + 1

    def _backend_averages(self, index: int) -> bool:
        """NCCL divides inside the ring when every rank takes part (it scales before adding: fp16 is safe)."""
        return (
            self._nccl[index]
            and self.plan.buckets[index].strategy == "ring"
            and self.contributors == len(self._channels.ranks)
        )

    def _reduce_sparse(self, index: int) -> None:
        (piece,) = self.plan.buckets[index].pieces
        parameter = self._parameters[piece.name]
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        scale = 1.0 / self.contributors
        average = sparse_all_reduce(gradient, parameter, scale, self._channels.peers)
        if average is not None:
            parameter.grad = average
        self._next = index + 1

    # ---- results

    def _publish(self, *, captured: bool) -> None:
        for index, flat in self._store.buckets.items():
            publish(flat, self._members[index], self._missing[index], captured=captured)
            if flat.control.numel() and not captured:
                self._word.read(flat.control)

    def take_request(self) -> bool:
        """Whether some rank asked for the step border, as seen by all ranks."""
        return self._word.take()

    def fires(self) -> dict[str, int]:
        """How often each hook fires per backward, as learned."""
        return dict(self._fires_expected)

    def views(self) -> dict[str, Tensor]:
        """The gradient views by parameter name."""
        return self._store.views

    @torch.no_grad()
    def attach_views(self) -> None:
        """Make every dense ``grad`` a zeroed view of the flat buffer (before a CUDA graph is captured)."""
        for name, view in self._store.views.items():
            view.zero_()
            self._parameters[name].grad = view


def _is_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in str(dist.get_backend_config(group)).lower()
