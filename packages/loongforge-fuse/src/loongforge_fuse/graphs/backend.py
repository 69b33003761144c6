"""How a pass is recorded and replayed: CUDA graphs, or a stand-in that re-executes with static buffers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Outputs = tuple[Tensor, ...]
Pass = Callable[[], Outputs]


class Recorded(Protocol):
    """A recorded pass."""

    outputs: Outputs
    """Static tensors that every replay writes anew."""
    bytes: int
    """Device memory this recording holds."""

    def replay(self) -> None:
        """Run the recorded work again."""
        ...

    def release(self) -> None:
        """Give up the recording and its memory."""
        ...


class Backend(Protocol):
    """Records passes."""

    def eager(self, work: Pass) -> Outputs:
        """Run ``work`` as an ordinary pass, in a way that prepares its later capture."""
        ...

    def capture(self, work: Pass, rehearsal: Pass) -> Recorded:
        """Record ``work``. Raises whatever makes the recording impossible; nothing has been computed then.

        ``rehearsal`` is the same without the optimizer's step, for backends that must execute to find out.
        """
        ...

    def held(self) -> int | None:
        """Return the device memory that all recordings share, bytes; None where they share nothing."""
        ...

    def renew(self) -> None:
        """Let the next recordings share new memory, so that the old goes back with its last recording."""
        ...

    def release(self) -> None:
        """Give up what recordings share."""
        ...


class CudaBackend:
    """CUDA graphs that share one memory pool and are captured on one private stream.

    Args:
        device: The model's device.
        priority: Priority of the stream, which its kernels keep in replays: lower numbers go first. Default
            0, the lowest.
    """

    def __init__(self, device: torch.device, *, priority: int = 0) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def eager(self, work: Pass) -> Outputs:
        """Run on the capture stream, so that autograd's accumulation nodes belong to it."""
        current = torch.cuda.current_stream(self._device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            outputs = work()
        current.wait_stream(self.stream)
        for tensor in outputs:
            tensor.record_stream(current)
        return outputs

    def capture(self, work: Pass, rehearsal: Pass) -> Recorded:
        """Record into the shared pool; other threads may use the device meanwhile."""
        del rehearsal
        # Autograd graphs that are still alive hold accumulation nodes of another stream, which break a
        # capture; those in reference cycles would live until some later collection.
        gc.collect()
        # Collectives still in flight would be queried during the capture and invalidate it.
        torch.cuda.synchronize(self._device)
        before = torch.cuda.memory_reserved(self._device)
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                outputs = work()
        except BaseException:
            self._recover(current)
            raise
        held = torch.cuda.memory_reserved(self._device) - before
        return _CudaRecording(graph, outputs, max(held, 0))

    def _recover(self, current: torch.cuda.Stream) -> None:
        """Bring stream, allocator and random generators back to their ordinary state after a failed capture.

        torch leaves all three as they were inside the capture when ending it fails.
        """
        torch.cuda.set_stream(current)
        failed = self._pool
        # The failed capture may still count as recording into its pool; later ones get another.
        self._pool = torch.cuda.graph_pool_handle()
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._device.index or 0, failed)  # noqa: SLF001 - no public way
        # A capture that succeeds takes the default generator out of its capturing state.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self.stream):
            torch.zeros(1, device=self._device)
        torch.cuda.synchronize(self._device)

    def held(self) -> int | None:
        """Return what the pool has reserved, whichever graph uses it."""
        try:
            segments = torch.cuda.memory_snapshot(  # type: ignore[no-untyped-call]
                self._pool, include_traces=False
            )
        except (RuntimeError, TypeError):
            return None
        return sum(
            int(segment["total_size"])
            for segment in segments
            if tuple(segment.get("segment_pool_id", self._pool)) == tuple(self._pool)
        )

    def renew(self) -> None:
        """Take another pool; the old one goes back to the device with its last graph."""
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    def release(self) -> None:
        """Forget the pool; its memory goes back when the last graph is gone."""
        del self._pool


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs, held: int) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self.outputs = outputs
        self.bytes = held

    def replay(self) -> None:
        if self._graph is None:
            message = "this graph was released and cannot be replayed"
            raise RuntimeError(message)
        self._graph.replay()

    def release(self) -> None:
        if self._graph is not None:
            # A replay may still run; destroying its graph under it is an error of the driver.
            torch.cuda.synchronize()
            self._graph.reset()
        self._graph = None
        self.outputs = ()


class Chain:
    """Recordings that are replayed one after the other and share the first one's outputs.

    Args:
        parts: The recordings, in order.
        between: Called after the first one's replay.
    """

    def __init__(self, *parts: Recorded, between: Callable[[], None]) -> None:
        self._parts = parts
        self._between = between
        self.outputs = parts[0].outputs
        self.bytes = sum(part.bytes for part in parts)

    def replay(self) -> None:
        """Replay all parts."""
        for number, part in enumerate(self._parts):
            if number == 1:
                self._between()
            part.replay()

    def release(self) -> None:
        """Release all parts."""
        for part in self._parts:
            part.release()
        self.outputs = ()


class HostReadError(RuntimeError):
    """A pass read device values on the host, or made shapes from them, while being recorded."""


class _ForbidHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise on the operators that make a CUDA capture fail."""

    _FORBIDDEN = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim"})

    def __torch_dispatch__(
        self,
        func: object,
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        name = getattr(getattr(func, "_schema", None), "name", "").removeprefix("aten::")
        if name in self._FORBIDDEN:
            message = f"operator {name} reads values on the host and cannot be part of a graph"
            raise HostReadError(message)
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


class EmulatedBackend:
    """Stand-in for CUDA graphs on any device: replays re-execute into the same output tensors.

    The recording pass runs under a mode that refuses what a CUDA capture refuses, with gradients and random
    state put back afterwards, so that key, eviction, pointer and fall-back logic behave as on a GPU.

    Args:
        touched: Returns the parameters whose gradients a pass may change.
    """

    def __init__(self, touched: Callable[[], Sequence[Tensor]]) -> None:
        self._touched = touched
        self.captures = 0

    def eager(self, work: Pass) -> Outputs:
        """Run the pass."""
        return work()

    def capture(self, work: Pass, rehearsal: Pass) -> Recorded:
        """Rehearse once and undo what that did."""
        self.captures += 1
        with self._undone(), _ForbidHostReads():  # type: ignore[no-untyped-call]
            outputs = tuple(o.detach().clone() for o in rehearsal())
        return _EmulatedRecording(work, outputs, self._touched)

    @contextmanager
    def _undone(self) -> Iterator[None]:
        kept = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in self._touched()]
        state = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(state)
            for parameter, gradient, values in kept:
                parameter.grad = gradient
                if gradient is not None and values is not None:
                    gradient.copy_(values)

    def held(self) -> int | None:
        """Recordings share nothing."""
        return None

    def renew(self) -> None:
        """Nothing is shared."""

    def release(self) -> None:
        """Nothing is shared."""


class _EmulatedRecording:
    def __init__(self, work: Pass, outputs: Outputs, touched: Callable[[], Sequence[Tensor]]) -> None:
        self._work: Pass | None = work
        self.outputs = outputs
        self.bytes = sum(p.numel() * p.element_size() for p in touched())

    def replay(self) -> None:
        if self._work is None:
            message = "this graph was released and cannot be replayed"
            raise RuntimeError(message)
        for static, fresh in zip(self.outputs, self._work(), strict=True):
            static.copy_(fresh.detach())

    def release(self) -> None:
        self._work = None
        self.outputs = ()
