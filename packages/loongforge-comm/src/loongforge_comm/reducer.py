"""The state machine of one backward: counts ready gradients, launches buckets in order, finishes at the
end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loongforge_comm.algorithms import sparse_all_reduce
from loongforge_comm.channels import Channels, Flight
from loongforge_comm.errors import DivergentGradientError
from loongforge_comm.flat import FlatBucket, FlatStore
from loongforge_comm.internals import at_end_of_backward, cuda_event, current_backward, nested_backward
from loongforge_comm.plan import CommPlan


@dataclass(kw_only=True)
class BackwardRecord:
    """Times of one synchronised backward, in seconds of ``time.perf_counter()``.

    Attributes:
        begin: first sign of the backward.
        end: end of the gradient computation.
        finish: all averages in place.
        first_ready: first gradient ready.
        spans: launch and landing of each bucket that is known to the host.
        deferred: the buckets were launched after backward (first backward, mode ``simple``, ``reduce_now``).
        captured: the work was recorded into a CUDA graph; times mean nothing.
    """

    begin: float = 0.0
    end: float = 0.0
    finish: float = 0.0
    first_ready: float = 0.0
    spans: dict[int, tuple[float, float]] = field(default_factory=dict)
    deferred: bool = False
    captured: bool = False


WaitBucket = Callable[[int, Flight], None]


class Reducer:
    """Averages gradients over ranks by the buckets of a plan. One instance per plan; hooks call into it.

    Rules that make it safe whatever each rank's data does:

    * buckets are launched strictly in plan order, and every bucket is launched in every synchronised
      backward;
    * a parameter without a gradient here sends zeros, and its use flag says so to the others;
    * a parameter with a gradient on no rank keeps ``grad`` as it was (``None`` stays ``None``);
    * a gradient that changes after its bucket left is an error, not a wrong average.
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
    ) -> None:
        self.plan = plan
        self.contributors = contributors
        self.sync = True
        self.overlap = overlap
        self.request = False
        self.requested = False
        self.profile = False
        self.last = BackwardRecord()
        self.last_ready: dict[str, float] = {}
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
        self._sizes = [len({piece.name for piece in bucket.pieces}) for bucket in plan.buckets]
        self._fires_expected = {spec.name: spec.fires for spec in plan.gradients}
        self._sparse = {spec.name for spec in plan.gradients if spec.sparse}
        self._deferred = deferred_first
        self._nccl = {
            index: flat.buffer.is_cuda and _is_nccl(channels.ring)
            for index, flat in self._store.buckets.items()
        }
        self._control_read: tuple[Tensor, torch.cuda.Event] | None = None
        self._control_older: tuple[Tensor, torch.cuda.Event] | None = None
        self._cuda = any(p.is_cuda for p in parameters.values())
        self._reset()

    # ---- life of one backward

    def _reset(self) -> None:
        self._armed = False
        self._callback_task = -1
        self._next = 0
        self._waiting = list(self._sizes)
        self._fired: dict[str, int] = {}
        self._ready_at: dict[str, float] = {}
        self._ready_events: dict[str, torch.cuda.Event] = {}
        self._flights: dict[int, Flight] = {}
        self._used: dict[str, bool] = {}
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
            self._record = BackwardRecord(
                begin=time.perf_counter(), deferred=self._deferred or not self.overlap
            )
        if self._callback_task < 0 and not (nested if nested is not None else nested_backward()):
            self._callback_task = current_backward()
            at_end_of_backward(self._end_of_backward)

    def fired(self, name: str, parameter: Tensor) -> None:
        """A gradient was accumulated (called by the parameter's hook)."""
        if not self.sync:
            return
        with self._lock:
            if not self._armed or self._callback_task < 0:
                self.arm()
            now = time.perf_counter()
            if not self._ready_at:
                self._record.first_ready = now
            count = self._fired[name] = self._fired.get(name, 0) + 1
            self._ready_at[name] = now
            if self.profile and parameter.is_cuda:
                self._ready_events[name] = cuda_event()
            buckets = self._bucket_of[name]
            if buckets[0] < self._next:
                raise DivergentGradientError(self._fired_late(name, count, buckets[0]))
            if self._record.deferred or count != self._fires_expected[name]:
                return
            for index in buckets:
                self._waiting[index] -= 1
            while self._next < len(self._waiting) and self._waiting[self._next] <= 0:
                if self.plan.buckets[self._next].strategy == "sparse":
                    break
                self._launch(self._next)

    def _fired_late(self, name: str, count: int, bucket: int) -> str:
        return (
            f"gradient of {name!r} was accumulated for the {count}. time after bucket {bucket} had been "
            "sent; "
            f"{self._fires_expected[name]} were seen before (a block under reentrant checkpoint or an inner "
            "backward?). "
            "The step must be dropped on all ranks. Use use_reentrant=False, or mode='simple', which sends "
            "after backward"
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
        try:
            while self._next < len(self._sizes):
                if self.plan.buckets[self._next].strategy == "sparse":
                    self._reduce_sparse(self._next)
                else:
                    self._launch(self._next)
            for index, flight in self._flights.items():
                self._wait(index, flight)
            self._publish(captured=record.captured)
            record.finish = time.perf_counter()
            for index, flight in self._flights.items():
                if flight.landed:
                    record.spans[index] = (flight.launched, flight.landed)
            self.last = record
            self.last_ready = self._relative_ready()
            if not record.captured and self._fired:
                self._fires_expected.update({n: max(c, 1) for n, c in self._fired.items() if self._deferred})
                self._raise_expected()
                self._deferred = False
        finally:
            self._reset()
        if self.on_finish is not None:
            self.on_finish(record)
        return record

    def _raise_expected(self) -> None:
        for name, count in self._fired.items():
            if count > self._fires_expected[name]:
                self._fires_expected[name] = count

    def reduce_now(self) -> BackwardRecord:
        """Average the gradients that exist now; tensors in ``grad`` keep their identity and address."""
        with self._lock:
            held = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
            self._armed = True
            self._record = BackwardRecord(begin=time.perf_counter(), deferred=True)
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
        with torch.cuda.stream(side) if side is not None else _nothing():
            self._pack(flat, average=self._backend_averages(index))
        self._flights[index] = self._channels.launch(
            flat.buffer,
            self.plan.buckets[index].strategy,
            average=self._backend_averages(index),
            compress=self._compress,
            timed=self.profile and not self._capturing(),
        )
        self._next = index + 1

    def _backend_averages(self, index: int) -> bool:
        """NCCL divides inside the ring when every rank takes part (it scales before adding, so fp16 is
        safe).
        """
        return (
            self._nccl[index]
            and self.plan.buckets[index].strategy == "ring"
            and self.contributors == len(self._channels.ranks)
        )

    @torch.no_grad()
    def _pack(self, flat: FlatBucket, *, average: bool) -> None:
        """Copy the gradients into the bucket, divided by the contributors before the sum (fp16 would overflow
        after).
        """
        scale = 1.0 if average else 1.0 / self.contributors
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        used: list[bool] = []
        for name in flat.names:
            view = self._store.views[name]
            gradient = self._parameters[name].grad
            used.append(gradient is not None)
            self._used[name] = gradient is not None
            if gradient is None:
                view.zero_()
            elif gradient is view:
                if scale != 1.0:
                    view.mul_(scale)
            elif gradient.is_sparse:
                view.copy_(gradient.to_dense()).mul_(scale)
            elif flat.buffer.is_cuda:
                sources.append(gradient)
                targets.append(view)
            else:
                torch.mul(gradient, scale, out=view)
        if sources:
            torch._foreach_copy_(targets, sources)
            if scale != 1.0:
                torch._foreach_mul_(targets, scale)
        if all(used):
            flat.flags.fill_(scale)
        else:
            flat.flags.copy_(torch.tensor(used, dtype=torch.float32).mul_(scale).to(flat.flags.dtype))
        if flat.control.numel():
            flat.control.fill_(1.0 if self.request else 0.0)

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

    @torch.no_grad()
    def _publish(self, *, captured: bool) -> None:
        """Point ``grad`` at the averages. Flags are read only where this rank had no gradient itself."""
        for flat in self._store.buckets.values():
            missing = [i for i, name in enumerate(flat.names) if not self._used.get(name, False)]
            if missing and captured:
                names = [flat.names[i] for i in missing]
                msg = (
                    f"parameters {names[:5]} have no gradient while a CUDA graph is captured; whether "
                    "another rank has "
                    "one cannot be asked inside a graph. Give every captured parameter a gradient, or reduce "
                    "after "
                    "the replay with reduce_now()"
                )
                raise RuntimeError(msg)
            shares = flat.flags.tolist() if missing else []
            for i, name in enumerate(flat.names):
                if self._used.get(name, False) or _share(shares[i]) > 0.0:
                    self._parameters[name].grad = self._store.views[name]
            if flat.control.numel() and not captured:
                self._read_control(flat.control)

    def _read_control(self, control: Tensor) -> None:
        if not control.is_cuda:
            self.requested = _share(control.tolist()[0]) > 0.0
            return
        host = torch.empty(1, dtype=control.dtype, pin_memory=True)
        host.copy_(control, non_blocking=True)
        self._control_read = (host, cuda_event())

    def take_request(self) -> bool:
        """Whether some rank asked for the step border, as seen by all ranks.

        On CUDA this is the word of the reduction before the last one, whose copy has long arrived: reading
        the last one would make the host wait for the device in every step.
        """
        ready, self._control_older = self._control_older, self._control_read
        self._control_read = None
        if ready is not None:
            host, event = ready
            event.synchronize()
            self.requested = _share(host.tolist()[0]) > 0.0
        result, self.requested = self.requested, False
        return result

    def fires(self) -> dict[str, int]:
        """How often each hook fires per backward, as learned."""
        return dict(self._fires_expected)

    def _relative_ready(self) -> dict[str, float]:
        """Milliseconds from the start of backward to each gradient."""
        begin = self._record.begin
        times = {name: (at - begin) * 1e3 for name, at in self._ready_at.items()}
        if self._ready_events:
            first = next(iter(self._ready_events))
            anchor = self._ready_events[first]
            anchor.synchronize()
            for name, event in self._ready_events.items():
                event.synchronize()
                times[name] = times[first] + anchor.elapsed_time(event)
        return times

    def views(self) -> dict[str, Tensor]:
        """The gradient views by parameter name."""
        return self._store.views

    @torch.no_grad()
    def attach_views(self) -> None:
        """Make every dense ``grad`` a zeroed view of the flat buffer (before a CUDA graph is captured)."""
        for name, view in self._store.views.items():
            view.zero_()
            self._parameters[name].grad = view


def install_hooks(
    parameters: Mapping[str, nn.Parameter], target: Callable[[], Reducer | None]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Attach one post-accumulate hook per parameter that calls the reducer ``target`` returns at that
    time.
    """

    def hook(name: str, parameter: Tensor) -> None:
        reducer = target()
        if reducer is not None and name in reducer._bucket_of:  # noqa: SLF001 - same module
            reducer.fired(name, parameter)

    return [
        p.register_post_accumulate_grad_hook(partial(hook, name))  # type: ignore[no-untyped-call]
        for name, p in parameters.items()
    ]


def _is_nccl(group: dist.ProcessGroup) -> bool:
    return "nccl" in str(dist.get_backend_config(group)).lower()


def _share(value: complex | float) -> float:
    return abs(value)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
