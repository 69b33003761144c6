"""The frozen part of the next batch's forward pass, run beside the present step on a stream of its own.

What no training step changes can be computed before its step: the GPU then always has work of two kinds, and
the gaps, small kernels and memory traffic of the trainable part are filled with the products of the frozen
one. The numbers are the same, since a step changes nothing that the frozen part reads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from loongforge_fuse.fusion.batch import JoinError, join
from loongforge_fuse.graphs.backend import CudaBackend, Outputs, Recorded
from loongforge_fuse.graphs.key import is_constant
from loongforge_fuse.graphs.multiprocessors import leaving_free
from loongforge_fuse.graphs.passes import numeric_modes
from loongforge_fuse.graphs.pointers import ModelPointers, PointerSnapshot
from loongforge_fuse.graphs.reasons import AheadReason
from loongforge_fuse.protocol import Batch, FrozenPrefix, batch_size, unwrap


@dataclass(frozen=True, kw_only=True)
class AheadStats:
    """Counters since the object was made.

    Attributes:
        started: Batches (or joined windows) whose frozen part was started ahead.
        replays: Those that were one graph replay.
        captures: Graphs captured.
        discarded: Results that were not used because weights changed in between; they were computed anew.
        inline: Batches left to their step, by reason code.
        graph_bytes: Device memory of the graphs.
        failures: Errors of captures; the shapes run without a graph.
    """

    started: int
    replays: int
    captures: int
    discarded: int
    inline: Mapping[str, int]
    graph_bytes: int
    failures: tuple[str, ...]


class Ahead:
    """A window whose frozen part is under way.

    Args:
        window: The micro-batches as they came.
        ready: Returns the micro-batches with the frozen part in them, once the current stream may read it.
        valid: Whether what was computed still belongs to the present weights.
        again: Called instead of ``ready`` when it does not.
    """

    def __init__(
        self,
        ready: Callable[[], list[Batch]],
        *,
        valid: Callable[[], bool] = lambda: True,
        again: Callable[[], list[Batch]] | None = None,
    ) -> None:
        self._ready = ready
        self._valid = valid
        self._again = again

    def take(self) -> list[Batch]:
        """Return the micro-batches for their step; the current stream waits, the host does not."""
        if self._again is not None and not self._valid():
            return self._again()
        return self._ready()


@dataclass(kw_only=True)
class _Recording:
    """A captured frozen part: static rows in, static rows out."""

    rows: int
    inputs: dict[str, Tensor]
    names: tuple[str, ...]
    recorded: Recorded
    pointers: PointerSnapshot
    bytes: int


class FrozenAhead:
    """Starts the frozen part of coming micro-batches, as graph replays on a stream of their own.

    The model follows :class:`~loongforge_fuse.protocol.FrozenPrefix`. Every shape runs a few times without a
    graph first. A batch with fewer samples of a captured shape fills the leading rows of its graph, so an
    epoch's last window is no new shape. On a CPU the frozen part runs at once, in line.

    Args:
        model: The model; wrappers are looked through.
        autocast: Dtype of the autocast under which the model's steps run. Default none.
        warmup_steps: Passes of a shape without a graph before its capture. Default 2.
        max_graphs: Graphs kept; the least recently used goes first. Default 4.
        hooks: ``"refuse"``: with module hooks in the frozen part everything is left to the step, since a
            replay runs no Python code. ``"allow"``: hooks may run at capture only. Default ``"refuse"``.
        spare_sms: Multiprocessors that matrix products of the frozen part leave to the step, so that its
            small kernels need not wait for a large one to end. Other kernels of the library may be chosen
            then, which round in another order. Without effect where this torch cannot say so. Default 0.

    Raises:
        ValueError: ``warmup_steps`` or ``max_graphs`` below 1, or ``spare_sms`` negative.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        autocast: torch.dtype | None = None,
        warmup_steps: int = 2,
        max_graphs: int = 4,
        hooks: Literal["refuse", "allow"] = "refuse",
        spare_sms: int = 0,
    ) -> None:
        if spare_sms < 0:
            message = f"spare_sms is {spare_sms}; give the multiprocessors to leave free, or 0"
            raise ValueError(message)
        if warmup_steps < 1 or max_graphs < 1:
            message = (
                f"warmup_steps is {warmup_steps} and max_graphs {max_graphs}; both must be at least 1 "
                "(to switch this off, do not make a FrozenAhead)"
            )
            raise ValueError(message)
        inner = unwrap(model)
        self._model = inner if isinstance(inner, FrozenPrefix) else None
        self._autocast = autocast
        self._warmup, self._most, self._hooks = warmup_steps, max_graphs, hooks
        self._spare = spare_sms
        self._frozen = nn.ModuleList(self._modules())
        self._pointers = ModelPointers(self._frozen)
        self._device = next((p.device for p in self._frozen.parameters()), torch.device("cpu"))
        self._backend = CudaBackend(self._device) if self._device.type == "cuda" else None
        self._seen: Counter[Hashable] = Counter()
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self._failures: dict[Hashable, str] = {}
        self._inline: Counter[str] = Counter()
        self._started = self._replays = self._captures = self._discarded = 0

    # -- what the caller sees ------------------------------------------------------------------------------
    @property
    def reason(self) -> AheadReason | None:
        """Why nothing can be run ahead for this model as it is now, or None."""
        if self._model is None or not len(self._frozen):
            return AheadReason.NO_FROZEN_PART
        if any(p.requires_grad for p in self._frozen.parameters()):
            return AheadReason.TRAINS
        if any(isinstance(m, nn.Dropout) and m.p > 0 and m.training for m in self._frozen.modules()):
            return AheadReason.RANDOM
        if self._hooks == "refuse" and self._pointers.hooked():
            return AheadReason.HOOKS
        return None

    def _modules(self) -> list[nn.Module]:
        return list(self._model.frozen_modules()) if self._model is not None else []

    def _look_again(self) -> None:
        """Take in modules of the frozen part that came or went."""
        now = self._modules()
        same = len(now) == len(self._frozen) and all(a is b for a, b in zip(now, self._frozen, strict=True))
        if same and all(self._pointers.changed(r.pointers) != "modules" for r in self._recordings.values()):
            return
        for key in list(self._recordings):
            self._drop(key)
        self._frozen = nn.ModuleList(now)
        self._pointers = ModelPointers(self._frozen)

    def start(self, window: Sequence[Batch]) -> Ahead:
        """Start the frozen part of micro-batches on the device; equal shapes run as one batch.

        Args:
            window: Micro-batches with their draws, complete on the current stream.

        Returns:
            What hands them out for their step.
        """
        self._look_again()
        reason = self.reason
        if reason is not None:
            return self._left(window, reason)
        parts: list[Sequence[Batch]]
        try:
            parts, joined = [window], [join(window).batch if len(window) > 1 else window[0]]
        except JoinError:
            parts, joined = [[batch] for batch in window], list(window)
        pending = [
            self._start(batch, sizes=[batch_size(b) for b in part])
            for batch, part in zip(joined, parts, strict=True)
        ]
        version = self._version()

        def ready() -> list[Batch]:
            return [
                self._merged(batch, made)
                for part, take in zip(parts, pending, strict=True)
                for batch, made in zip(part, take(), strict=True)
            ]

        def again() -> list[Batch]:
            self._discarded += 1
            return list(window)

        return Ahead(ready, valid=lambda: self._version() == version, again=again)

    def stats(self) -> AheadStats:
        """Return the counters."""
        return AheadStats(
            started=self._started,
            replays=self._replays,
            captures=self._captures,
            discarded=self._discarded,
            inline=dict(self._inline),
            graph_bytes=sum(r.bytes for r in self._recordings.values()),
            failures=tuple(self._failures.values()),
        )

    def release(self) -> None:
        """Give up the graphs and their memory. May be called twice; later batches are left to their step."""
        for key in list(self._recordings):
            self._drop(key)
        self._model = None

    # -- one batch -----------------------------------------------------------------------------------------
    def _left(self, window: Sequence[Batch], reason: AheadReason) -> Ahead:
        self._inline[str(reason)] += len(window)
        return Ahead(lambda: list(window))

    def _start(self, batch: Batch, *, sizes: Sequence[int]) -> Callable[[], list[Mapping[str, Tensor]]]:
        """Start one batch; return what splits its results by micro-batch for the current stream."""
        self._started += 1
        if self._backend is None:
            made = self._run(batch)
            return lambda: _split(made, sizes)
        stream = self._backend.stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            replayed = self._replayed(batch)
            made = self._run(batch) if replayed is None else replayed
        for value in batch.values():
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)
        done = stream.record_event()

        def take() -> list[Mapping[str, Tensor]]:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(done)
            for tensor in made.values():
                tensor.record_stream(current)
            return _split(made, sizes)

        return take

    def _run(self, batch: Batch) -> Mapping[str, Tensor]:
        """Run the frozen part as it is; it never records a graph for a backward pass."""
        if self._model is None:
            return {}
        spare = self._spare if self._backend is not None else 0
        with torch.no_grad(), self._precision(), leaving_free(spare):
            return {name: value.detach() for name, value in self._model.run_frozen(batch).items()}

    def _precision(self) -> AbstractContextManager[object]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast, cache_enabled=False)

    def _merged(self, batch: Batch, made: Mapping[str, Tensor]) -> Batch:
        """Return a micro-batch with its frozen part, without the entries that only that part reads."""
        if self._model is None or not made:
            return batch
        consumed = frozenset(self._model.frozen_inputs(batch))
        return {**{name: value for name, value in batch.items() if name not in consumed}, **made}

    def _version(self) -> Hashable:
        """Return what changes with every change of the frozen part: modules, addresses, values in place."""
        tensors = (*self._frozen.parameters(), *self._frozen.buffers())
        # The version counter is the only sign of a change in place.
        values = tuple(t._version for t in tensors)  # noqa: SLF001
        return tuple(map(id, self._modules())), self._pointers.snapshot(), values

    # -- graphs --------------------------------------------------------------------------------------------
    def _replayed(self, batch: Batch) -> Mapping[str, Tensor] | None:
        """Run a batch as a replay; None where it has no graph (yet). The graph's stream is current."""
        described = _rows(batch)
        if described is None:
            self._failures[_NO_ROWS] = f"a batch {_NO_ROWS} has no graph: {sorted(batch)}"
            return None
        rows, tensors, key = described
        key = (key, numeric_modes(self._device.type), self._autocast)
        recording = self._usable(key, rows)
        if recording is None:
            self._seen[key] += 1
            if key in self._failures or self._seen[key] <= self._warmup:
                return None
            recording = self._record(key, rows, batch, tensors)
            if recording is None:
                return None
        self._recordings.move_to_end(key)
        torch._foreach_copy_(
            [recording.inputs[name][:rows] for name in tensors], list(tensors.values()), non_blocking=True
        )
        recording.recorded.replay()
        self._replays += 1
        # The next replay overwrites the graph's own tensors, and its step may not have begun by then.
        return {
            name: value[:rows].clone()
            for name, value in zip(recording.names, recording.recorded.outputs, strict=True)
        }

    def _usable(self, key: Hashable, rows: int) -> _Recording | None:
        """Return the recording of a shape when it has room and its weights are where they were."""
        recording = self._recordings.get(key)
        if recording is None:
            return None
        if recording.rows < rows or self._pointers.changed(recording.pointers) is not None:
            self._drop(key)
            return None
        return recording

    def _record(
        self, key: Hashable, rows: int, batch: Batch, tensors: Mapping[str, Tensor]
    ) -> _Recording | None:
        backend, model = self._backend, self._model
        if backend is None or model is None:
            return None
        while len(self._recordings) >= self._most:
            self._drop(next(iter(self._recordings)))
        inputs = {name: value.clone() for name, value in tensors.items()}
        static = {k: inputs.get(k, v) for k, v in batch.items() if k in inputs or is_constant(v)}
        names: list[str] = []

        def work() -> Outputs:
            made = self._run(static)
            names[:] = made
            return tuple(made.values())

        try:
            recorded = backend.capture(work, work)
        except Exception as error:
            self._failures[key] = f"{type(error).__name__}: {error}".splitlines()[0]
            return None
        if not names or any(value.dim() == 0 or value.shape[0] != rows for value in recorded.outputs):
            self._failures[key] = f"run_frozen returned {names}; each must have one row per sample"
            recorded.release()
            return None
        self._captures += 1
        size = recorded.bytes + sum(t.numel() * t.element_size() for t in inputs.values())
        recording = _Recording(
            rows=rows,
            inputs=inputs,
            names=tuple(names),
            recorded=recorded,
            pointers=self._pointers.snapshot(),
            bytes=size,
        )
        self._recordings[key] = recording
        return recording

    def _drop(self, key: Hashable) -> None:
        self._recordings.pop(key).recorded.release()
        self._seen[key] = 0
        if not self._recordings and self._backend is not None:
            self._backend.renew()


_NO_ROWS = "with nested tensors or tensors without one row per sample on the GPU"


def _rows(batch: Batch) -> tuple[int, dict[str, Tensor], Hashable] | None:
    """Return rows, row tensors and shape key of a batch; None when it holds nested tensors."""
    rows = batch_size(batch)
    tensors: dict[str, Tensor] = {}
    key: list[Hashable] = []
    for name, value in batch.items():
        if isinstance(value, Tensor):
            if value.dim() == 0 or value.shape[0] != rows or not value.is_cuda:
                return None
            tensors[name] = value
            key.append((name, tuple(value.shape[1:]), value.dtype))
        elif is_constant(value):
            key.append((name, type(value).__name__, repr(value)))
        elif isinstance(value, list | tuple | Mapping) and _holds_tensors(value):
            return None
    return rows, tensors, tuple(key)


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensors(item) for item in value)
    return isinstance(value, Tensor)


def _split(made: Mapping[str, Tensor], sizes: Sequence[int]) -> list[Mapping[str, Tensor]]:
    """Split row tensors by micro-batch."""
    if len(sizes) == 1 or not made:
        return [made for _ in sizes]
    parts = {name: torch.split(value, list(sizes)) for name, value in made.items()}
    return [{name: values[i] for name, values in parts.items()} for i in range(len(sizes))]
