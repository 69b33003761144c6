"""Runs a model once, on meta tensors if it can, and notes calls, shapes, data flow, work and gradient
order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from loongforge_comm.mdg.graph import TensorInfo

FLOPS_PER_BYTE = 20.0
"""Work of an operation = FLOPs + 20 x bytes touched; between a CPU core (about 5) and an H100 (about 150)."""


@dataclass(kw_only=True)
class Observation:
    """What one forward and backward showed.

    Attributes:
        order: leaf nodes in order of first call.
        types: class name by node.
        inputs: tensors of the first call by node.
        outputs: tensors of the first call by node.
        calls: number of calls by node.
        flops: forward FLOPs by node.
        edges: (source, target) pairs.
        ready: share of backward's work done when each gradient was complete.
        fires: how often each gradient hook fired.
    """

    order: list[str] = field(default_factory=list)
    types: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, tuple[TensorInfo, ...]] = field(default_factory=dict)
    outputs: dict[str, tuple[TensorInfo, ...]] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    edges: set[tuple[str, str]] = field(default_factory=set)
    ready: dict[str, float] = field(default_factory=dict)
    fires: dict[str, int] = field(default_factory=dict)


class _Work(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up FLOPs and bytes of every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.work = 0.0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", None)
        flops = (
            int(flop_registry[packet](*args, **(kwargs or {}), out_val=out)) if packet in flop_registry else 0
        )
        touched = sum(t.numel() * t.element_size() for t in tree_leaves((args, out)) if _dense(t))
        self.flops += flops
        self.work += flops + FLOPS_PER_BYTE * touched
        return out


def _dense(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


class _Flow(TorchFunctionMode):
    """Carries the set of producing nodes through every function between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.origin: dict[int, frozenset[str]] = {}
        self._alive: list[Tensor] = []

    def mark(self, value: object, names: frozenset[str]) -> None:
        """Note who produced the tensors in ``value`` and keep them alive, so that ids stay unique."""
        for leaf in tree_leaves(_plain(value)):
            if isinstance(leaf, Tensor):
                self.origin[id(leaf)] = names
                self._alive.append(leaf)

    def sources(self, value: object) -> frozenset[str]:
        """Producers of all tensors in ``value``."""
        names: set[str] = set()
        for leaf in tree_leaves(_plain(value)):
            if isinstance(leaf, Tensor):
                names |= self.origin.get(id(leaf), frozenset())
        return frozenset(names)

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        names = self.sources((args, kwargs))
        if names:
            self.mark(out, names | self.sources(out))
        return out


def _plain(value: object) -> object:
    """Mappings and dataclass-like outputs of libraries as plain containers."""
    if isinstance(value, Mapping):
        return [_plain(v) for v in value.values()]
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "__dataclass_fields__"):
        return [_plain(getattr(value, name)) for name in value.__dataclass_fields__]
    return value


def is_leaf(module: nn.Module) -> bool:
    """Leaf policy: modules without children, and torch's own layers that use their children's weights
    directly.
    """
    return not any(True for _ in module.children()) or isinstance(module, nn.MultiheadAttention)


def infos(value: object) -> tuple[TensorInfo, ...]:
    """Descriptions of all tensors inside ``value``; meta tensors are described with ``device`` of the
    caller.
    """
    return tuple(
        TensorInfo(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."), device=t.device.type)
        for t in tree_leaves(_plain(value))
        if isinstance(t, Tensor)
    )


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are meta tensors: structure without memory, ties kept."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(
            parameter.detach().to("meta"), requires_grad=parameter.requires_grad
        )
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(model, memo)


def observe(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    meta: bool,
    backward: bool = True,
    names: Mapping[int, str] | None = None,
) -> Observation:
    """Run a copy of ``model`` once.

    Args:
        model: the model; never changed.
        args: example arguments; tensors are moved to meta when ``meta``.
        kwargs: example keyword arguments.
        meta: use meta tensors. Fails for operations without a meta version and for values that decide a path.
        backward: also run backward from the sum of all floating-point outputs.
        names: name of each input by position or key, for the ``input:`` nodes.

    Returns:
        What was seen.
    """
    target = meta_copy(model) if meta else copy.deepcopy(model)
    if meta:
        args = [_to_meta(a) for a in args]
        kwargs = {k: _to_meta(v) for k, v in kwargs.items()}
    target.zero_grad(set_to_none=True)
    seen = Observation()
    flow, work = _Flow(), _Work()
    for position, value in enumerate(args):
        _mark_input(flow, seen, (names or {}).get(position, str(position)), value)
    for key, value in kwargs.items():
        _mark_input(flow, seen, key, value)
    handles = _attach(target, seen, flow, work)
    try:
        with torch.device("meta") if meta else nullcontext(), torch.enable_grad(), work:
            with flow:
                out = target(*args, **kwargs)
            if backward:
                _backward(target, out, seen, work)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _to_meta(value: object) -> object:
    return tree_map(
        lambda t: t.detach().to("meta").requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t, value
    )


def _mark_input(flow: _Flow, seen: Observation, name: str, value: object) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _mark_input(flow, seen, f"{name}.{key}", inner)
        return
    described = infos(value)
    if described:
        node = f"input:{name}"
        seen.order.append(node)
        seen.types[node] = "input"
        seen.outputs[node] = described
        flow.mark(value, frozenset({node}))


def _attach(
    target: nn.Module, seen: Observation, flow: _Flow, work: _Work
) -> list[torch.utils.hooks.RemovableHandle]:
    handles = []
    started: dict[str, list[int]] = {}
    inside: list[str] = []
    for path, module in target.named_modules():
        if not is_leaf(module):
            for name, parameter in module.named_parameters(recurse=False):
                node = f"{path}#{name}"
                flow.mark(parameter, frozenset({node}))
            continue

        def before(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            if inside:
                return
            inside.append(path)
            started.setdefault(path, []).append(work.flops)
            if path not in seen.calls:
                seen.order.append(path)
                seen.types[path] = type(module).__name__
                seen.inputs[path] = infos((args, kwargs))
            seen.calls[path] = seen.calls.get(path, 0) + 1
            seen.edges.update((source, path) for source in flow.sources((args, kwargs)) if source != path)

        def after(module: nn.Module, args: Any, kwargs: Any, out: Any, path: str = path) -> None:
            if inside != [path]:
                return
            inside.clear()
            seen.flops[path] = seen.flops.get(path, 0) + work.flops - started[path].pop()
            seen.outputs.setdefault(path, infos(out))
            flow.mark(out, frozenset({path}))

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    return handles


def _backward(target: nn.Module, out: object, seen: Observation, work: _Work) -> None:
    tensors = [t for t in tree_leaves(_plain(out)) if isinstance(t, Tensor) and t.requires_grad]
    if not tensors:
        return
    loss = sum(t.float().sum() for t in tensors)
    at: dict[str, float] = {}
    start = work.work
    handles = []

    def hook(name: str) -> Callable[[Tensor], None]:
        def fired(_: Tensor) -> None:
            at[name] = work.work - start
            seen.fires[name] = seen.fires.get(name, 0) + 1

        return fired

    for name, parameter in target.named_parameters():
        if parameter.requires_grad:
            handle = parameter.register_post_accumulate_grad_hook(hook(name))  # type: ignore[no-untyped-call]
            handles.append(handle)
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    total = max(work.work - start, 1e-9)
    seen.ready = {name: value / total for name, value in sorted(at.items(), key=lambda item: item[1])}
    for handle in handles:
        handle.remove()
