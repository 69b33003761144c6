"""The work of one pass: clear, forward, weigh, backward, finite flag, clip, optimizer; eager or recorded."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loongforge_fuse.fusion.execute import (
    Backward,
    StepResult,
    Weighting,
    checked_forward,
    per_micro_batch,
    weighted_total,
)
from loongforge_fuse.graphs.backend import Outputs, Pass
from loongforge_fuse.graphs.config import GraphConfig
from loongforge_fuse.graphs.optimizer import OptimizerInGraph
from loongforge_fuse.ops.beside import WeightGradients
from loongforge_fuse.protocol import Batch


def numeric_modes(device_type: str) -> tuple[Hashable, ...]:
    """Return the process-wide settings that choose other kernels: autocast, matmul precision, determinism."""
    enabled = torch.is_autocast_enabled(device_type)
    return (
        torch.get_autocast_dtype(device_type) if enabled else None,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


class StepPass:
    """Builds the passes that a runner executes or records.

    Args:
        model: The model.
        config: The runner's settings.
        optimizer: Stepped in the last pass of a window, or None.
        scaler: Loss scaler, or None.
        device: Where the scalars live.
    """

    def __init__(
        self,
        model: nn.Module,
        config: GraphConfig,
        *,
        optimizer: torch.optim.Optimizer | None,
        scaler: torch.amp.GradScaler | None,
        device: torch.device,
    ) -> None:
        self._model = model
        self._config = config
        self._scaler = scaler
        self._device = device
        self._late = WeightGradients(device) if config.weight_gradients == "beside" else None
        if self._late is not None and any(isinstance(m, DistributedDataParallel) for m in model.modules()):
            message = (
                "weight_gradients='beside' hands gradients over without the hooks by which "
                "DistributedDataParallel sends them; use 'in_line', or reduce gradients after the replay"
            )
            raise ValueError(message)
        self._scale = torch.ones((), device=device) if scaler is not None else None
        self._optimizer = (
            OptimizerInGraph(optimizer, max_norm=config.max_norm, device=device)
            if optimizer is not None
            else None
        )

    @property
    def clears(self) -> bool:
        """Whether the first pass of a window clears the gradients itself."""
        return self._config.zero_in_graph or self._config.gradients == "overwrite"

    def overwrites(self, *, first: bool, last: bool) -> bool:
        """Whether such a pass writes fresh gradient tensors instead of adding to those that are there."""
        return self._config.gradients == "overwrite" and first and last

    def reads_gradients(self, *, first: bool, last: bool) -> bool:
        """Whether such a pass reads or clears all gradients there are, not only those that it makes."""
        return self.steps(last=last) or (first and self.clears) or self._config.check_finite == "gradients"

    def steps(self, *, last: bool) -> bool:
        """Whether such a pass contains the optimizer's step."""
        return last and self._optimizer is not None

    def bind(
        self,
        batch: Batch,
        weighting: Weighting,
        *,
        first: bool,
        last: bool,
        backward: Backward | None = None,
        static: bool = False,
        with_optimizer: bool = True,
    ) -> Pass:
        """Return the pass over ``batch`` as a function without arguments.

        Its outputs are one float32 vector: total, finite flag (1 or 0), then sums and counts per micro-batch.
        """

        def work() -> Outputs:
            self._clear(first=first, last=last)
            with self._autocast(static=static):
                losses = checked_forward(self._model, batch, weighting)
                total = weighted_total(losses, weighting)
            if backward is not None:
                backward(total)
            else:
                scaled = total if self._scale is None else total * self._scale.to(total.dtype)
                with self._collecting():
                    scaled.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                finite = self._finite(total)
                if last and with_optimizer and self._optimizer is not None:
                    finite = self._optimizer.step(finite)
                sums = per_micro_batch(losses.sums.detach().float(), weighting.sizes)
                counts = per_micro_batch(losses.counts, weighting.sizes)
                head = torch.stack([total.detach().float(), finite.float()])
                return (torch.cat([head, sums, counts]),)

        return work

    @property
    def splits(self) -> bool:
        """Whether the optimizer keeps a table of addresses, which must not be made inside a capture."""
        return self._optimizer is not None and self._optimizer.own_clip

    def hooked(self) -> bool:
        """Whether the optimizer has hooks around its steps."""
        return self._optimizer is not None and self._optimizer.hooked()

    def prime(self) -> None:
        """Make the optimizer's tables for the gradients that are attached now, without a step."""
        if self._optimizer is not None:
            with torch.no_grad():
                self._optimizer.step(torch.zeros((), dtype=torch.bool, device=self._device))

    def tail(self, outputs: Outputs) -> Pass:
        """Return the pass that steps after one whose outputs are given, and completes their finite flag."""

        def work() -> Outputs:
            vector = outputs[0]
            if self._optimizer is not None:
                with torch.no_grad():
                    finite = self._optimizer.step(vector[1] > 0)
                    vector[1].copy_(finite)
            return (vector[1].clone(),)

        return work

    def result(
        self, outputs: Outputs, weighting: Weighting, *, graph: bool, reason: str | None, stepped: bool
    ) -> StepResult:
        """Take the output vector apart."""
        vector, groups = outputs[0], len(weighting.sizes)
        return StepResult(
            total=vector[0],
            finite=vector[1] if self._config.check_finite != "off" else None,
            sums=vector[2 : 2 + groups],
            counts=vector[2 + groups :],
            graph=graph,
            reason=reason,
            stepped=stepped,
        )

    def _clear(self, *, first: bool, last: bool) -> None:
        if not (first and self.clears):
            return
        for parameter in self._model.parameters():
            if not parameter.requires_grad and parameter.grad is not None:
                # Frozen since: with what it last received an optimizer would move it in every step.
                parameter.grad = None
        if self.overwrites(first=first, last=last):
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    parameter.grad = None
            return
        present = [p.grad for p in self._model.parameters() if p.requires_grad and p.grad is not None]
        if present:
            torch._foreach_zero_(present)

    @property
    def late(self) -> tuple[int, dict[str, int]]:
        """Weight gradients made beside a pass, and those made in their place by reason."""
        return (0, {}) if self._late is None else (self._late.taken, dict(self._late.in_line))

    def _collecting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._late is None else self._late.collecting(self._model)

    def _autocast(self, *, static: bool) -> AbstractContextManager[object]:
        """Autocast as around the call, but without its weight cache in a recording.

        A cached low-precision copy would be baked in and never see an optimizer step.
        """
        kind = self._device.type
        if not static or not torch.is_autocast_enabled(kind):
            return nullcontext()
        return torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False)

    def _finite(self, total: Tensor) -> Tensor:
        """Return the flag as a device scalar."""
        finite = torch.isfinite(total.detach())
        if self._config.check_finite == "gradients":
            gradients = [p.grad for p in self._model.parameters() if p.requires_grad and p.grad is not None]
            if gradients:
                norms = torch._foreach_norm(gradients, float("inf"))  # noqa: SLF001 - no public twin
                finite = finite & torch.isfinite(torch.stack([n.float() for n in norms])).all()
        return finite

    def hyper(self) -> tuple[object, ...]:
        """Return the host values that a recording bakes in."""
        return () if self._optimizer is None else self._optimizer.hyper()

    def keep(self) -> object:
        """Return what a recording reads beyond tensors it was given."""
        return None if self._optimizer is None else self._optimizer.keep()

    def hyper_changed(self, old: tuple[object, ...]) -> str | None:
        """Return ``optimizer`` when baked-in values changed, ``optimizer_state`` when its tensors did."""
        now = self.hyper()
        if now == old:
            return None
        return "optimizer" if now[1:] == old[1:] else "optimizer_state"

    def refresh(self) -> None:
        """Refresh the device scalars that a recording reads."""
        if self._optimizer is not None:
            self._optimizer.refresh()
        if self._scaler is not None and self._scale is not None:
            # scale() of a one fills the scaler's lazily made tensor without waiting for the device.
            self._scale.copy_(self._scaler.scale(torch.ones((), device=self._device)))
