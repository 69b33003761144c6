"""AdamW for all parameters in three launches, with gradient scaling, clipping and the non-finite check
inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from loongforge_fuse.kernels.launcher import KernelUnavailableError
from loongforge_fuse.ops._common import CODES, fell_back, kernel
from loongforge_fuse.ops.adamw_reference import reference_update
from loongforge_fuse.ops.adamw_state import check_group, check_parameter, largest_step, restore_values
from loongforge_fuse.ops.adamw_tables import (
    Slot,
    Tables,
    Uploader,
    address_key,
    build_tables,
    check_layouts,
    prepare_spec,
)


class FusedAdamW(torch.optim.Optimizer):
    """AdamW with the semantics of ``torch.optim.AdamW`` in three kernel launches for any number of
    parameters.

    One step counter serves all parameters, so a parameter that gets its first gradient late is corrected
    for the steps it missed too. Gradients are read, never written: scaling and clipping happen on the fly.

    In a CUDA graph, `step` may be captured after one eager step; gradients must stay at the addresses they
    have in the capture, and this optimizer must outlive the graph. Learning rates are read from the device:
    call `refresh` before a replay when a number changed, or make ``group["lr"]`` a tensor.

    Args:
        params: parameters or groups, as for any optimizer; on one device.
        lr: learning rate, number or float32 tensor.
        betas: decay rates of the two moments, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        max_grad_norm: global norm to clip to; None: no clipping.
        master_weights: keep float32 masters of half parameters; the update writes both in the same pass.
        state_dtype: type of the moments: torch.float32, torch.bfloat16, or None for the parameter's.

    Raises:
        ValueError: a hyperparameter is out of range.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, object]],
        *,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
        state_dtype: torch.dtype | None = None,
    ) -> None:
        if max_grad_norm is not None and max_grad_norm <= 0:
            message = f"max_grad_norm must be positive or None for no clipping, got {max_grad_norm}"
            raise ValueError(message)
        if state_dtype not in (None, torch.float32, torch.bfloat16, torch.float64):
            message = f"state_dtype must be torch.float32, torch.bfloat16 or None, got {state_dtype}"
            raise ValueError(message)
        self.max_grad_norm = max_grad_norm
        self.master_weights = master_weights
        self.state_dtype = state_dtype
        self._forget()
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    def _forget(self) -> None:
        """Start without tables on the device; state and settings stay."""
        self.grad_norm: Tensor | None = None
        self._tables: Tables | None = None
        self._uploader = Uploader()
        self._on_device: tuple[Tensor, Tensor] | None = None
        self._sent: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
        self._step: Tensor | None = None
        self._loaded: set[Tensor] = set()
        """Parameters whose loaded masters were not yet compared with them."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for any optimizer; its betas and eps must be those of the others."""
        check_group({**self.defaults, **param_group}, self.param_groups)
        super().add_param_group(param_group)
        # There is one rate and one decay a group on the device.
        self._on_device, self._sent = None, ((), ())

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: tables of addresses are its own."""
        settings = {name: getattr(self, name) for name in ("max_grad_norm", "master_weights", "state_dtype")}
        return {**super().__getstate__(), **settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state; a copy starts without tables."""
        super().__setstate__(state)
        if "_tables" not in self.__dict__:
            self._forget()

    def _slots(self) -> list[Slot]:
        """Return the parameters that have a gradient, with their state, which is made at first sight."""
        slots = []
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "exp_avg" not in state:
                    self._new_state(param, state)
                elif self._loaded and param in self._loaded:
                    self._loaded.discard(param)
                    self._agree(param, state)
                slots.append(
                    Slot(
                        param, param.grad, state["exp_avg"], state["exp_avg_sq"], state.get("master"), number
                    )
                )
        return slots

    @staticmethod
    def _agree(param: Tensor, state: dict[str, Tensor]) -> None:
        """Take the parameter where a loaded master is of other weights: another optimizer trained them on."""
        master = state["master"]
        master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))

    def _new_state(self, param: Tensor, state: dict[str, Tensor]) -> None:
        check_parameter(param)
        kind = self.state_dtype or param.dtype
        state["exp_avg"] = torch.zeros_like(param, dtype=kind, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, dtype=kind, memory_format=torch.preserve_format)
        if self.master_weights and param.dtype in (torch.bfloat16, torch.float16):
            state["master"] = param.detach().to(torch.float32)
        state["step"] = self._shared_step(param.device)

    def _shared_step(self, device: torch.device) -> Tensor:
        if self._step is None:
            self._step = largest_step(list(self.state.values()), device)
            for state in self.state.values():
                if "step" in state:
                    state["step"] = self._step
        return self._step

    def state_dict(self) -> dict[str, Any]:
        """Return the state; every parameter has a step count of its own in it, as other optimizers expect.

        They add to each of them, and a count that all share would be added to by all.
        """
        found = super().state_dict()
        state = {
            key: {**values, "step": values["step"].clone()} if "step" in values else values
            for key, values in found["state"].items()
        }
        return {**found, "state": state}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Load a state; one of ``torch.optim.AdamW`` fits too, its largest step count is taken for all.

        A master of other weights than the parameter has in the next step gives way to the parameter.

        Raises:
            ValueError: A group asks for what this optimizer does not have (``amsgrad``, ``maximize``, betas
                or eps of its own); nothing is loaded then.
        """
        final: list[dict[str, Any]] = []

        def check(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            for group in loaded["param_groups"]:
                check_group(group, loaded["param_groups"])
            final.append(loaded)

        # Hooks may change what is loaded; this one is the last of them.
        last = self.register_load_state_dict_pre_hook(check)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        self._tables, self._step, self._sent = None, None, ((), ())
        restore_values(
            final[0], self.param_groups, self.state, kind=self.state_dtype, masters=self.master_weights
        )
        self._loaded = {param for param, state in self.state.items() if "master" in state}
        if self.state:
            # Made now: inside a graph capture every replay would copy the loaded count again.
            self._shared_step(self.param_groups[0]["params"][0].device)

    def refresh(self) -> None:
        """Send learning rates and weight decays to the device if they changed since the last time."""
        device = self.param_groups[0]["params"][0].device
        rates = tuple(math.nan if isinstance(g["lr"], Tensor) else float(g["lr"]) for g in self.param_groups)
        decays = tuple(float(g["weight_decay"]) for g in self.param_groups)
        on_device = self._hyperparameters(device)
        if repr(self._sent) != repr((rates, decays)):
            # A few bytes of ordinary memory: the driver has them before it returns, and waits for nothing. A
            # schedule changes them every step, and a blocking copy would wait for the whole step before.
            on_device[0].copy_(torch.tensor(rates), non_blocking=True)
            on_device[1].copy_(torch.tensor(decays), non_blocking=True)
            self._sent = (rates, decays)
        for i, group in enumerate(self.param_groups):
            if isinstance(group["lr"], Tensor):
                on_device[0][i].copy_(group["lr"], non_blocking=True)

    def _hyperparameters(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return learning rate and weight decay of every group, on the device."""
        if self._on_device is None:
            count = len(self.param_groups)
            self._on_device = torch.empty(count, device=device), torch.empty(count, device=device)
        return self._on_device

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Tensor] | None = None,
        *,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> Tensor | None:
        """Update all parameters that have a gradient.

        Args:
            closure: recomputes the loss, as for any optimizer.
            grad_scale: float32 tensor; gradients are divided by it.
            found_inf: float32 tensor; the step is skipped, on the device, when it is not 0.

        Returns:
            What the closure returned. The unscaled norm before clipping is left in `grad_norm` (a tensor).
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        slots = self._slots()
        if slots:
            self._update(slots, grad_scale, found_inf)
        return loss

    def _update(self, slots: list[Slot], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        device = slots[0].param.device
        step = self._shared_step(device)
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not capturing or any(isinstance(g["lr"], Tensor) for g in self.param_groups):
            self.refresh()
        reason = self._refusal(slots)
        if reason is None:
            try:
                self._update_cuda(slots, step, device, grad_scale, found_inf)
            except KernelUnavailableError as error:
                reason = str(error)
        if reason is not None:
            if device.type == "cuda":
                fell_back("adamw", reason)
            self.grad_norm = reference_update(
                slots,
                step=step,
                groups=self.param_groups,
                grad_scale=grad_scale,
                found_inf=found_inf,
                max_norm=self.max_grad_norm,
            )

    def _refusal(self, slots: list[Slot]) -> str | None:
        for slot in slots:
            if not slot.param.is_cuda:
                return "not on a GPU"
            if slot.param.dtype not in CODES or slot.exp_avg.dtype not in CODES:
                return f"dtype {slot.param.dtype}"
            dense = slot.param.is_contiguous() and slot.grad.is_contiguous()
            if not dense and slot.param.stride() != slot.grad.stride():
                return "gradient and parameter have different strides"
        return None

    def _update_cuda(
        self,
        slots: list[Slot],
        step: Tensor,
        device: torch.device,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        key = tuple(starmap(address_key, slots))
        if self._tables is None or self._tables.key != key:
            check_layouts(slots)
            self._tables = build_tables(slots, key, device, self._uploader)
        tables = self._tables
        index = device.index if device.index is not None else torch.cuda.current_device()
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        for part in tables.launches:
            at = (part.tensors.data_ptr(), part.chunks.data_ptr())
            where = tables.partial.data_ptr() + 4 * part.first_partial
            part.norm.run(part.blocks, 1, (*at, where))
        logs = [math.log(b) if b > 0 else -100.0 for b in (beta1, beta2)]
        arguments = (
            tables.partial.data_ptr(),
            sum(part.blocks for part in tables.launches),
            step.data_ptr(),
            0 if grad_scale is None else grad_scale.data_ptr(),
            0 if found_inf is None else found_inf.data_ptr(),
            tables.scalars.data_ptr(),
            tables.norm.data_ptr(),
            (grad_scale is not None) + 2 * (found_inf is not None),
            *logs,
            self.max_grad_norm or 0.0,
        )
        kernel(prepare_spec(), index).run(1, 1, arguments)
        numbers = (group["eps"], beta1, beta2, 1.0 - beta1, 1.0 - beta2)
        rates, decays = self._hyperparameters(device)
        common = (tables.scalars.data_ptr(), rates.data_ptr(), decays.data_ptr())
        for part in tables.launches:
            at = (part.tensors.data_ptr(), part.chunks.data_ptr())
            part.update.run(part.blocks, 1, (*at, *common, *numbers))
        self.grad_norm = tables.norm
