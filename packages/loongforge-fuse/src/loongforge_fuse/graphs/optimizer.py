"""An optimizer inside a recorded pass: learning rates and scales on the device, no host decision."""

from __future__ import annotations

from itertools import chain
from typing import Protocol, cast

import torch
from torch import Tensor

from loongforge_fuse.tree import addresses


class _OwnClip(Protocol):
    """An optimizer that clips, checks and skips on the device: FusedAdamW."""

    grad_norm: Tensor | None

    def step(self, *, found_inf: Tensor) -> object: ...

    def refresh(self) -> None: ...


def make_capturable(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Switch the capturable mode on and bring step counters to the device, where there are any."""
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    for state in optimizer.state.values():
        step = state.get("step")
        if isinstance(step, Tensor):
            state["step"] = step.to(device)


class OptimizerInGraph:
    """Makes a torch optimizer capturable and steps it with clipping and a finite check on the device.

    Learning rates become device tensors; a scheduler may go on assigning plain numbers, they are copied over
    before the next replay. Other hyper-parameters are baked into a recording, which is made anew when they
    change. With a fused optimizer a step with non-finite gradients is skipped on the device.

    Args:
        optimizer: The optimizer.
        max_norm: Bound of the gradients' global 2-norm, or None.
        device: Where its parameters are.

    Raises:
        ValueError: On a GPU, for an optimizer that has no capturable mode.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, max_norm: float | None, device: torch.device
    ) -> None:
        self._optimizer = optimizer
        self._max_norm = max_norm
        self._device = device
        self._rates: list[Tensor] = []
        # FusedAdamW scales, clips and skips in its own kernels and reads weight decay from the device too.
        self.own_clip = hasattr(optimizer, "max_grad_norm") and hasattr(optimizer, "refresh")
        if self.own_clip and max_norm is not None:
            optimizer.max_grad_norm = max_norm  # type: ignore[attr-defined]
        if device.type != "cuda":
            return
        if not self.own_clip and "capturable" not in optimizer.defaults:
            message = (
                f"{type(optimizer).__name__} has no capturable mode and cannot be part of a CUDA graph; "
                "use FusedAdamW or torch.optim.AdamW(..., fused=True, capturable=True), or step after run()"
            )
            raise ValueError(message)
        make_capturable(optimizer, device)
        self._take_rates()

    @property
    def _fused(self) -> bool:
        return all(bool(group.get("fused")) for group in self._optimizer.param_groups)

    def hooked(self) -> bool:
        """Whether Python code is to run around the optimizer's steps."""
        names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        return any(getattr(self._optimizer, name, None) for name in names)

    def refresh(self) -> None:
        """Copy learning rates that were assigned as numbers (or other tensors) to the device tensors."""
        if self._device.type != "cuda":
            return
        if any(group.get("capturable") is False for group in self._optimizer.param_groups):
            # A loaded state brings the settings it was saved with.
            make_capturable(self._optimizer, self._device)
        self._take_rates()
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if group["lr"] is not rate:
                value = group["lr"]
                if isinstance(value, Tensor):
                    rate.copy_(value, non_blocking=True)
                else:
                    rate.fill_(float(value))
                group["lr"] = rate
        if self.own_clip and not torch.cuda.is_current_stream_capturing():
            cast(_OwnClip, self._optimizer).refresh()

    def _take_rates(self) -> None:
        """Give every group without one (all of them at first) a learning rate on the device."""
        for group in self._optimizer.param_groups[len(self._rates) :]:
            rate = torch.as_tensor(group["lr"], dtype=torch.float32).to(self._device).clone()
            self._rates.append(rate)
            group["lr"] = rate

    def step(self, finite: Tensor) -> Tensor:
        """Clip and step; return the finite flag, joined with that of the gradient norm where one is taken."""
        self.refresh()
        if self.own_clip:
            return self._step_own(finite)
        scale: Tensor | None = None
        if self._max_norm is not None:
            gradients = [
                p.grad for g in self._optimizer.param_groups for p in g["params"] if p.grad is not None
            ]
            norm = torch.nn.utils.get_total_norm(gradients, foreach=True).float()
            finite = finite & torch.isfinite(norm)
            scale = ((norm + 1e-6) / self._max_norm).clamp(min=1.0)
            if not self._fused:
                torch._foreach_div_(gradients, scale)
        if self._fused:
            # The fused kernel divides by the scale and skips the step on found_inf, both read on the device.
            self._optimizer.grad_scale = scale  # type: ignore[attr-defined]
            self._optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        try:
            self._optimizer.step()
        finally:
            if self._fused:
                del self._optimizer.grad_scale, self._optimizer.found_inf  # type: ignore[attr-defined]
        return finite

    def _step_own(self, finite: Tensor) -> Tensor:
        """Step an optimizer that clips and skips by itself."""
        optimizer = cast(_OwnClip, self._optimizer)
        optimizer.step(found_inf=(~finite).float())
        norm = optimizer.grad_norm
        return finite & torch.isfinite(norm) if norm is not None else finite

    def keep(self) -> object:
        """Return what a recording reads and must not be freed: the tables that such an optimizer uploads."""
        return getattr(self._optimizer, "_tables", None)

    def hyper(self) -> tuple[object, ...]:
        """Return the baked-in numbers and the addresses of the state tensors."""
        on_device = {"params", "lr", "initial_lr", *(["weight_decay"] if self.own_clip else [])}
        numbers = tuple(
            (name, value)
            for group in self._optimizer.param_groups
            for name, value in sorted(group.items())
            if name not in on_device and not isinstance(value, Tensor)
        )
        clip = (getattr(self._optimizer, "max_grad_norm", None),)
        state = chain.from_iterable(table.values() for table in self._optimizer.state.values())
        return (str(clip + numbers), addresses([value for value in state if isinstance(value, Tensor)]))
