"""Graphs of a model's frozen part by shape, in one or two pieces, replayed on a stream of their own."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from loongforge_fuse.graphs.backend import CudaBackend, Outputs, Recorded
from loongforge_fuse.graphs.key import is_constant
from loongforge_fuse.graphs.ledger import SHAPES_REMEMBERED
from loongforge_fuse.graphs.multiprocessors import leaving_free
from loongforge_fuse.graphs.passes import numeric_modes
from loongforge_fuse.graphs.pointers import ModelPointers, PointerSnapshot
from loongforge_fuse.graphs.reasons import root_cause
from loongforge_fuse.protocol import Batch, FrozenPrefix, SplitFrozenPrefix, batch_size

Made = Mapping[str, Tensor]
NO_ROWS = "with nested tensors or tensors without one row per sample on the GPU"


@dataclass(frozen=True, kw_only=True)
class FrozenWork:
    """How a frozen part is run: never recorded for a backward pass, under the autocast of the steps.

    Attributes:
        model: The model.
        device_type: Where it is.
        autocast: Dtype of the steps' autocast, or None.
        spare_sms: Multiprocessors that its products leave free, on CUDA.
        split: Whether its end is a piece of its own.
    """

    model: FrozenPrefix
    device_type: str
    autocast: torch.dtype | None = None
    spare_sms: int = 0
    split: bool = False

    def whole(self, batch: Batch) -> Made:
        """Run all of it."""
        return self._run(self.model.run_frozen, batch)

    def pieces(self) -> tuple[Callable[[Batch], Made], ...]:
        """Return its pieces; each takes the batch with what those before it returned."""
        model = self.model
        if not self.split or not isinstance(model, SplitFrozenPrefix):
            return (self.whole,)
        begin, finish = model.begin_frozen, model.finish_frozen
        return (lambda batch: self._run(begin, batch), lambda batch: self._run(finish, batch))

    def _run(self, part: Callable[[Batch], Made], batch: Batch) -> Made:
        spare = self.spare_sms if self.device_type == "cuda" else 0
        with torch.no_grad(), self._precision(), leaving_free(spare):
            return {name: value.detach() for name, value in part(batch).items()}

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast, cache_enabled=False)


@dataclass(kw_only=True)
class _Recording:
    """A captured frozen part: static rows in, static rows out, with all that lies between."""

    rows: int
    inputs: dict[str, Tensor]
    pieces: list[Recorded]
    made: dict[str, Tensor]
    pointers: PointerSnapshot
    bytes: int

    def release(self) -> None:
        for piece in self.pieces:
            piece.release()


class FrozenGraphs:
    """Captures and replays a frozen part; the backend's stream must be current in every call.

    Args:
        work: What is run.
        backend: Captures, and owns the stream.
        pointers: Where the part's weights lie.
        warmup_steps: Passes of a shape without a graph before its capture.
        max_graphs: Shapes kept.
    """

    def __init__(
        self,
        work: FrozenWork,
        backend: CudaBackend,
        pointers: ModelPointers,
        *,
        warmup_steps: int,
        max_graphs: int,
    ) -> None:
        self._work, self._backend, self.pointers = work, backend, pointers
        self._warmup, self._most = warmup_steps, max_graphs
        self._seen: Counter[Hashable] = Counter()
        self._recordings: OrderedDict[Hashable, _Recording] = OrderedDict()
        self.failures: dict[Hashable, str] = {}
        self.replays = self.captures = 0

    @property
    def bytes(self) -> int:
        """Device memory of all graphs and their inputs."""
        return sum(recording.bytes for recording in self._recordings.values())

    def start(self, batch: Batch, now: PointerSnapshot) -> Callable[[], Made] | None:
        """Replay the first piece; return what replays the rest and copies the results, None without graph.

        The results must be fetched before the next start of the same shape. ``now`` is where the weights lie.
        """
        described = describe_rows(batch)
        if described is None:
            self.failures[NO_ROWS] = f"a batch {NO_ROWS} has no graph: {sorted(batch)}"
            return None
        rows, tensors, shape = described
        key = (shape, numeric_modes(self._work.device_type))
        recording = self._usable(key, rows, now) or self._recorded(key, rows, batch, tensors)
        if recording is None:
            return None
        self._recordings.move_to_end(key)
        targets = [recording.inputs[name][:rows] for name in tensors]
        torch._foreach_copy_(targets, list(tensors.values()), non_blocking=True)
        recording.pieces[0].replay()
        self.replays += 1

        def rest() -> Made:
            for piece in recording.pieces[1:]:
                piece.replay()
            # The next replay overwrites the graph's own tensors, and its step may not have begun by then.
            return {name: value[:rows].clone() for name, value in recording.made.items()}

        return rest

    def _usable(self, key: Hashable, rows: int, now: PointerSnapshot) -> _Recording | None:
        """Return the recording of a shape when it has room and its weights are where they were."""
        recording = self._recordings.get(key)
        if recording is None:
            return None
        if recording.rows < rows or self.pointers.changed(recording.pointers, now) is not None:
            self._drop(key)
            return None
        return recording

    def _recorded(
        self, key: Hashable, rows: int, batch: Batch, tensors: Mapping[str, Tensor]
    ) -> _Recording | None:
        """Capture a shape that was seen often enough; on failure remember why."""
        self._seen[key] += 1
        if len(self._seen) > SHAPES_REMEMBERED:
            del self._seen[next(iter(self._seen))]
        if key in self.failures or self._seen[key] <= self._warmup:
            return None
        while len(self._recordings) >= self._most:
            self._drop(next(iter(self._recordings)))
        inputs = {name: value.clone() for name, value in tensors.items()}
        static = {k: inputs.get(k, v) for k, v in batch.items() if k in inputs or is_constant(v)}
        pieces: list[Recorded] = []
        made: dict[str, Tensor] = {}
        try:
            for piece in self._work.pieces():
                names, recorded = self._capture(piece, static)
                pieces.append(recorded)
                made = dict(zip(names, recorded.outputs, strict=True))
                # What a piece returned stays referenced, so the next one's capture cannot take its memory.
                static = {**static, **made}
            _check_rows(made, rows)
        except Exception as error:
            for recorded in pieces:
                recorded.release()
            self.failures[key] = root_cause(error)
            return None
        self.captures += 1
        size = sum(t.numel() * t.element_size() for t in inputs.values())
        recording = _Recording(
            rows=rows,
            inputs=inputs,
            pieces=pieces,
            made=made,
            pointers=self.pointers.snapshot(),
            bytes=size + sum(piece.bytes for piece in pieces),
        )
        self._recordings[key] = recording
        return recording

    def _capture(self, piece: Callable[[Batch], Made], static: Batch) -> tuple[list[str], Recorded]:
        names: list[str] = []

        def work() -> Outputs:
            made = piece(static)
            names[:] = made
            return tuple(made.values())

        return names, self._backend.capture(work, work)

    def _drop(self, key: Hashable) -> None:
        self._recordings.pop(key).release()
        self._seen[key] = 0
        if not self._recordings:
            self._backend.renew()

    def clear(self) -> None:
        """Give up all graphs."""
        for key in list(self._recordings):
            self._drop(key)


def _check_rows(made: Made, rows: int) -> None:
    if not made or any(value.dim() == 0 or value.shape[0] != rows for value in made.values()):
        shapes = {name: tuple(value.shape) for name, value in made.items()}
        message = f"the frozen part returned {shapes}; it must return tensors with one row per sample, {rows}"
        raise ValueError(message)


def describe_rows(batch: Batch) -> tuple[int, dict[str, Tensor], Hashable] | None:
    """Return rows, row tensors and shape key of a batch; None when a graph cannot take it by rows."""
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
        elif _holds_tensors(value):
            return None
    return rows, tensors, tuple(key)


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensors(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_tensors(item) for item in value)
    return isinstance(value, Tensor)
