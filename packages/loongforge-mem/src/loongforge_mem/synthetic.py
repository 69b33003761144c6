"""Traces of training steps without running them: FakeTensorMode executes no kernel and allocates no memory,
but every operator makes the storages it would make. Kernel workspaces are not in such traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from loongforge_mem.shapes import TransformerShape
from loongforge_mem.trace import Event, Trace
from loongforge_mem.watch import StorageWatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Batch = dict[str, "Tensor"]


def record_steps(
    build: Callable[[], torch.nn.Module],
    batches: Sequence[Callable[[], Batch]],
    *,
    source: str,
    loss: Callable[[torch.nn.Module, Batch], Tensor] | None = None,
    micro_batches: int = 1,
) -> list[Trace]:
    """Record one training step (forward, backward, gradients to none) per entry of ``batches``, with fake
    tensors.

    Args:
        build: makes the model; called inside the fake mode, so it allocates nothing.
        batches: each makes the batch of one step.
        source: description stored in the traces.
        loss: returns the scalar loss; default ``model(batch)`` or its ``"loss"``.
        micro_batches: forward/backward passes per step.

    Returns:
        One trace per step. Parameters are not in it; gradients are, from their creation to the end of the
        step.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    traces = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build()
        for make_batch in batches:
            watch = StorageWatch()
            batch = make_batch()
            for tensor in (*model.parameters(), *model.buffers(), *batch.values()):
                watch.know(tensor)
            with watch:
                for _ in range(micro_batches):
                    value = loss(model, batch) if loss is not None else _default_loss(model, batch)
                    value.backward()  # type: ignore[no-untyped-call]
                    del value
                for parameter in model.parameters():
                    parameter.grad = None
            traces.append(watch.trace(source))
    return traces


def _default_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    out = model(batch)
    value: Tensor = out["loss"] if isinstance(out, dict) else out
    return value


def concatenate(traces: Sequence[Trace]) -> Trace:
    """Return one trace that runs ``traces`` one after the other."""
    events: list[Event] = []
    base = 0
    for trace in traces:
        top = base
        for is_alloc, block, size in trace.events:
            events.append((is_alloc, base + block, size))
            top = max(top, base + block + 1)
        base = top
    return Trace(events=tuple(events), source=f"{len(traces)} steps: {traces[0].source}" if traces else "")


def transformer(shape: TransformerShape) -> torch.nn.Module:
    """Return a bf16 transformer whose forward takes ``{"tokens": (B, T)}`` or ``{"x": (B, T, width)}`` to a
    loss.
    """
    import torch

    from loongforge_mem.synthetic_model import Transformer

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return Transformer(shape)
    finally:
        torch.set_default_dtype(before)
