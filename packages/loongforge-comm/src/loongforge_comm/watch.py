"""Hooks on the model: backward begins, a gradient is ready, parameters were frozen, buffers need syncing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from loongforge_comm.agreement import Agreement
from loongforge_comm.config import SchedulerConfig
from loongforge_comm.gradients import trainable_parameters
from loongforge_comm.internals import accumulates, current_backward
from loongforge_comm.reducer import Reducer

_trainable = attrgetter("requires_grad")


class Gate:
    """Where the hooks of all parameters lead at the moment: the one thing they ask.

    Attributes:
        fired: called with the name of each accumulated gradient; ``None`` inside ``no_sync``.
    """

    __slots__ = ("fired",)

    def __init__(self, fired: Callable[[str], None] | None) -> None:
        self.fired = fired


class ModelWatch:
    """Installs and removes the hooks of one scheduler.

    Attributes:
        hooked: parameters with a hook, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        config: SchedulerConfig,
        agreement: Agreement,
        *,
        reducer: Callable[[], Reducer],
        current: Callable[[], Reducer | None],
        parameters_changed: Callable[[], None],
        sync_buffers: Callable[[], None],
    ) -> None:
        """Install the hooks.

        Args:
            model: the module.
            config: settings.
            agreement: exchanges with the other ranks.
            reducer: gives the current reducer, making it if need be.
            current: gives the current reducer, ``None`` when there is none yet.
            parameters_changed: called on all ranks when the agreed set of trainable parameters has changed.
            sync_buffers: called before each synchronised forward when the settings want it.
        """
        self._model = model
        self._config = config
        self._agreement = agreement
        self._reducer = reducer
        self._current = current
        self._parameters_changed = parameters_changed
        self._sync_buffers = sync_buffers
        self._all = [p for _, p in model.named_parameters()]
        self._flags = self._trainable()
        self._forward_synced = True
        self._sync = True
        self._gate = Gate(self._first_fired)
        self.hooked: dict[str, nn.Parameter] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hook_parameters()
        self._handles.append(model.register_forward_pre_hook(self._before))
        self._handles.append(model.register_forward_hook(self._after))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Backward inside sends nothing."""
        before, self._sync = self._sync, False
        self.aim()
        try:
            yield
        finally:
            self._sync = before
            self.aim()

    def aim(self) -> None:
        """Lead the hooks to the current reducer, or nowhere; called whenever either changes."""
        reducer = self._current()
        fired = reducer.fired if reducer is not None else self._first_fired
        self._gate.fired = fired if self._sync else None

    def _first_fired(self, name: str) -> None:
        """A gradient before there is a reducer: make it (which aims the hooks at it)."""
        self._reducer().fired(name)

    def _trainable(self) -> tuple[bool, ...]:
        return tuple(map(_trainable, self._all))

    def _hook_parameters(self) -> None:
        trainable = trainable_parameters(self._model, self._config.local_parameters)
        fresh = {name: p for name, p in trainable.items() if name not in self.hooked}
        self._handles += install_hooks(fresh, self._gate)
        self.hooked.update(fresh)

    def _before(self, module: nn.Module, args: tuple[object, ...]) -> None:
        if not torch.is_grad_enabled() or current_backward() >= 0:
            return  # evaluation, or recomputation inside backward
        reducer = self._current()
        if reducer is not None and reducer.armed:
            self._recover(reducer)
        flags = self._trainable()
        if flags != self._flags:
            self._agree_on_change(flags)
        if self._config.buffers == "forward" and self._forward_synced:
            self._sync_buffers()
        self._forward_synced = self._sync
        if self._sync:
            self._reducer()

    def _after(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Arm at the first output gradient: it belongs to the outermost backward and marks its start."""
        if not torch.is_grad_enabled() or current_backward() >= 0:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf:
                leaf.register_hook(self._output_gradient)  # type: ignore[no-untyped-call]

    def _output_gradient(self, gradient: Tensor) -> None:
        reducer = self._current()
        if reducer is None or not self._sync or reducer.launched or not self._handles:
            return
        if accumulates(next(p for p in self.hooked.values() if p.requires_grad)):
            reducer.arm(nested=False)

    def _recover(self, reducer: Reducer) -> None:
        """An earlier backward raised before its end."""
        sent = reducer.launched
        reducer.abandon()
        if sent:
            msg = (
                f"the last backward ended with an error after {sent} buckets had been sent; the other ranks "
                "wait for the rest of that step. Restart from a checkpoint, or drop the step on all ranks"
            )
            raise RuntimeError(msg)

    def _agree_on_change(self, flags: tuple[bool, ...]) -> None:
        """Parameters were frozen or unfrozen: all ranks must have done so before the same forward."""
        names = [n for n, p in self._model.named_parameters() if p.requires_grad]
        self._agreement.require_equal(
            "set of trainable parameters", names, "freeze and unfreeze on all ranks before the same step"
        )
        self._flags = flags
        self._hook_parameters()
        self._parameters_changed()

    def close(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def install_hooks(
    parameters: Mapping[str, nn.Parameter], gate: Gate
) -> list[torch.utils.hooks.RemovableHandle]:
    """One post-accumulate hook per parameter that does what ``gate`` says at that time."""
    return [
        p.register_post_accumulate_grad_hook(_hook(name, gate))  # type: ignore[no-untyped-call]
        for name, p in parameters.items()
    ]


def _hook(name: str, gate: Gate) -> Callable[[Tensor], None]:
    """Runs for every gradient of every micro-batch: inside ``no_sync`` it is one attribute test."""

    def hook(parameter: Tensor) -> None:
        fired = gate.fired
        if fired is not None:
            fired(name)

    return hook
