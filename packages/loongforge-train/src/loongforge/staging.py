"""Micro-batches that are copied to the device ahead of their step: ``loongforge_data.device`` in the trainer.

The random draws of a micro-batch are made before its copy starts, keyed by sample, so that what is copied
ahead is all a step needs and a resume draws the same numbers. The host batch stays beside it: counting,
sample numbers and the agreement of the ranks never wait for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from loongforge.batches import Draws, add_draws, sample_ids
from loongforge.errors import require
from loongforge.sources import Resumable

log = logging.getLogger("loongforge")
HOST, DEVICE = "host", "device"


@dataclass(frozen=True, kw_only=True)
class StagedBatch:
    """A micro-batch that was copied ahead."""

    host: object
    """The batch as the loader gave it."""
    device: object
    """The batch with its draws on the device; the current stream already waits for the copies."""


class _Host:
    """Hides a batch from the prefetcher, which copies what it finds in dicts, lists and tuples."""

    __slots__ = ("batch",)

    def __init__(self, batch: object) -> None:
        self.batch = batch


def host_of(batch: object) -> object:
    """Return the host side of a micro-batch, staged or not."""
    return batch.host if isinstance(batch, StagedBatch) else batch


class _Drawn:
    """A resumable loader whose batches carry their draws."""

    def __init__(self, loader: Resumable, model: nn.Module, seed: int) -> None:
        self.loader = loader
        self._model = model
        self._seed = seed
        self._epoch = 0

    def __iter__(self) -> Iterator[dict[str, object]]:
        for batch in self.loader:  # type: ignore[attr-defined]
            device = None
            if not isinstance(self._model, Draws) or sample_ids(batch):
                device = add_draws(self._model, batch, seed=self._seed, epoch=self._epoch)
            # Draws that no sample keys come from the global generator: they are made at their step.
            yield {HOST: _Host(batch), DEVICE: device}

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; its number keys the draws."""
        self._epoch = epoch
        inner = getattr(self.loader, "set_epoch", None)
        if callable(inner):
            inner(epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the loader's position."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a position."""
        self.loader.load_state_dict(state)


class StagedLoader:
    """A loader whose batches are copied to the device ahead of their step.

    Args:
        loader: Keeps a position of its own, so that batches copied ahead do not count as used.
        model: Draws its random numbers, where it has any.
        device: Where batches go.
        seed: Seed of the draws.
        depth: Micro-batches copied ahead.
        prefetcher: ``DevicePrefetcher(loader, device, convert, depth)`` or a stand-in.
    """

    def __init__(
        self,
        loader: Resumable,
        model: nn.Module,
        device: torch.device,
        *,
        seed: int,
        depth: int,
        prefetcher: Callable[..., Resumable],
    ) -> None:
        self._prefetcher = prefetcher(_Drawn(loader, model, seed), device, None, depth)
        self._depth = depth

    def __iter__(self) -> Iterator[object]:
        for entry in self._prefetcher:  # type: ignore[attr-defined]
            host = entry[HOST].batch
            yield host if entry[DEVICE] is None else StagedBatch(host=host, device=entry[DEVICE])

    def __len__(self) -> int:
        return len(self._prefetcher)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._prefetcher, name)

    def state_dict(self) -> dict[str, object]:
        """Return the position after the last batch that was handed out."""
        return self._prefetcher.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go to a position; what was copied ahead is dropped."""
        self._prefetcher.load_state_dict(state)

    def stats(self) -> dict[str, object]:
        """Return the counters of loader and copies; ``device_prefetch`` is the depth."""
        return {**self._prefetcher.stats(), "device_prefetch": self._depth}  # type: ignore[attr-defined]


def stage(
    loader: Iterable[object], model: nn.Module, device: torch.device, *, seed: int, depth: int
) -> Iterable[object]:
    """Return the loader behind the prefetcher, or as it is where that is off or not possible (logged)."""
    reason = None
    if depth == 0:
        reason = "pillars.device_prefetch is 0"
    elif device.type != "cuda":
        reason = f"the device is {device.type}"
    elif not isinstance(loader, Resumable):
        reason = f"{type(loader).__name__} keeps no position of its own"
    if reason is not None:
        log.debug("batches are copied to the device at their step: %s", reason)
        return loader
    data = require("loongforge_data.device", "loongforge-data", "use --set pillars.device_prefetch=0")
    log.info("batches are copied to %s %d ahead of their step", device, depth)
    return StagedLoader(loader, model, device, seed=seed, depth=depth, prefetcher=data.DevicePrefetcher)  # type: ignore[attr-defined,arg-type]
