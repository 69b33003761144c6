"""The optimizer's step beside the next pass's frozen prefix: memory-bound work next to matrix products.

The step of pass ``t`` is run at the start of pass ``t + 1``, on a stream of its own, while the frozen part
of the model already computes; the first trainable module waits for it. The numbers are those of an ordinary
step, only its moment moves: whoever reads weights or optimizer state between two passes calls ``flush``
first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loongforge_fuse.fusion.probe import quiet_eval
from loongforge_fuse.graphs.optimizer import OptimizerInGraph
from loongforge_fuse.protocol import Batch


class LaggedStep:
    """Runs due optimizer steps beside forward passes.

    Args:
        model: The model.
        optimizer: The optimizer; it must skip on the device (FusedAdamW, or a fused torch optimizer).
        device: The model's device.

    Raises:
        ValueError: The optimizer cannot skip a step on the device.
    """

    def __init__(self, model: nn.Module, optimizer: OptimizerInGraph, device: torch.device) -> None:
        if not optimizer.skips:
            message = "overlap_optimizer needs FusedAdamW or a torch optimizer with fused=True"
            raise ValueError(message)
        self._model = model
        self._optimizer = optimizer
        self._due = torch.zeros((), device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._regions: tuple[str, ...] = ()
        self._waited = True
        self._verified = False

    def use_regions(self, names: Sequence[str]) -> None:
        """Tell which modules are compiled: hooks stay at their border."""
        self._regions = tuple(names)

    def advance(self) -> None:
        """Note that a pass begins: its due step uses the learning rates of the pass before."""
        self._optimizer.lag()

    def set_due(self, finite: Tensor) -> None:
        """Make the step due if the pass was finite."""
        self._due.copy_(finite)

    def _run(self) -> None:
        """Apply the due step, on the device's own decision, and clear the gradients."""
        self._optimizer.step(self._due > 0, lagged=True)
        present = [p.grad for p in self._model.parameters() if p.requires_grad and p.grad is not None]
        if present:
            torch._foreach_zero_(present)
        self._due.zero_()

    def flush(self) -> None:
        """Apply a due step now; weights and optimizer state are then those of the passes so far."""
        with torch.no_grad():
            self._optimizer.lag()
            self._run()

    @contextlib.contextmanager
    def beside(self, batch: Batch) -> Iterator[None]:
        """Run the due step beside the forward pass inside the context."""
        self._verify(batch)
        if self._stream is None:
            with torch.no_grad():
                self._run()
            yield
            return
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), torch.no_grad():
            self._run()
        self._waited = False
        handles = [m.register_forward_pre_hook(self._wait) for m in self._entries()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._wait()

    def _wait(self, *_: object) -> None:
        if not self._waited and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._waited = True

    def _entries(self) -> list[nn.Module]:
        """Modules in front of which the step must be done: owners of trainable parameters, regions as one."""
        found = []
        for name, module in self._model.named_modules():
            inside = any(name.startswith(region + ".") for region in self._regions)
            recurse = name in self._regions
            if not inside and any(p.requires_grad for p in module.parameters(recurse=recurse)):
                found.append(module)
        return found

    def _verify(self, batch: Batch) -> None:
        """Refuse a model that reads a trainable parameter before it calls any module that owns one.

        Raises:
            ValueError: Such a read; the step could still be writing the parameter then.
        """
        if self._verified:
            return
        self._verified = True
        names = {p.data_ptr(): n for n, p in self._model.named_parameters() if p.requires_grad}
        watch = _EarlyReads(names, self)
        self._waited = False
        handles = [m.register_forward_pre_hook(self._mark) for m in self._entries()]
        try:
            with quiet_eval(self._model), watch:
                self._model(batch)
        finally:
            self._waited = True
            for handle in handles:
                handle.remove()
        if watch.early:
            message = (
                f"overlap_optimizer: {sorted(watch.early)[:3]} are read before any module that owns "
                "trainable parameters is called; switch overlap_optimizer off"
            )
            raise ValueError(message)

    def _mark(self, *_: object) -> None:
        self._waited = True

    @property
    def waited(self) -> bool:
        """Whether the forward pass has reached a trainable module."""
        return self._waited


class _EarlyReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note trainable parameters that are read before the wait."""

    def __init__(self, names: dict[int, str], step: LaggedStep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._step = names, step
        self.early: set[str] = set()

    def __torch_dispatch__(
        self,
        func: object,
        types: object,
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if not self._step.waited:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and value.data_ptr() in self._names:
                    self.early.add(self._names[value.data_ptr()])
        return func(*args, **(kwargs or {}))  # type: ignore[operator]
