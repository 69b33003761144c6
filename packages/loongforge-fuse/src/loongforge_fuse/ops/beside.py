"""Weight gradients on a stream of their own, beside the backward pass, which goes on without them.

The chain of a backward pass is the gradients of inputs: each layer waits for the one above. Nobody waits for
the gradients of weights before the optimizer does. With few rows neither product fills the device, and small
kernels leave most of it idle; the products for the weights fill what the chain leaves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Final

import torch
from torch import Tensor, nn

Products = Callable[[], Sequence[Tensor]]

_GRADIENT_HOOKS = ("_post_accumulate_grad_hooks", "_backward_hooks")
# Passes of several threads end in any order: each takes itself out again, and no one else.
_collecting: Final[dict[torch.device, tuple[WeightGradients, ...]]] = {}
_changing = Lock()


class WeightGradients:
    """Collects the weight gradients of backward passes and adds them to ``p.grad`` when a pass is over.

    Only layers that ask :func:`collector` take part, and only for parameters without gradient hooks: those
    would run late. Values are those of the pass without this: the same products, on another stream.

    Args:
        device: Where the passes run. On CUDA the products have a stream of their own, elsewhere they run at
            once and only their hand-over is late.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = _indexed(device)
        self._stream: torch.cuda.Stream | None = None
        self._owned: frozenset[int] = frozenset()
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        # Held until the pass is over: autograd adds in place to a gradient that nobody else holds, and memory
        # that is given back is written again, while the products still read.
        self._read: list[Tensor] = []
        self.taken = 0
        """Gradients that were made beside a pass, since this was made; replays of graphs do not count."""
        self.in_line: Counter[str] = Counter()
        """Gradients that were made in their place, by reason: ``hooks`` or ``other_model``.

        The latter counts layers under checkpointing or offloading too, which give back other tensors.
        """

    @contextmanager
    def collecting(self, model: nn.Module) -> Iterator[None]:
        """Take the weight gradients of a model's layers in this block; at its end they are in ``p.grad``.

        When it ends, the current stream waits for them; the host does not. After an error nothing is added.
        Passes of other models may run in other threads meanwhile.

        Raises:
            RuntimeError: This object is collecting already.
        """
        if self in _collecting.get(self._device, ()):
            message = "already collecting; make one WeightGradients for each pass that runs at the same time"
            raise RuntimeError(message)
        self._owned = frozenset(id(p) for p in model.parameters() if p.requires_grad)
        if self._device.type == "cuda" and self._stream is None:
            self._stream = _ready_stream(self._device)
        with _changing:
            _collecting[self._device] = (self, *_collecting.get(self._device, ()))
        try:
            yield
            self._join()
            self._hand_over()
        except BaseException:
            with suppress(RuntimeError):
                self._join()
            raise
        finally:
            self._made.clear()
            self._read.clear()
            with _changing:
                others = tuple(one for one in _collecting[self._device] if one is not self)
                if others:
                    _collecting[self._device] = others
                else:
                    del _collecting[self._device]

    def reason(self, parameters: Sequence[Tensor]) -> str | None:
        """Return why gradients of these tensors cannot be late; None: trained weights here, without hooks."""
        if any(id(p) not in self._owned for p in parameters):
            return "other_model"
        hooked = any(getattr(p, name, None) for p in parameters for name in _GRADIENT_HOOKS)
        return "hooks" if hooked else None

    def add(self, parameters: Sequence[Tensor], products: Products, *, reads: Sequence[Tensor]) -> None:
        """Run ``products`` behind what the current stream holds; they return a gradient for each parameter.

        Args:
            parameters: Those for which :meth:`reason` is None.
            products: The work; it runs at once on the host.
            reads: What it reads, beside weights; kept until it is done.
        """
        self.taken += len(parameters)
        if self._stream is None:
            self._keep(parameters, products())
            return
        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())
        with torch.cuda.stream(self._stream):
            self._keep(parameters, products())
        self._read.extend(reads)

    def _keep(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            earlier = self._made.get(id(parameter))
            # A weight that is used twice: both on this stream, so they can be added here.
            total = gradient if earlier is None else earlier[1] + gradient
            self._made[id(parameter)] = (parameter, total)

    def _join(self) -> None:
        if self._stream is not None and self._made:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _hand_over(self) -> None:
        present: list[Tensor] = []
        added: list[Tensor] = []
        for parameter, gradient in self._made.values():
            if self._stream is not None:
                # Made in memory of another stream, and from now on used on this one.
                gradient.record_stream(torch.cuda.current_stream(self._device))
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                present.append(parameter.grad)
                added.append(gradient)
        if present:
            with torch.no_grad():
                torch._foreach_add_(present, added)


def _indexed(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _ready_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream on which a backward pass has run a product.

    The library's workspace belongs to thread and stream; made inside a capture it would hold on to the memory
    of that graph.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    if not torch.cuda.is_current_stream_capturing():
        with torch.cuda.stream(stream), torch.enable_grad():
            x = torch.zeros(16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
            torch.autograd.grad((x @ x.detach()).sum(), x)
    return stream


def collector(device: torch.device, parameters: Sequence[Tensor]) -> WeightGradients | None:
    """Return what takes the gradients of these parameters in the present backward pass, or None."""
    reasons: list[tuple[WeightGradients, str]] = []
    for one in _collecting.get(_indexed(device), ()):
        reason = one.reason(parameters)
        if reason is None:
            return one
        reasons.append((one, reason))
    for one, reason in reasons:
        one.in_line[reason] += len(parameters)
    return None
