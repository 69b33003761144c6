"""What a gradient is to the planner: name, layout, size and the moment it becomes ready."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from loongforge_comm.errors import CompiledModelError
from loongforge_comm.internals import original_module

SPARSE_MODULES = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True, kw_only=True)
class GradientSpec:
    """One gradient tensor of the plan.

    Attributes:
        name: fully qualified parameter name; a tied parameter appears once, under its first name.
        shape: sizes of the parameter.
        stride: strides of the parameter when it is dense and non-overlapping, else row-major strides.
        dtype: torch dtype without the prefix, for example ``float32``.
        device: device type; the index differs between ranks and is left out.
        ready_ms: milliseconds after the start of backward at which the gradient is complete.
        sparse: the gradient is a sparse tensor and takes its own path.
        group: configured group label, ``None`` to group by load.
        strategy: configured strategy, ``None`` to choose by predicted time.
        fires: how often the accumulation hook fires in one backward (2 under reentrant checkpoints).
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    ready_ms: float = 0.0
    sparse: bool = False
    group: str | None = None
    strategy: str | None = None
    fires: int = 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return dtype_of(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense gradient."""
        return self.numel * self.torch_dtype.itemsize


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype called ``name``; ValueError for anything else."""
    value = getattr(torch, name, None)
    if value is None or not isinstance(value, torch.dtype):
        msg = f"dtype is {name!r}, allowed are names of torch dtypes such as 'float32' or 'bfloat16'"
        raise ValueError(msg)
    return value


def refuse_compiled(model: nn.Module) -> None:
    """Raise CompiledModelError when ``model`` is the wrapper that ``torch.compile`` returns."""
    inner = original_module(model)
    if inner is not None:
        msg = (
            f"model is a torch.compile wrapper around {type(inner).__name__}; whole-model compilation "
            "delays every gradient to the end of backward. Pass the original module and compile its repeated "
            "blocks instead (for block in model.blocks: block.compile())"
        )
        raise CompiledModelError(msg)


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides a gradient view takes: the tensor's own when they tile its storage, else
    row-major.
    """
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            break
        expected *= size
    else:
        return tuple(tensor.stride())
    row, result = 1, []
    for size in reversed(tensor.shape):
        result.append(row)
        row *= max(size, 1)
    return tuple(reversed(result))


def is_local(name: str, patterns: Collection[str]) -> bool:
    """Whether the parameter stays per rank."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def sparse_parameters(model: nn.Module) -> set[str]:
    """Return names of parameters whose gradients are sparse by the settings of their module."""
    sparse_ids = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, SPARSE_MODULES) and bool(module.sparse)
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in sparse_ids}


def trainable_parameters(model: nn.Module, local: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """Return the parameters that are averaged over ranks, by name, in registration order."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_local(name, local)
    }


def gradient_specs(
    model: nn.Module,
    *,
    ready_ms: Mapping[str, float] | None = None,
    local: Collection[str] = (),
) -> tuple[GradientSpec, ...]:
    """Describe the gradients of ``model`` in the order in which they become ready.

    Args:
        model: the module, not compiled as a whole.
        ready_ms: measured or predicted ready times by parameter name. Without it the reverse of the
            registration order is assumed, spaced by parameter size (0 to 1 ms, shape only).
        local: patterns of parameters that stay per rank.

    Returns:
        Specs sorted by ready time; equal times keep the reverse registration order.
    """
    refuse_compiled(model)
    sparse = sparse_parameters(model)
    parameters = trainable_parameters(model, local)
    specs = [
        GradientSpec(
            name=name,
            shape=tuple(parameter.shape),
            stride=dense_stride(parameter),
            dtype=str(parameter.dtype).removeprefix("torch."),
            device=parameter.device.type,
            sparse=name in sparse,
        )
        for name, parameter in reversed(parameters.items())
    ]
    if ready_ms is None:
        total, seen, times = sum(spec.numel for spec in specs) or 1, 0, {}
        for spec in specs:
            seen += spec.numel
            times[spec.name] = seen / total
        ready_ms = times
    last = max(ready_ms.values(), default=0.0)
    return order_by_ready(replace(spec, ready_ms=float(ready_ms.get(spec.name, last))) for spec in specs)


def order_by_ready(specs: Iterable[GradientSpec]) -> tuple[GradientSpec, ...]:
    """Sort stably by ready time."""
    return tuple(sorted(specs, key=lambda spec: spec.ready_ms))
