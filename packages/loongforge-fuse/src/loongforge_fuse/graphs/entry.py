"""One recorded shape: its static buffers, its gradients, and what it was recorded with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from loongforge_fuse.fusion.execute import Weighting
from loongforge_fuse.graphs.backend import Recorded
from loongforge_fuse.graphs.key import BatchSignature, static_copy
from loongforge_fuse.graphs.pointers import PointerSnapshot
from loongforge_fuse.protocol import Batch

Gradients = list[tuple[nn.Parameter, Tensor | None]]


class LiveParameters:
    """Trainable parameters, and which of them receive gradients.

    Giving a zero gradient to a parameter that the loss never reaches would let the optimizer decay it, so
    only parameters that were seen to receive one get a static gradient.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._live: set[int] = set()
        self._static: dict[int, Tensor] = {}

    def all_trainable(self) -> list[nn.Parameter]:
        """Return the trainable parameters in registration order."""
        return [p for p in self._model.parameters() if p.requires_grad]

    def live(self) -> list[nn.Parameter]:
        """Return those that received a gradient in a watched pass."""
        return [p for p in self.all_trainable() if id(p) in self._live]

    def static_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return each live parameter with the gradient tensor that all adding recordings share.

        That is ``p.grad`` where there is one (a communication buffer's view, for example), else the tensor
        used before, else a new one.
        """
        result = []
        for parameter in self.live():
            gradient = parameter.grad if parameter.grad is not None else self._static.get(id(parameter))
            if gradient is None:
                gradient = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            self._static[id(parameter)] = gradient
            result.append((parameter, gradient))
        return result

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note which parameters receive a gradient inside the context."""
        handles = [
            p.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]
            for p in self.all_trainable()
            if id(p) not in self._live
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, parameter: Tensor) -> None:
        self._live.add(id(parameter))

    def gradients(self) -> Gradients:
        """Return each trainable parameter with its present gradient."""
        return [(p, p.grad) for p in self.all_trainable()]

    @staticmethod
    def restore(gradients: Gradients) -> None:
        """Attach gradients again as they were."""
        for parameter, gradient in gradients:
            parameter.grad = gradient


@dataclass(kw_only=True)
class GraphEntry:
    """A recording with everything that must stay alive and in place for its replays."""

    batch: Batch
    weighting: Weighting
    buffers: Mapping[tuple[str | int, ...], Tensor]
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    bytes: int = 0
    stepped: bool = False
    overwrites: bool = False
    keep: object = None
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
    ) -> GraphEntry:
        """Allocate the static inputs."""
        buffers = {
            path: torch.empty(t.shape, dtype=t.dtype, device=t.device if t.is_cuda else device)
            for path, t in signature.tensors.items()
        }
        weights = None if weighting.weights is None else torch.empty_like(weighting.weights, device=device)
        return cls(
            batch=static_copy(batch, buffers),
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

    def attach(self, *, zero: bool) -> None:
        """Make ``p.grad`` the recording's gradients; a gradient that was dropped starts from zero."""
        missing: list[Tensor] = []
        for parameter, gradient in self.gradients:
            if parameter.grad is not gradient:
                if zero and parameter.grad is None:
                    missing.append(gradient)
                parameter.grad = gradient
        if missing:
            torch._foreach_zero_(missing)

    def gradients_moved(self) -> str | None:
        """Whether somebody put other tensors into ``p.grad``, which an adding recording never reaches."""
        if self.overwrites:
            return None
        return "gradients" if any(p.grad is not None and p.grad is not g for p, g in self.gradients) else None

    def finish(self, recording: Recorded, pointers: PointerSnapshot, hyper: tuple[object, ...]) -> None:
        """Take over what the capture made."""
        self.recording = recording
        self.pointers = pointers
        self.hyper = hyper
        inputs: Sequence[Tensor] = list(self.buffers.values())
        self.bytes = recording.bytes + sum(t.numel() * t.element_size() for t in inputs)

    def release(self) -> None:
        """Give up the recording."""
        self.recording.release()
        self.gradients = []
