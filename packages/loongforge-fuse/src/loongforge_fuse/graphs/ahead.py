"""The frozen part of the next batch's forward pass, run beside the present step on a stream of its own.

What no training step changes can be computed before its step: the GPU then always has work of two kinds, and
the gaps, small kernels and memory traffic of the trainable part are filled with the products of the frozen
one. The numbers are the same, since a step changes nothing that the frozen part reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from loongforge_fuse.fusion.batch import JoinError, join
from loongforge_fuse.graphs.backend import CudaBackend
from loongforge_fuse.graphs.frozen_graphs import FrozenGraphs, FrozenWork, Made
from loongforge_fuse.graphs.pointers import ModelPointers, PointerSnapshot
from loongforge_fuse.graphs.reasons import AheadReason
from loongforge_fuse.protocol import Batch, FrozenPrefix, batch_size, unwrap


@dataclass(frozen=True, kw_only=True)
class AheadStats:
    """Counters since the object was made.

    Attributes:
        started: Batches (or joined windows) whose frozen part was started ahead.
        replays: Those that were graph replays.
        captures: Shapes captured.
        discarded: Windows whose results were not used because weights changed in between; they are computed
            in their step.
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


@dataclass(frozen=True, kw_only=True)
class _State:
    """Modules, addresses and values of the frozen part at one moment; equal states give equal results."""

    modules: tuple[int, ...]
    pointers: PointerSnapshot
    versions: tuple[int, ...]


class Ahead:
    """A window whose frozen part is under way. Made by :meth:`FrozenAhead.start`."""

    def __init__(
        self,
        window: Sequence[Batch],
        pending: Sequence[_Pending] = (),
        *,
        merge: Callable[[Batch, Made], Batch] | None = None,
        valid: Callable[[], bool] = lambda: True,
    ) -> None:
        self._window, self._pending, self._merge, self._valid = window, pending, merge, valid

    def finish(self) -> None:
        """Start what a split left over, behind what the current stream holds now. May be called twice."""
        for one in self._pending:
            one.finish()

    def take(self) -> list[Batch]:
        """Return the micro-batches for their step; the current stream waits, the host does not."""
        self.finish()
        if self._merge is None or not self._valid():
            return list(self._window)
        made = [part for one in self._pending for part in one.take()]
        return [self._merge(batch, part) for batch, part in zip(self._window, made, strict=True)]


class _Pending:
    """One batch whose frozen part runs on its stream; splits its results by micro-batch.

    Args:
        stream: The stream, or None where everything was done at once.
        rest: Replays the rest and returns the results.
        sizes: Samples of each micro-batch.
    """

    def __init__(
        self, stream: torch.cuda.Stream | None, rest: Callable[[], Made], sizes: Sequence[int]
    ) -> None:
        self._stream, self._sizes = stream, sizes
        self._rest: Callable[[], Made] | None = rest
        self._made: Made = {}
        self._done: torch.cuda.Event | None = None

    def finish(self, *, waiting: bool = True) -> None:
        """Run the rest; ``waiting``: behind what the current stream holds."""
        rest, self._rest = self._rest, None
        if rest is None:
            return
        if self._stream is None:
            self._made = rest()
            return
        if waiting:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            self._made = rest()
        self._done = self._stream.record_event()

    def take(self) -> list[Made]:
        """Return the results; the current stream waits for them."""
        if self._stream is not None and self._done is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_event(self._done)
            for tensor in self._made.values():
                tensor.record_stream(current)
        made, sizes = self._made, list(self._sizes)
        if len(sizes) == 1 or not made:
            return [made for _ in sizes]
        parts = {name: torch.split(value, sizes) for name, value in made.items()}
        return [{name: values[i] for name, values in parts.items()} for i in range(len(sizes))]


def _drawing(module: nn.Module) -> str | None:
    """Return the attribute that says how much a module draws at random while it trains, or None.

    Attentions, recurrent layers and dropped paths keep theirs as a plain number.
    """
    names = ("p",) if isinstance(module, _DropoutNd) else ("dropout", "attention_dropout", "drop_prob")
    if isinstance(module, nn.RReLU):
        return "upper"
    return next((name for name in names if isinstance(getattr(module, name, None), int | float)), None)


class FrozenAhead:
    """Starts the frozen part of coming micro-batches, as graph replays on a stream of their own.

    The model follows :class:`~loongforge_fuse.protocol.FrozenPrefix`. Every shape runs a few times without a
    graph first. A batch with fewer samples of a captured shape fills the leading rows of its graph, so an
    epoch's last window is no new shape. On a CPU the frozen part runs at once, in line. Weights that change
    between start and step are noticed where torch counts the change; writes through ``.data`` are not.

    Args:
        model: The model; wrappers are looked through.
        autocast: Dtype of the autocast under which the model's steps run. Default none.
        warmup_steps: Passes of a shape without a graph before its capture. Default 2.
        max_graphs: Shapes kept; the least recently used goes first. Default 4.
        hooks: ``"refuse"``: with module hooks in the frozen part everything is left to the step, since a
            replay runs no Python code. ``"allow"``: hooks may run at capture only. Default ``"refuse"``.
        split: The caller calls :meth:`Ahead.finish` between a step's backward and its optimizer; the end of
            the frozen part of a :class:`~loongforge_fuse.protocol.SplitFrozenPrefix` then runs beside the
            optimizer, whose memory traffic leaves the arithmetic units idle. Default False.
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
        split: bool = False,
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
        self._hooks = hooks
        self._autocast, self._split, self._spare = autocast, split, spare_sms
        self._warmup, self._most = warmup_steps, max_graphs
        self._work: FrozenWork | None = None
        self._graphs: FrozenGraphs | None = None
        self._stream: torch.cuda.Stream | None = None
        self._open: _Pending | None = None
        self._inline: Counter[str] = Counter()
        self._started = self._discarded = self._replays = self._captures = 0
        self._watch()

    @property
    def reason(self) -> AheadReason | None:
        """Why nothing can be run ahead for this model as it is now, or None."""
        return self._reason(self._look_again())

    def _reason(self, now: _State) -> AheadReason | None:
        if self._model is None or not now.modules:
            return AheadReason.NO_FROZEN_PART
        if any(now.pointers.trains):
            return AheadReason.TRAINS
        if any(module.training and getattr(module, name) for module, name in self._draws):
            return AheadReason.RANDOM
        if any(module.training and module.track_running_stats for module in self._norms):
            return AheadReason.STATEFUL
        if self._hooks == "refuse" and self._pointers.hooked():
            return AheadReason.HOOKS
        return None

    def start(self, window: Sequence[Batch]) -> Ahead:
        """Start the frozen part of micro-batches on the device; equal shapes run as one batch.

        Args:
            window: Micro-batches with their draws, complete on the current stream.

        Returns:
            What hands them out for their step.
        """
        if not window:
            return Ahead(window)
        state = self._look_again()
        reason = self._reason(state)
        if reason is not None or self._work is None:
            self._inline[str(reason)] += len(window)
            return Ahead(window)
        parts: list[Sequence[Batch]]
        try:
            parts, joined = [window], [join(window).batch if len(window) > 1 else window[0]]
        except JoinError:
            parts, joined = [[batch] for batch in window], list(window)
        pending = [
            self._start(self._work, batch, [batch_size(b) for b in part], state)
            for batch, part in zip(joined, parts, strict=True)
        ]

        def valid() -> bool:
            now = self._state()
            same = now == state and self._reason(now) is None
            self._discarded += not same
            return same

        return Ahead(window, pending, merge=self._merged, valid=valid)

    def stats(self) -> AheadStats:
        """Return the counters."""
        graphs = self._graphs
        return AheadStats(
            started=self._started,
            replays=self._replays + (0 if graphs is None else graphs.replays),
            captures=self._captures + (0 if graphs is None else graphs.captures),
            discarded=self._discarded,
            inline=dict(self._inline),
            graph_bytes=0 if graphs is None else graphs.bytes,
            failures=() if graphs is None else tuple(graphs.failures.values()),
        )

    def release(self) -> None:
        """Give up the graphs and their memory. May be called twice; later batches are left to their step."""
        self._give_up_graphs()
        self._model = self._work = None

    def _modules(self) -> list[nn.Module]:
        return list(self._model.frozen_modules()) if self._model is not None else []

    def _watch(self) -> None:
        """Take in the frozen part as it is now: its modules, and where it lies."""
        self._give_up_graphs()
        self._frozen = nn.ModuleList(self._modules())
        self._draws = [(m, name) for m in self._frozen.modules() if (name := _drawing(m)) is not None]
        self._norms = [m for m in self._frozen.modules() if isinstance(m, _NormBase)]
        self._pointers = ModelPointers(self._frozen)
        self._children = self._pointers.snapshot().children
        self._device = self._place()
        if self._model is None:
            return
        self._work = FrozenWork(
            model=self._model,
            device_type=self._device.type,
            autocast=self._autocast,
            spare_sms=self._spare,
            split=self._split,
        )
        if self._device.type == "cuda":
            backend = CudaBackend(self._device)
            self._stream = backend.stream
            self._graphs = FrozenGraphs(
                self._work, backend, self._pointers, warmup_steps=self._warmup, max_graphs=self._most
            )

    def _place(self) -> torch.device:
        return next((p.device for p in self._frozen.parameters()), torch.device("cpu"))

    def _give_up_graphs(self) -> None:
        """Release graphs and stream, after what is under way on them has been started to its end."""
        if self._open is not None:
            self._open.finish()
        if self._graphs is not None:
            self._replays += self._graphs.replays
            self._captures += self._graphs.captures
            self._graphs.clear()
        self._graphs = self._stream = self._open = None

    def _state(self) -> _State:
        """Return what changes with every change of the frozen part."""
        return _State(
            modules=tuple(map(id, self._modules())),
            pointers=self._pointers.snapshot(),
            versions=self._pointers.versions(),
        )

    def _look_again(self) -> _State:
        """Take in modules of the frozen part that came or went; return its state."""
        now = self._state()
        same = now.modules == tuple(map(id, self._frozen)) and now.pointers.children == self._children
        if same and self._place() == self._device:
            return now
        self._watch()
        return self._state()

    def _start(self, work: FrozenWork, batch: Batch, sizes: Sequence[int], state: _State) -> _Pending:
        self._started += 1
        stream = self._stream
        if stream is None:
            pending = _Pending(None, lambda: work.whole(batch), sizes)
            pending.finish()
            return pending
        if self._open is not None:
            # The graphs' tensors hold one batch at a time.
            self._open.finish()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            rest = None if self._graphs is None else self._graphs.start(batch, state.pointers)
        pending = _Pending(stream, rest or (lambda: work.whole(batch)), sizes)
        if rest is None or not work.split:
            pending.finish(waiting=False)
        self._open = pending
        for value in batch.values():
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(stream)
        return pending

    def _merged(self, batch: Batch, made: Made) -> Batch:
        """Return a micro-batch with its frozen part, without the entries that only that part reads."""
        if self._model is None or not made:
            return batch
        consumed = frozenset(self._model.frozen_inputs(batch))
        return {**{name: value for name, value in batch.items() if name not in consumed}, **made}
