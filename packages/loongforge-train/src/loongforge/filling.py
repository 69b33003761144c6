"""Filling an epoch's last window: samples that weigh nothing keep its shape, so that it replays its graph.

A shorter window is a new shape. With CUDA graphs it would run eagerly, and the first run of a shape also
loads kernels and plans attention: measured as a step of twelve times the usual length in every epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from loongforge.batches import count_samples
from loongforge.window import Outcome

Batch = Mapping[str, object]


@runtime_checkable
class Blanks(Protocol):
    """A model that can make samples without any weight in the loss."""

    def blank(self, batch: Batch, rows: int, /) -> Batch:
        """Return ``rows`` copies of the batch's first sample whose valid loss elements are all zero."""
        ...


@dataclass(frozen=True, kw_only=True)
class FilledOutcome:
    """Outcome of a filled window, cut to the micro-batches that came from the data."""

    micro_losses: Sequence[float | Tensor]
    loss: float | Tensor
    fused: bool
    reason: str | None
    graph: bool | None
    graph_reason: str | None
    filled: int
    """Samples that were added."""


class WindowFiller:
    """Brings short windows to the size of a full one, once a full one was seen.

    Exact where the loss is divided by the number of valid elements: the added samples have none. Their cost
    is that of the rest of a usual step.

    Args:
        model: Makes the samples; without the method ``blank`` nothing is filled.
        batch_size: Samples of a full micro-batch.
        accumulation: Micro-batches of a full window.
    """

    def __init__(self, model: nn.Module, *, batch_size: int, accumulation: int) -> None:
        self._model = model
        self._batch_size, self._accumulation = batch_size, accumulation
        self._full_seen = False
        self.windows = 0
        """Windows filled so far."""

    def fill(self, window: Sequence[Batch]) -> tuple[Sequence[Batch], int]:
        """Return the window at full size and the number of samples that were added."""
        sizes = [count_samples(batch) for batch in window]
        known = [size for size in sizes if size is not None]
        if len(known) != len(sizes) or not isinstance(self._model, Blanks) or not window:
            return window, 0
        missing = self._batch_size * self._accumulation - sum(known)
        if missing <= 0:
            self._full_seen = True
            return window, 0
        if not self._full_seen or max(known) > self._batch_size or len(window) > self._accumulation:
            return window, 0
        full = [
            batch if size == self._batch_size else joined(batch, self._blank(batch, self._batch_size - size))
            for batch, size in zip(window, known, strict=True)
        ]
        absent = self._accumulation - len(window)
        full += [self._blank(window[0], self._batch_size)] * absent
        self.windows += 1
        return full, missing

    def _blank(self, batch: Batch, rows: int) -> Batch:
        if not isinstance(self._model, Blanks):
            msg = f"{type(self._model).__name__} has no method blank(batch, rows), so no window can be filled"
            raise TypeError(msg)
        return self._model.blank(batch, rows)


def joined(batch: Batch, more: Batch) -> Batch:
    """Append the samples of ``more`` to those of ``batch``; both have the same keys and shapes."""

    def join(one: object, other: object) -> object:
        if isinstance(one, Tensor) and isinstance(other, Tensor) and one.dim() > 0:
            return torch.cat((one, other))
        if isinstance(one, list | tuple) and isinstance(other, list | tuple):
            return type(one)([*one, *other])
        return one

    return {name: join(value, more[name]) for name, value in batch.items()}


def cut(outcome: Outcome, micro_batches: int, filled: int) -> FilledOutcome:
    """Return the outcome of a filled window without the micro-batches that were added."""
    return FilledOutcome(
        micro_losses=list(outcome.micro_losses)[:micro_batches],
        loss=outcome.loss,
        fused=outcome.fused,
        reason=outcome.reason,
        graph=getattr(outcome, "graph", None),
        graph_reason=getattr(outcome, "graph_reason", None),
        filled=filled,
    )


def blank_rows(batch: Batch, rows: int, *, weights: Sequence[str]) -> dict[str, object]:
    """Repeat the first sample of a batch of tensors, with zeros in the entries that weigh the loss.

    Args:
        batch: Tensors with a leading sample dimension; other values stay as they are.
        rows: Number of copies.
        weights: Names of the masks.
    """
    size = count_samples(batch)

    def repeated(name: str, value: object) -> object:
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size:
            copies = value[:1].expand(rows, *value.shape[1:])
            return torch.zeros_like(copies) if name in weights else copies
        if isinstance(value, list) and len(value) == size:
            return value[:1] * rows
        return value

    return {name: repeated(name, value) for name, value in batch.items()}
