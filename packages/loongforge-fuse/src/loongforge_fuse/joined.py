"""Linear layers that read the same input, computed as one product.

Queries, keys and values of an attention (or gate and up projection of a gated MLP) are several products of
one input. With few rows each of them fills a part of the GPU only, and in the backward pass their gradients
to the input are added up one by one. Joined, they are one product forward and one backward to the input; the
gradients of the weights stay products of their own, so that they are tensors of their own.

The weights stay parameters of their own under their own names: their data become parts of one buffer, in
which the product reads them all at once. Gradients, optimizers and the state dict see no difference, but
whatever *replaces* a weight's data (casting or moving the model, ``load_state_dict(assign=True)``, sharding)
takes the layer out of the buffer. Such a group is computed layer by layer again, and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional

from loongforge_fuse.ops._common import transforming
from loongforge_fuse.ops.beside import collector
from loongforge_fuse.ops.products import sum_rows, weight_gradient
from loongforge_fuse.protocol import restore_forward

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("to_q", "to_k", "to_v"),
    ("to_k", "to_v"),
    ("gate_proj", "up_proj"),
)
"""Names of children that commonly read the same input, longest groups first."""


_PATIENCE = 3


@dataclass(kw_only=True)
class JoinedLinears:
    """What :func:`join_linears` did.

    Attributes:
        groups: Module name -> names of its joined children.
        left: Module name -> why its children stay apart.
        counters: ``joined`` products run, and ``apart`` calls by reason, outside compiled code.
    """

    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    _members: list[_Group] = field(default_factory=list)

    @property
    def products_saved(self) -> int:
        """Products fewer in one forward pass over all groups."""
        return sum(len(names) - 1 for names in self.groups.values())

    def intact(self) -> bool:
        """Whether every weight still lies in its group's buffer."""
        return all(group.intact() for group in self._members)

    def undo(self) -> None:
        """Put the plain layers back; the weights get memory of their own again."""
        for group in self._members:
            group.undo()
        self._members.clear()
        self.groups.clear()


def join_linears(
    model: nn.Module, siblings: Sequence[tuple[str, ...]] = SIBLINGS, *, frozen_only: bool = False
) -> JoinedLinears:
    """Join sibling linear layers of a model in place.

    Apply it after the model is on its device and in its dtype, and before optimizers, communication buffers
    and graphs take addresses.

    Args:
        model: The model.
        siblings: Groups of child names that read the same input; the first that fits a module is taken.
        frozen_only: Join only groups that do not train. Default False.

    Returns:
        What was joined and what was left, with :meth:`JoinedLinears.undo`.
    """
    report = JoinedLinears()
    for name, module in model.named_modules():
        children = dict(module.named_children())
        for names in siblings:
            if not all(isinstance(children.get(child), nn.Linear) for child in names):
                continue
            layers = [children[child] for child in names]
            problem = _problem([layer for layer in layers if isinstance(layer, nn.Linear)], frozen_only)
            if problem is not None:
                report.left.setdefault(name, problem)
                continue
            report.left.pop(name, None)
            group = _Group([layer for layer in layers if isinstance(layer, nn.Linear)], report.counters)
            report.groups[name] = names
            report._members.append(group)  # noqa: SLF001 - the report belongs to this function
            break
    return report


def _problem(layers: Sequence[nn.Linear], frozen_only: bool) -> str | None:  # noqa: FBT001
    """Return why layers cannot be joined, or None."""
    first = layers[0]
    if any(type(layer) is not nn.Linear for layer in layers):
        return "a layer is no plain nn.Linear"
    if any("forward" in layer.__dict__ for layer in layers):
        return "a layer's forward is patched already"
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers):  # noqa: SLF001
        return "a layer has hooks"
    if len({layer.in_features for layer in layers}) > 1:
        return "the layers read inputs of different width"
    if len({(layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in layers}) > 1:
        return "the layers differ in bias, dtype or device"
    if len({p.requires_grad for layer in layers for p in layer.parameters()}) > 1:
        return "some of the layers train and others do not"
    if frozen_only and first.weight.requires_grad:
        return "they train"
    if first.weight.is_meta:
        return "the weights have no memory yet"
    if len({id(layer.weight) for layer in layers}) < len(layers):
        return "two of them share a weight"
    return None


class _Group:
    """Layers with their weights in one buffer; the first one called computes for all."""

    def __init__(self, layers: Sequence[nn.Linear], counters: Counter[str]) -> None:
        self.layers = list(layers)
        self.counters = counters
        self.sizes = [layer.out_features for layer in layers]
        weights: list[Tensor] = [layer.weight for layer in layers]
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        self.weight = _gather(weights)
        self.bias = _gather(biases) if biases else None
        self.leaves = weights + biases
        self.unclaimed = 0
        # Results of the product that are still to be picked up: the input, then one entry per layer.
        self.waiting: list[Tensor | None] = [None] * (len(layers) + 1)
        self.moment: tuple[object, ...] = ()
        for index, layer in enumerate(layers):
            layer.forward = self._forward_of(index)  # type: ignore[method-assign, assignment]

    def intact(self) -> bool:
        """Whether every weight and bias is the one that was joined, and lies where it was put."""
        if not self._own():
            return False
        count = len(self.layers)
        pairs = [(self.weight, self.leaves[:count])]
        if self.bias is not None:
            pairs.append((self.bias, self.leaves[count:]))
        for buffer, parts in pairs:
            at = buffer.data_ptr()
            for part in parts:
                if part.data_ptr() != at:
                    return False
                at += part.numel() * part.element_size()
        return True

    def _own(self) -> bool:
        """Whether the layers hold the joined parameters, in the type and on the device of the buffer.

        One of them that was wrapped anew over the same memory would never see a gradient.
        """
        now = [layer.weight for layer in self.layers]
        now += [layer.bias for layer in self.layers if layer.bias is not None]
        kind, device = self.weight.dtype, self.weight.device
        return len(now) == len(self.leaves) and all(
            one is leaf and one.dtype == kind and one.device == device
            for one, leaf in zip(now, self.leaves, strict=True)
        )

    def undo(self) -> None:
        """Give every layer its own memory and its own forward again."""
        for layer in self.layers:
            restore_forward(layer, None)
            for parameter in layer.parameters():
                parameter.data = parameter.data.clone()

    def _forward_of(self, index: int) -> Callable[[Tensor], Tensor]:
        layer, waiting = self.layers[index], self.waiting

        def forward(own: nn.Linear, x: Tensor) -> Tensor:
            # A copy of the model carries this method too; its weights lie elsewhere.
            if own is not layer or (index == 0 and not self._applies()):
                return functional.linear(x, own.weight, own.bias)
            if index == 0:
                parts = torch.split(self._product(x), self.sizes, dim=-1)
                waiting[0] = x
                self.moment = self._moment(x)
                waiting[2:] = parts[1:]
                return parts[0]
            ready = waiting[index + 1]
            if ready is None or waiting[0] is not x or self.moment != self._moment(x):
                return functional.linear(x, own.weight, own.bias)
            waiting[index + 1] = None
            if all(entry is None for entry in waiting[1:]):
                waiting[0] = None
            return ready

        # A method and no plain function: copying the layer binds it to the copy.
        return MethodType(forward, layer)

    def _moment(self, x: Tensor) -> tuple[object, ...]:
        """Return what decides about a product beside which tensor it reads: modes, and values in place."""
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        modes = (torch.is_grad_enabled(), autocast)
        if torch.compiler.is_compiling():
            return modes
        return (*modes, *map(_version, (x, *self.leaves)))

    def _applies(self) -> bool:
        """Whether to compute for all now; compiled code can look at neither addresses nor counts."""
        if torch.compiler.is_compiling():
            return self._own()
        if transforming():
            self.counters["transform"] += 1
            return False
        self.unclaimed = self.unclaimed + 1 if self.waiting[0] is not None else 0
        self.waiting[:] = [None] * len(self.waiting)
        if self.unclaimed >= _PATIENCE:
            # The others read something else: what was computed for them is thrown away each time.
            self.unclaimed = _PATIENCE
            self.counters["inputs_differ"] += 1
            self.waiting[0] = self.weight
            return False
        if not self.intact():
            self.counters["weights_moved"] += 1
            return False
        self.counters["joined"] += 1
        return True

    def _product(self, x: Tensor) -> Tensor:
        trains = x.requires_grad or any(leaf.requires_grad for leaf in self.leaves)
        if not (torch.is_grad_enabled() and trains):
            return functional.linear(x, self.weight, self.bias)
        product: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, *self.leaves
        )
        return product


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - no public way to ask


def _gather(parameters: Sequence[Tensor]) -> Tensor:
    """Move parameters into one buffer, one behind the other; return it."""
    with torch.no_grad():
        buffer = torch.cat([p.detach() for p in parameters])
        at = 0
        for parameter in parameters:
            parameter.data = buffer[at : at + parameter.shape[0]]
            at += parameter.shape[0]
    return buffer


class _Product(torch.autograd.Function):
    """One product with a joined weight; gradients go to the parameters that lie in it."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *leaves: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, *leaves)
        return functional.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *leaves = ctx.saved_tensors  # type: ignore[attr-defined]
        needs = ctx.needs_input_grad  # type: ignore[attr-defined]
        grad = grads[0].reshape(-1, weight.shape[0])
        rows = x.reshape(-1, x.shape[-1])
        # Under autocast the forward product ran in the type of the gradient.
        to_input = (grad @ weight.to(grad.dtype)).view(x.shape).to(x.dtype) if needs[0] else None
        wanted = [leaf for leaf, needed in zip(leaves, needs[3:], strict=True) if needed]

        def products() -> list[Tensor]:
            return _to_leaves(grad, rows, leaves, needs[3:])

        late = collector(grad.device, wanted)
        if late is not None:
            late.add(wanted, products, reads=(grad, rows))
            return to_input, None, None, *(None for _ in leaves)
        made = iter(products())
        return to_input, None, None, *(next(made) if needed else None for needed in needs[3:])


def _to_leaves(grad: Tensor, rows: Tensor, leaves: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor]:
    """Return the gradients of those weights, then biases, that need one, from that of the joined product."""
    made: list[Tensor] = []
    total: Tensor | None = None
    at = 0
    for leaf, wanted in zip(leaves, needed, strict=True):
        at = 0 if at == grad.shape[1] else at
        span = slice(at, at + leaf.shape[0])
        at = span.stop
        if wanted and leaf.dim() == 2:
            made.append(weight_gradient(grad[:, span], rows.to(grad.dtype), leaf.dtype))
        elif wanted:
            total = sum_rows(grad, leaf.dtype) if total is None else total
            # A tensor of its own: what adds to or keeps a gradient must not meet its neighbours.
            made.append(total[span].clone())
    return made
