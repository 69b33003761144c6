"""Fitting a training step into a memory budget before running it.

The step is run under FakeTensorMode, which executes no kernel and allocates nothing, with every storage
recorded. Two batch sizes give the cost per sample; the chosen size is profiled again, so the prediction is
not an extrapolation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loongforge_mem.config import GIB
from loongforge_mem.offload import OptimizerOffload
from loongforge_mem.planning import plan_trace
from loongforge_mem.recompute import MODES, Recompute, RecomputeHandle, apply_recompute, find_blocks
from loongforge_mem.watch import StorageWatch

if TYPE_CHECKING:
    import torch

Loss = Callable[["torch.nn.Module", Any], "torch.Tensor"]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Memory of one step, in bytes.

    Attributes:
        fixed: parameters, buffers and the batch.
        optimizer: optimizer state.
        peak: highest sum of everything during forward, backward and the optimizer step.
        planned: bytes an offline plan needs for what comes and goes.
        allocations: number of storages made.
    """

    fixed: int
    optimizer: int
    peak: int
    planned: int
    allocations: int


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to run the step: batch, recomputation, offload, and its predicted peak in bytes."""

    batch: int
    recompute: Recompute
    offload_optimizer: bool
    peak: int


@dataclass(frozen=True, kw_only=True)
class BudgetPlan:
    """The choice and how it was made.

    Attributes:
        batch: samples per forward: micro-batch times fusion factor.
        micro_batch: samples of one micro-batch.
        fusion: micro-batches fused into one forward.
        recompute: ``"none"``, ``"selective"`` or ``"full"``.
        modules: names of the recomputed modules.
        offload_optimizer: whether optimizer state lives on the host between steps.
        predicted_peak_bytes: peak of the chosen configuration, profiled at its own size.
        budget_bytes: what was allowed.
        candidates: every configuration that was considered.
    """

    batch: int
    micro_batch: int
    fusion: int
    recompute: Recompute
    modules: Sequence[str]
    offload_optimizer: bool
    predicted_peak_bytes: int
    budget_bytes: int
    candidates: Sequence[Candidate] = field(default=())

    def apply(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Applied:
        """Make ``model`` recompute and ``optimizer`` offload as planned; returns a handle that undoes it."""
        handle = apply_recompute(model, self.modules, self.recompute)
        offload = OptimizerOffload(optimizer) if self.offload_optimizer and optimizer is not None else None
        return Applied(handle, offload)


@dataclass
class Applied:
    """A plan in force; ``offload`` has a ``prefetch()`` to call early in backward."""

    recompute: RecomputeHandle
    offload: OptimizerOffload | None

    def remove(self) -> None:
        """Undo everything."""
        self.recompute.remove()
        if self.offload is not None:
            self.offload.close()


def profile_step(
    model: torch.nn.Module,
    example: Any,
    *,
    batch: int | None = None,
    loss: Loss | None = None,
    states_per_parameter: int = 2,
    recompute: Recompute = "none",
    modules: Sequence[str] | None = None,
) -> Profile:
    """Predict the memory of one training step without running it.

    Args:
        model: on any device, ``meta`` included; not changed.
        example: one batch: a tensor, or a dictionary or tuple of tensors with samples in dimension 0.
        batch: samples; default as in ``example``.
        loss: returns the scalar loss of ``(model, batch)``; default: the output or its ``"loss"``.
        states_per_parameter: tensors like the parameter that the optimizer keeps (AdamW: 2).
        recompute: recomputation of ``modules``.
        modules: names of modules to recompute; default: the blocks of :func:`find_blocks`.

    Raises:
        ValueError: the example has no tensor, or its tensors disagree on the number of samples.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    size = batch or samples_of(example)
    names = list(modules) if modules is not None else find_blocks(model)
    mode = FakeTensorMode()
    fakes = {id(t): mode.from_tensor(t) for t in (*model.parameters(), *model.buffers())}
    with mode:
        fake = resize(example, size, like=torch.empty)
    watch = StorageWatch()
    tensors = [*fakes.values(), *_tensors(fake)]
    for tensor in tensors:
        watch.know(tensor)
    fixed = sum(t.untyped_storage().nbytes() for t in {id(t.untyped_storage()): t for t in tensors}.values())
    trainable = sum(t.numel() * t.element_size() for t in fakes.values() if t.requires_grad)
    handle = apply_recompute(model, names, recompute)
    try:
        with _holding(model, fakes), mode, watch:
            value = _loss_of(model, fake, loss)
            value.backward()  # type: ignore[no-untyped-call]
            del value
    finally:
        handle.remove()
    trace = watch.trace()
    optimizer = trainable * states_per_parameter
    return Profile(
        fixed=fixed,
        optimizer=optimizer,
        # After backward the gradients are live and nothing else; the fused step adds no tensor.
        peak=fixed + optimizer + watch.peak_bytes,
        planned=plan_trace(trace).high_water if trace.events else 0,
        allocations=trace.num_allocations,
    )


def plan_memory(
    model: torch.nn.Module,
    example: Any,
    budget_gb: float,
    *,
    target_batch: int | None = None,
    micro_batch: int | None = None,
    loss: Loss | None = None,
    states_per_parameter: int = 2,
    overhead: float = 0.02,
    max_batch: int = 256,
) -> BudgetPlan:
    """Choose recomputation, offload and the batch that fit ``budget_gb``.

    Cheapest first: nothing, selective recomputation, full recomputation, the same with optimizer state on the
    host. The first that reaches ``target_batch`` wins; without a target (or when none reaches it) the one
    with the largest batch.

    Args:
        model: on any device, ``meta`` included; not changed.
        example: one batch; samples in dimension 0.
        budget_gb: GiB the step may use.
        target_batch: samples per forward that are enough.
        micro_batch: the batch is a multiple of it (default: 1); the quotient is the fusion factor.
        loss: see :func:`profile_step`.
        states_per_parameter: see :func:`profile_step`.
        overhead: part of the budget left for rounding and kernel workspaces.
        max_batch: largest batch considered.

    Raises:
        ValueError: a value out of range, or not even one micro-batch fits; says what is missing.
    """
    if budget_gb <= 0 or not 0 <= overhead < 1:
        msg = f"budget_gb is {budget_gb} and overhead {overhead}; allowed: above 0, and 0 to below 1"
        raise ValueError(msg)
    unit = micro_batch or 1
    room = int(budget_gb * GIB * (1 - overhead))
    blocks = find_blocks(model)
    options: dict[str, Any] = {"loss": loss, "states_per_parameter": states_per_parameter, "modules": blocks}
    candidates: list[Candidate] = []
    for recompute in MODES if blocks else MODES[:1]:
        one = profile_step(model, example, batch=unit, recompute=recompute, **options)
        two = profile_step(model, example, batch=2 * unit, recompute=recompute, **options)
        slope = max((two.peak - one.peak) / unit, 1.0)
        for offload in (False, True):
            spare = room - one.peak + (one.optimizer if offload else 0)
            wanted = min(target_batch or max_batch, max_batch)
            batch = min(unit + int(spare / slope) // unit * unit if spare >= 0 else 0, wanted // unit * unit)
            peak = one.peak - (one.optimizer if offload else 0) + int(slope * (batch - unit))
            candidates.append(
                Candidate(batch=batch, recompute=recompute, offload_optimizer=offload, peak=peak)
            )
    candidates.sort(key=lambda c: (c.offload_optimizer, MODES.index(c.recompute)))
    enough = [c for c in candidates if target_batch is not None and c.batch >= target_batch // unit * unit]
    chosen = enough[0] if enough else max(candidates, key=lambda c: c.batch)
    if chosen.batch < unit:
        least = min(c.peak for c in candidates) / GIB
        msg = (
            f"not one micro-batch of {unit} fits into {budget_gb} GiB: it needs about {least:.2f} GiB even "
            "with full recomputation and optimizer state on the host; use a smaller micro-batch or shard the "
            "model"
        )
        raise ValueError(msg)
    return _confirm(model, example, chosen, candidates, unit, room, budget_gb, options)


def _confirm(
    model: torch.nn.Module,
    example: Any,
    chosen: Candidate,
    candidates: Sequence[Candidate],
    unit: int,
    room: int,
    budget_gb: float,
    options: dict[str, Any],
) -> BudgetPlan:
    """Profile the choice at its own size, and step down while it does not fit."""
    batch = chosen.batch
    while True:
        profile = profile_step(model, example, batch=batch, recompute=chosen.recompute, **options)
        peak = profile.peak - (profile.optimizer if chosen.offload_optimizer else 0)
        if peak <= room or batch <= unit:
            break
        batch -= unit
    return BudgetPlan(
        batch=batch,
        micro_batch=unit,
        fusion=batch // unit,
        recompute=chosen.recompute,
        modules=tuple(options["modules"]) if chosen.recompute != "none" else (),
        offload_optimizer=chosen.offload_optimizer,
        predicted_peak_bytes=peak,
        budget_bytes=int(budget_gb * GIB),
        candidates=tuple(candidates),
    )


@contextlib.contextmanager
def _holding(model: torch.nn.Module, fakes: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Let ``model`` hold fake tensors; backward needs them too where blocks are recomputed."""
    saved = []
    for module in model.modules():
        for table in (module.__dict__["_parameters"], module.__dict__["_buffers"]):
            for key, tensor in table.items():
                if tensor is not None and id(tensor) in fakes:
                    saved.append((table, key, tensor))
    for table, key, tensor in saved:
        table[key] = fakes[id(tensor)]
    try:
        yield
    finally:
        for table, key, tensor in saved:
            table[key] = tensor


def _loss_of(model: torch.nn.Module, batch: Any, loss: Loss | None) -> torch.Tensor:
    import torch

    if loss is not None:
        return loss(model, batch)
    out = model(*batch) if isinstance(batch, tuple) else model(batch)
    value = out["loss"] if isinstance(out, dict) else out
    assert isinstance(value, torch.Tensor)
    return value if value.dim() == 0 else value.float().mean()


def samples_of(example: Any) -> int:
    """Return the number of samples of a batch.

    Raises:
        ValueError: no tensor, or tensors that disagree.
    """
    sizes = {t.shape[0] for t in _tensors(example) if t.dim() > 0}
    if len(sizes) != 1:
        msg = f"the example's tensors have {sorted(sizes)} samples in dimension 0; allowed: one common number"
        raise ValueError(msg)
    return int(sizes.pop())


def resize(example: Any, samples: int, *, like: Callable[..., torch.Tensor]) -> Any:
    """Return a batch of the same structure with ``samples`` samples, by ``like(shape, dtype=, device=)``."""
    import torch
    from torch.utils._pytree import tree_map

    count = samples_of(example)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = (samples, *leaf.shape[1:]) if leaf.dim() > 0 and leaf.shape[0] == count else tuple(leaf.shape)
        return like(shape, dtype=leaf.dtype, device=leaf.device)

    return tree_map(one, example)


def _tensors(example: Any) -> list[torch.Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(example) if isinstance(leaf, torch.Tensor)]
