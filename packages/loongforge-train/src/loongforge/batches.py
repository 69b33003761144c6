"""What the step engine asks of a batch and of a model, whatever their shape.

The model protocol: ``model(batch)`` returns a mapping with a scalar ``loss`` and, optionally, ``loss_sum``
and ``loss_count`` per sample. Any other ``nn.Module`` that returns a loss works through :class:`LossAdapter`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from loongforge.errors import ConfigError
from loongforge.rng import sample_generators


@runtime_checkable
class CountsLoss(Protocol):
    """A model that knows the number of valid loss elements of each sample before its forward."""

    def loss_count(self, batch: Mapping[str, object], /) -> Tensor:
        """Return the valid elements of each sample, shape (B,), of a host batch."""
        ...


@runtime_checkable
class Draws(Protocol):
    """A model that can draw a micro-batch's random numbers ahead of the forward."""

    def draw(
        self,
        batch: Mapping[str, object],
        generator: Sequence[torch.Generator] | torch.Generator | None = None,
    ) -> Mapping[str, object]:
        """Return the batch with its draws; sample i from generator i where there is one per sample."""
        ...


class LossAdapter(nn.Module):
    """Gives any module that returns a loss the model protocol: ``forward(batch) -> {"loss": ...}``.

    Args:
        model: Called as ``model(batch)``, ``model(**batch)`` when its forward names the keys of the batch, or
            ``model(*batch)`` for a tuple or list. Its result may be a loss, a mapping or object with
            ``loss``, or a tuple whose first entry is the loss.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        signature = inspect.signature(model.forward).parameters.values()
        named = [p for p in signature if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
        self._names = {p.name for p in named}
        self._any_name = any(p.kind is p.VAR_KEYWORD for p in signature)
        self._one_argument = len(named) == 1 and not self._any_name

    def forward(self, batch: object) -> Mapping[str, Tensor]:
        """Call the model and return its loss (and per-sample sums, where given) in a mapping."""
        if isinstance(batch, Mapping):
            by_name = self._any_name or (not self._one_argument and self._names & set(batch))
            result = (
                self.model(**{str(key): value for key, value in batch.items()})
                if by_name
                else self.model(batch)
            )
        elif isinstance(batch, (tuple, list)) and (len(batch) == 1 or not self._one_argument):
            result = self.model(*batch)
        else:
            result = self.model(batch)
        return _named_loss(result)


def _named_loss(result: object) -> Mapping[str, Tensor]:
    if isinstance(result, Tensor):
        return {"loss": result}
    if isinstance(result, Mapping) and "loss" in result:
        return result
    if isinstance(getattr(result, "loss", None), Tensor):
        return {"loss": result.loss}  # type: ignore[attr-defined]
    if isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
        return {"loss": result[0]}
    message = (
        f"the model returned {type(result).__name__} without a loss: allowed are a scalar tensor, a mapping "
        "or object with `loss`, or a tuple that starts with the loss"
    )
    raise ConfigError(message)


def move(value: object, device: torch.device) -> object:
    """Copy the tensors of a (nested) batch to ``device`` without waiting; everything else stays as it is."""
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: move(item, device) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(move(item, device) for item in value)
    if isinstance(value, list):
        return [move(item, device) for item in value]
    return value


def count_samples(batch: object) -> int | None:
    """Return the leading dimension of the first tensor of the batch, or None when there is none."""
    if isinstance(batch, Mapping) and isinstance(batch.get("index"), Tensor):
        return int(batch["index"].shape[0])
    values = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, (tuple, list))
        else [batch]
    )
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return int(value.shape[0])
    return None


def count_tokens(batch: object) -> int | None:
    """Return the number of text and image tokens a host batch carries, or None when it does not say."""
    if not isinstance(batch, Mapping):
        return None
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.device.type == "cpu":
        # Not by way of numpy, whose code no step has in the caches; torch sums so few numbers on this
        # thread, by the code that has just counted valid elements.
        return int(mask.sum())
    ids = batch.get("input_ids")
    return int(ids.numel()) if isinstance(ids, Tensor) else None


def sample_ids(batch: object) -> list[int]:
    """Return the data set indices of the samples of a host batch; empty when it does not carry them."""
    if isinstance(batch, Mapping):
        index = batch.get("index")
        if isinstance(index, Tensor) and index.device.type == "cpu":
            values = index.flatten().tolist()
            return [int(value) for value in values] if index.is_floating_point() else values
    return []


Tally = tuple[int | None, int | None, list[list[int]]]
"""Samples, tokens and sample indices of a window."""


def tally(window: Sequence[object]) -> Tally:
    """Return samples, tokens and sample indices of a window of host batches.

    A number is None where a micro-batch does not say it.
    """
    samples: int | None = 0
    tokens: int | None = 0
    for batch in window:
        size, count = count_samples(batch), count_tokens(batch)
        samples = None if size is None or samples is None else samples + size
        tokens = None if count is None or tokens is None else tokens + count
    return samples, tokens, [sample_ids(batch) for batch in window]


def add_draws(model: nn.Module, batch: object, *, seed: int, epoch: int) -> object:
    """Let the model draw a micro-batch's random numbers, keyed by sample where the batch names them."""
    if not isinstance(model, Draws) or not isinstance(batch, Mapping):
        return batch
    ids = sample_ids(batch)
    return model.draw(batch, sample_generators(seed, epoch, ids) if ids else None)


def count_valid(model: nn.Module, window: Sequence[object]) -> float:
    """Return the number of valid loss elements of a window, or -1 when the model does not count them."""
    if not isinstance(model, CountsLoss):
        return -1.0
    return float(sum(float(model.loss_count(batch).sum()) for batch in window if isinstance(batch, Mapping)))


Backward = Callable[[Tensor], None]
