"""Runs the CUDA paths of the operators on CPU tensors: their launches go to the simulator.

So a test on any machine sees what a GPU would: which kernel is chosen, with what grid and arguments, what it
writes, and every access it makes. Slow, for small shapes.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from loongforge_fuse.kernels import launcher
from loongforge_fuse.kernels.simulator.machine import simulate
from loongforge_fuse.kernels.simulator.memory import Memory
from loongforge_fuse.kernels.specs import KernelSpec

_OPERATORS = "loongforge_fuse.ops"
_ORDINARY = (Tensor, torch.nn.Parameter)  # others, such as those of tracing, have no memory of their own


class _Tensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the memory of CPU tensors: of those that took part in an operation since the start, and when that
    is not enough, of all that are alive.

    It keeps that memory until the end, so that no address is used twice.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[torch.UntypedStorage, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in tree_leaves((args, out)):
            if type(item) in _ORDINARY:
                self._note(item)
        return out

    def _note(self, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        try:
            storage = tensor.untyped_storage()
            address = storage.data_ptr() if storage.nbytes() else 0
        except (RuntimeError, NotImplementedError):
            return  # a wrapper of a transform
        if address and address not in self._storages:
            name = f"{tensor.dtype} {tuple(tensor.shape)}".replace("torch.", "")
            self._storages[address] = storage, name

    def memory(self) -> Memory:
        """Return a memory that holds all of them at their own addresses."""
        memory = Memory(self._search)
        self._place(memory, dict(self._storages))
        return memory

    def _search(self, memory: Memory) -> None:
        known = set(self._storages)
        for item in gc.get_objects():
            if type(item) in _ORDINARY:
                self._note(item)
        self._place(memory, {k: v for k, v in self._storages.items() if k not in known})

    @staticmethod
    def _place(memory: Memory, storages: dict[int, tuple[torch.UntypedStorage, str]]) -> None:
        with _disable_current_modes():
            for address, (storage, name) in storages.items():
                memory.place(torch.empty(0, dtype=torch.uint8).set_(storage).numpy(), address, name)


class SimulatedFunction:
    """Stands for a loaded kernel.

    Attributes:
        launches: number of launches.
        label: as of :class:`~loongforge_fuse.kernels.driver.Function`.
    """

    def __init__(self, spec: KernelSpec, tensors: _Tensors, log: list[KernelSpec], seed: int) -> None:
        self.spec, self.label, self.launches = spec, spec.maker, 0
        self._tensors, self._log, self._seed = tensors, log, seed

    def run(self, grid_x: int, grid_y: int, arguments: tuple[int | float, ...]) -> None:
        """Run the kernel at once, on the tensors that are alive."""
        self.launches += 1
        self._log.append(self.spec)
        simulate(self.spec, self._tensors.memory(), (grid_x, grid_y), arguments, seed=self._seed)


@contextmanager
def simulated_gpu(*, processors: int = 2, seed: int = 0) -> Iterator[list[KernelSpec]]:
    """Send operators on CPU tensors through their CUDA paths inside the context.

    Args:
        processors: multiprocessors that grids are sized for; few, so that small inputs walk a grid too.
        seed: order of the threads.

    Yields:
        The launched kernels, in order.
    """
    import loongforge_fuse.ops as ops_package
    from loongforge_fuse.ops import variants

    del ops_package  # imported so that all operators exist
    log: list[KernelSpec] = []
    tensors = _Tensors()
    functions: dict[str, SimulatedFunction] = {}

    def function(spec: KernelSpec, device: int) -> SimulatedFunction:
        return functions.setdefault(spec.name, SimulatedFunction(spec, tensors, log, seed))

    modules = [m for name, m in sys.modules.items() if name.startswith(_OPERATORS)]
    replaced: dict[str, Any] = {
        "plain": lambda *tensors: True,
        "kernel": function,
        "processors": lambda device: processors,
        "capturing": lambda: True,
        "load": lambda name, spec, device: function(spec, device),
    }
    with _many_patches(modules, replaced), patch.object(launcher, "function", function), tensors:
        variants.reload()
        try:
            yield log
        finally:
            variants.reload()


@contextmanager
def _many_patches(modules: list[Any], replaced: dict[str, Any]) -> Iterator[None]:
    """Replace names in modules and empty their tables of loaded kernels, until the end of the context."""
    undo = []
    for module in modules:
        for name, value in list(vars(module).items()):
            fresh: Any
            if name in replaced:
                fresh = replaced[name]
            elif name.endswith("_calls") and isinstance(value, dict):
                value_before = dict(value)
                value.clear()
                undo.append(partial(_refill, value, value_before))
                continue
            else:
                continue
            undo.append(partial(setattr, module, name, value))
            setattr(module, name, fresh)
    try:
        yield
    finally:
        for action in reversed(undo):
            action()


def _refill(table: dict[Any, Any], before: dict[Any, Any]) -> None:
    table.clear()
    table.update(before)
