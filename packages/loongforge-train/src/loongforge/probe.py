"""The probe: a step that counts its operators and host syncs, once in many steps.

Counting costs several microseconds an operator, in that step alone. What one tiny operator costs to dispatch
is measured once per process, on the run's own device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SYNCS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
"""Operators whose result the host needs: it waits until the device has computed them."""


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators, and counts and times those that make the host wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = 0
        self.syncs = 0
        self.sync_ms = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count and run one operator."""
        self.operators += 1
        name = func._schema.name  # noqa: SLF001 - the public name of an operator overload
        waits = name in SYNCS or (name == "aten::_to_copy" and _to_host(args, kwargs))
        if not waits:
            return func(*args, **(kwargs or {}))
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.syncs += 1
        self.sync_ms += 1e3 * (time.perf_counter() - began)
        return result


def _to_host(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    source = args[0] if args else None
    target = (kwargs or {}).get("device")
    return (
        isinstance(source, Tensor)
        and source.is_cuda
        and target is not None
        and torch.device(target).type == "cpu"
    )


def operator_cost_us(device: torch.device, *, length: int = 100) -> float:
    """Measure the host's cost of dispatching one tiny operator of a training step, microseconds.

    A chain of tiny operators runs forward and backward; the median of five rounds is divided by the operators
    that the counter sees in one. On CUDA only the enqueuing is timed.
    """
    weight = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        value = weight
        for _ in range(length):
            value = value * 1.0001
        value.sum().backward()  # type: ignore[no-untyped-call]

    with OperatorCounter() as counter:
        chain()
    rounds = []
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        chain()
        rounds.append(time.perf_counter() - began)
    return 1e6 * sorted(rounds)[2] / counter.operators


@contextmanager
def probed(cost_us: float, report: Callable[[Mapping[str, float]], None]) -> Iterator[None]:
    """Count the operators and host syncs of what runs inside, and report them."""
    counter = OperatorCounter()
    with counter:
        yield
    report(
        {
            "ops": counter.operators,
            "sync_count": counter.syncs,
            "sync_ms": counter.sync_ms,
            "op_cost_us": cost_us,
        }
    )
