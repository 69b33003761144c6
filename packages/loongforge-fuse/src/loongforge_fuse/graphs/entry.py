"""One recorded shape: its static buffers, its gradients, and what it was recorded with."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from loongforge_fuse.fusion.execute import Weighting
from loongforge_fuse.graphs.backend import Recorded
from loongforge_fuse.graphs.key import BatchSignature, static_copy
from loongforge_fuse.graphs.ledger import SHAPES_REMEMBERED
from loongforge_fuse.graphs.pointers import PointerSnapshot
from loongforge_fuse.protocol import Batch

Gradients = list[tuple[nn.Parameter, Tensor | None]]


class LiveParameters:
    """Trainable parameters, and which of them receive gradients in passes of a shape.

    Giving a zero gradient to a parameter that the loss never reaches would let the optimizer decay it, so
    only parameters that were seen to receive one in a shape get a static gradient there.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._live: dict[Hashable, frozenset[int]] = {}
        # Shapes mostly agree: equal sets are kept once.
        self._sets: dict[frozenset[int], frozenset[int]] = {}
        self._static: dict[int, Tensor] = {}

    def all_trainable(self) -> list[nn.Parameter]:
        """Return the trainable parameters in registration order."""
        return [p for p in self._model.parameters() if p.requires_grad]

    def live(self, key: Hashable) -> list[nn.Parameter]:
        """Return those that received a gradient in a watched pass of a shape."""
        seen = self._live.get(key, frozenset())
        return [p for p in self.all_trainable() if id(p) in seen]

    def knows(self, key: Hashable) -> bool:
        """Whether a pass of a shape was watched since the last :meth:`forget`."""
        return key in self._live

    def static_gradients(
        self, key: Hashable, taken: frozenset[int] = frozenset()
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """Return each live parameter of a shape with the gradient tensor that all adding recordings share.

        That is the tensor used before; or ``p.grad`` where there is one, always when it is part of a larger
        buffer (of a communication library, for example); else a new one.

        Args:
            key: The shape.
            taken: Ids of gradient tensors that an overwriting recording owns: later recordings may use their
                memory for something else.
        """
        result = []
        for parameter in self.live(key):
            present, gradient = parameter.grad, self._static.get(id(parameter))
            if present is not None and (gradient is None or is_part(present)) and id(present) not in taken:
                gradient = present
            if gradient is None or not _alike(gradient, parameter):
                gradient = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            self._static[id(parameter)] = gradient
            result.append((parameter, gradient))
        return result

    @contextmanager
    def watched(self, key: Hashable) -> Iterator[None]:
        """Note which parameters receive a gradient in a pass of a shape."""
        known = self._live.get(key, frozenset())
        found = set(known)

        def note(parameter: Tensor) -> None:
            found.add(id(parameter))

        handles = [
            p.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            for p in self.all_trainable()
            if id(p) not in known
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            now = frozenset(found)
            self._live.pop(key, None)
            self._live[key] = self._sets.setdefault(now, now)
            while len(self._live) > SHAPES_REMEMBERED:
                # The shape that was not watched for longest; it is watched again before its capture.
                del self._live[next(iter(self._live))]

    def forget(self) -> None:
        """Forget which parameters receive gradients, after a change of what trains."""
        self._live.clear()
        self._sets.clear()

    def forget_tensors(self) -> None:
        """Forget the shared gradient tensors: the next capture takes what is in ``p.grad``."""
        self._static.clear()

    def gradients(self) -> Gradients:
        """Return each trainable parameter with its present gradient."""
        return [(p, p.grad) for p in self.all_trainable()]

    def without(self, reached: Sequence[tuple[nn.Parameter, Tensor]]) -> Gradients:
        """Return the other trainable parameters with their present gradients."""
        taken = {id(parameter) for parameter, _ in reached}
        return [(p, g) for p, g in self.gradients() if id(p) not in taken]

    @staticmethod
    def restore(gradients: Gradients) -> None:
        """Attach gradients again as they were."""
        for parameter, gradient in gradients:
            parameter.grad = gradient


def is_part(tensor: Tensor) -> bool:
    """Whether a tensor is a view into a larger buffer."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


@dataclass(kw_only=True)
class GraphEntry:
    """A recording with everything that must stay alive and in place for its replays.

    Attributes:
        unreached: Trainable parameters without a gradient of this recording, with what stood in their
            ``p.grad`` at the capture: gradients that passes of other shapes left there.
        reads_unreached: Whether the recording reads or clears those gradients too.
    """

    batch: Batch
    weighting: Weighting
    buffers: Mapping[tuple[str | int, ...], Tensor]
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    unreached: Gradients = field(default_factory=list)
    reads_unreached: bool = False
    input_bytes: int = 0
    stepped: bool = False
    overwrites: bool = False
    keep: object = None
    replays: int = 0
    adopted: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    pointers: PointerSnapshot = field(init=False)
    hyper: tuple[object, ...] = field(init=False)
    recording: Recorded = field(init=False)

    @classmethod
    def prepare(
        cls,
        signature: BatchSignature,
        batch: Batch,
        weighting: Weighting,
        device: torch.device,
        *,
        guarded: bool = True,
    ) -> GraphEntry:
        """Allocate the static inputs; ``guarded`` as in :func:`~loongforge_fuse.graphs.key.static_copy`."""
        buffers = {
            path: torch.empty(t.shape, dtype=t.dtype, device=t.device if t.is_cuda else device)
            for path, t in signature.tensors.items()
        }
        weights = None if weighting.weights is None else torch.empty_like(weighting.weights, device=device)
        return cls(
            batch=static_copy(batch, buffers, guarded=guarded),
            weighting=replace(weighting, weights=weights),
            buffers=buffers,
        )

    def fill(self, signature: BatchSignature, weighting: Weighting) -> None:
        """Copy the inputs of this pass into the static buffers; nothing waits for the device."""
        targets = list(self.buffers.values())
        sources = list(signature.tensors.values())
        torch._foreach_copy_(targets, sources, non_blocking=True)
        if self.weighting.weights is not None and weighting.weights is not None:
            self.weighting.weights.copy_(weighting.weights, non_blocking=True)

    def attach(self, *, zero: bool) -> int:
        """Make ``p.grad`` the recording's gradients; return how many values were adopted from other tensors.

        Args:
            zero: What is in ``p.grad`` counts: a dropped gradient starts from zero, and one that an eager
                pass left in another tensor is copied over.
        """
        if self.overwrites:
            # A recording runs no Python: nothing else would drop what other shapes left behind.
            for parameter, _ in self.unreached:
                parameter.grad = None
        missing: list[Tensor] = []
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for parameter, gradient in self.gradients:
            present = parameter.grad
            if present is gradient:
                continue
            if zero and present is None:
                missing.append(gradient)
            elif zero and present is not None:
                sources.append(present)
                targets.append(gradient)
                self.adopted[id(parameter)] = weakref.ref(present)
            parameter.grad = gradient
        with torch.no_grad():
            if missing:
                torch._foreach_zero_(missing)
            if targets:
                torch._foreach_copy_(targets, sources)
        return len(targets)

    def gradients_moved(self, owned: frozenset[int], *, parts: bool) -> str | None:
        """Whether somebody keeps other tensors in ``p.grad``, which an adding recording never reaches.

        Those of unreached parameters count where the recording holds their addresses. A part of a larger
        buffer is somebody's, and so is a tensor that comes back after it was replaced.

        Args:
            owned: Ids of gradient tensors of other recordings, which are nobody else's.
            parts: Whether parts of larger buffers count.
        """
        if self.overwrites:
            return None
        for parameter, gradient in self.gradients:
            present = parameter.grad
            if present is None or present is gradient or id(present) in owned:
                continue
            known = self.adopted.get(id(parameter))
            back = known is not None and known() is present
            if (parts and is_part(present)) or back or not _alike(present, gradient):
                return "gradients"
        if self.reads_unreached and any(p.grad is not g for p, g in self.unreached):
            return "unreached_gradients"
        return None

    def finish(self, recording: Recorded, pointers: PointerSnapshot, hyper: tuple[object, ...]) -> None:
        """Take over what the capture made."""
        self.recording = recording
        self.pointers = pointers
        self.hyper = hyper
        inputs: Sequence[Tensor] = list(self.buffers.values())
        self.input_bytes = sum(t.numel() * t.element_size() for t in inputs)

    def release(self) -> None:
        """Give up the recording."""
        self.recording.release()
        self.gradients, self.unreached = [], []
