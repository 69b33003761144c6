"""What fusion and graphs expect of a model: one mapping in, losses per sample out.

A model is an ordinary ``torch.nn.Module`` called as ``model(batch)`` that returns a mapping with

* ``loss``: scalar, the mean over the batch (always);
* ``loss_sum`` ``(B,)`` and ``loss_count`` ``(B,)``: per sample, the masked sum of the loss and the number of
  valid elements in it (optional; without them micro-batches cannot share one forward, because their losses
  could not be told apart afterwards).

Optional methods and attributes make more possible:

* ``draw(batch, generator=None) -> batch``: adds the random numbers this micro-batch needs (noise, time), so
  that fused, graphed and plain execution use the same numbers in the same order;
* ``loss_count(batch) -> Tensor (B,)``: valid elements, known before the forward pass;
* ``frozen_modules``, ``run_frozen`` and ``frozen_inputs``: see :class:`FrozenPrefix`;
* ``fusion_unsafe``: a sentence that says why samples of one batch influence each other (a contrastive loss, a
  capacity limit). A submodule may carry it too. Fusion is then refused with that sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Batch = Mapping[str, object]
"""A micro-batch: tensors with the samples along dim 0, lists with one entry per sample, shared scalars."""


@runtime_checkable
class FrozenPrefix(Protocol):
    """A model whose forward pass begins with a part that no training step changes.

    ``model({**batch, **model.run_frozen(batch)})`` must give what ``model(batch)`` gives, and may leave out
    the entries that ``frozen_inputs`` names. Samples must not influence each other in that part.
    """

    def frozen_modules(self) -> Sequence[nn.Module]:
        """Return the modules whose weights the part reads; empty when there is no such part."""
        ...

    def run_frozen(self, batch: Batch, /) -> Mapping[str, Tensor]:
        """Return the part's results by entry name, one row per sample; empty for a batch it cannot take."""
        ...

    def frozen_inputs(self, batch: Batch, /) -> Collection[str]:
        """Return the entries that only this part reads."""
        ...


@runtime_checkable
class SplitFrozenPrefix(FrozenPrefix, Protocol):
    """A frozen part in two: its end, worth about an optimizer step, can run beside that.

    ``finish_frozen({**batch, **begin_frozen(batch)})`` must give what ``run_frozen(batch)`` gives.
    """

    def begin_frozen(self, batch: Batch, /) -> Mapping[str, Tensor]:
        """Return what the end needs, one row per sample; empty for a batch it cannot take."""
        ...

    def finish_frozen(self, batch: Batch, /) -> Mapping[str, Tensor]:
        """Return the part's results from a batch with what :meth:`begin_frozen` returned."""
        ...


@dataclass(frozen=True, kw_only=True)
class SampleLosses:
    """Losses of one forward pass, split as far as the model allows.

    Attributes:
        sums: ``(B,)`` masked sum per sample, or ``(1,)`` for a model that only returns its mean loss.
        counts: Valid elements behind ``sums``, same shape, float32, no gradient.
        per_sample: Whether ``sums`` has one entry per sample.
        mean: The model's own scalar ``loss``.
    """

    sums: Tensor
    counts: Tensor
    per_sample: bool
    mean: Tensor


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module inside DistributedDataParallel, ``torch.compile`` and similar wrappers."""
    seen = 0
    while seen < 8:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in {"DistributedDataParallel", "DataParallel"}:
            inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner
        seen += 1
    return model


def restore_forward(module: nn.Module, before: object) -> None:
    """Put back the instance's own ``forward`` of before, or the class's where it had none."""
    if before is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = before


def draw(model: nn.Module, batch: Batch, generator: torch.Generator | None = None) -> Batch:
    """Return ``batch`` with the model's random draws added; unchanged when the model has no ``draw``."""
    method = getattr(unwrap(model), "draw", None)
    if not callable(method):
        return batch
    drawn = method(batch, generator=generator)
    if not isinstance(drawn, Mapping):
        message = f"model.draw must return the batch as a mapping, got {type(drawn).__name__}"
        raise TypeError(message)
    return drawn


def count_method(model: nn.Module) -> Callable[[Batch], Tensor] | None:
    """Return the model's ``loss_count`` method, or None when it has none."""
    method = getattr(unwrap(model), "loss_count", None)
    return method if callable(method) else None


def batch_size(batch: Batch) -> int:
    """Return the number of samples: the length of the first tensor or list along dim 0.

    Raises:
        ValueError: The batch holds neither a tensor with a dimension nor a list.
    """
    for value in batch.values():
        if isinstance(value, Tensor) and value.dim() > 0:
            return int(value.shape[0])
        if isinstance(value, list | tuple):
            return len(value)
    message = (
        f"cannot tell the number of samples: the batch has keys {sorted(map(str, batch))} but none holds a "
        "tensor with a leading sample dimension or a list with one entry per sample"
    )
    raise ValueError(message)


def read_losses(output: object, samples: int) -> SampleLosses:
    """Check what the model returned and bring it to per-sample sums and counts.

    Args:
        output: What ``model(batch)`` returned.
        samples: Number of samples in that batch.

    Raises:
        TypeError: ``output`` is no mapping, or ``loss`` is no tensor.
        ValueError: ``loss`` is not a scalar, or ``loss_sum``/``loss_count`` do not have shape ``(samples,)``.
    """
    if not isinstance(output, Mapping) or "loss" not in output:
        message = (
            f"the model must return a mapping with the key 'loss', got {type(output).__name__}"
            + (f" with keys {sorted(map(str, output))}" if isinstance(output, Mapping) else "")
            + "; wrap it in a module whose forward returns {'loss': ...}"
        )
        raise TypeError(message)
    mean = output["loss"]
    if not isinstance(mean, Tensor):
        message = f"model output 'loss' must be a tensor, got {type(mean).__name__}"
        raise TypeError(message)
    if mean.numel() != 1:
        message = (
            f"model output 'loss' must be a scalar, got shape {tuple(mean.shape)}; reduce it in the model"
        )
        raise ValueError(message)
    mean = mean.reshape(())
    sums, counts = output.get("loss_sum"), output.get("loss_count")
    if isinstance(sums, Tensor) and isinstance(counts, Tensor):
        for name, value in (("loss_sum", sums), ("loss_count", counts)):
            if tuple(value.shape) != (samples,):
                message = (
                    f"model output '{name}' must have one entry per sample, shape ({samples},), "
                    f"got {tuple(value.shape)}"
                )
                raise ValueError(message)
        return SampleLosses(sums=sums, counts=counts.detach().float(), per_sample=True, mean=mean)
    # The mean over the batch is all there is: the element that is counted is then the sample.
    counts = torch.full((1,), float(samples), device=mean.device)
    return SampleLosses(sums=(mean * samples).reshape(1), counts=counts, per_sample=False, mean=mean)
