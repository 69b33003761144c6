"""Micro-batches that are copied to the device ahead of their step: ``loongforge_data.device`` in the trainer.

The random draws of a micro-batch are made before its copy starts, keyed by sample, so that what is copied
ahead is all a step needs and a resume draws the same numbers. The host batch stays beside it: counting,
sample numbers and the agreement of the ranks never wait for the device.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import nn

from loongforge.batches import Draws, add_draws, move, sample_ids
from loongforge.errors import require
from loongforge.sources import Resumable

log = logging.getLogger("loongforge")
HOST, DEVICE = "host", "device"


class AheadCounters(Protocol):
    """What is reported of parts run ahead."""

    started: int
    replays: int
    discarded: int
    failures: tuple[str, ...]


class Started(Protocol):
    """A group of micro-batches whose frozen part is under way."""

    def finish(self) -> None:
        """Start what was left for the time of an optimizer step."""
        ...

    def take(self) -> list[Mapping[str, object]]:
        """Return the micro-batches for their step."""
        ...


class Startable(Protocol):
    """``loongforge_fuse.FrozenAhead``."""

    def start(self, window: Sequence[Mapping[str, object]], /) -> Started:
        """Start the frozen part of micro-batches that lie on the device."""
        ...

    def stats(self) -> AheadCounters:
        """Return the counters."""
        ...

    def release(self) -> None:
        """Give up its graphs."""
        ...


@dataclass(frozen=True, kw_only=True)
class StagedBatch:
    """A micro-batch that was copied ahead."""

    host: object
    """The batch as the loader gave it."""
    device: object
    """The batch with its draws on the device; the current stream already waits for the copies."""
    ahead: Callable[[], Mapping[str, object]] | None = None
    """Where its frozen part is under way: makes the current stream wait for that, which is work of the step
    and no wait for data, and returns the batch with it."""


class _Host:
    """Hides a batch from the prefetcher, which copies what it finds in dicts, lists and tuples."""

    __slots__ = ("batch",)

    def __init__(self, batch: object) -> None:
        self.batch = batch


def host_of(batch: object) -> object:
    """Return the host side of a micro-batch, staged or not."""
    return batch.host if isinstance(batch, StagedBatch) else batch


def with_frozen_part(
    batch: object, moved: Mapping[str, object], device: torch.device
) -> Mapping[str, object]:
    """Return a micro-batch on the device with its frozen part, where that was run ahead."""
    if not isinstance(batch, StagedBatch) or batch.ahead is None:
        return moved
    return move(batch.ahead(), device)  # type: ignore[return-value]


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

    def load_state_dict(self, state: Mapping[str, object], *, reshard: bool = False) -> None:
        """Go to a position."""
        self.loader.load_state_dict(state, **({"reshard": True} if reshard else {}))


@dataclass(frozen=True, kw_only=True)
class AheadPlan:
    """How the frozen part of the forward pass runs ahead of its step.

    Attributes:
        ahead: ``loongforge_fuse.FrozenAhead``.
        group: Micro-batches started together: those of one fused pass.
    """

    ahead: Startable
    group: int = 1


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A micro-batch on its way, with the position after it."""

    host: object
    device: object
    state: dict[str, object]
    ahead: Callable[[], Mapping[str, object]] | None = None


class _Taken:
    """The micro-batches of a group with their frozen part, taken when the first one is asked for."""

    def __init__(self, started: Started) -> None:
        self._started = started
        self._taken: list[Mapping[str, object]] | None = None

    def part(self, index: int) -> Mapping[str, object]:
        if self._taken is None:
            self._taken = self._started.take()
        return self._taken[index]


class StagedLoader:
    """A loader whose batches are copied to the device ahead of their step.

    Args:
        loader: Keeps a position of its own, so that batches copied ahead do not count as used.
        model: Draws its random numbers, where it has any.
        device: Where batches go.
        seed: Seed of the draws.
        depth: Micro-batches copied ahead.
        prefetcher: ``DevicePrefetcher(loader, device, convert, depth)`` or a stand-in.
        plan: Runs the frozen part of the forward pass one group ahead; None leaves it to the step.
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
        plan: AheadPlan | None = None,
    ) -> None:
        self._prefetcher = prefetcher(_Drawn(loader, model, seed), device, None, depth)
        self._depth = depth
        self._plan = plan
        self._state: dict[str, object] | None = None
        self._generation = 0
        self._under_way: Started | None = None

    def __iter__(self) -> Iterator[object]:
        self._generation += 1
        generation = self._generation
        for entry in self._entries() if self._plan is None else self._run_ahead(self._plan):
            self._state = entry.state
            if entry.device is None:
                yield entry.host
            else:
                yield StagedBatch(host=entry.host, device=entry.device, ahead=entry.ahead)
            if generation != self._generation:
                return
        self._state = None

    def _entries(self) -> Iterator[_Entry]:
        for entry in self._prefetcher:  # type: ignore[attr-defined]
            state = self._prefetcher.state_dict()
            yield _Entry(host=entry[HOST].batch, device=entry[DEVICE], state=dict(state))

    def _run_ahead(self, plan: AheadPlan) -> Iterator[_Entry]:
        """Hand out each group after the next one's frozen part was started, which runs beside its step."""
        before: list[_Entry] = []
        for group in _grouped(self._entries(), plan.group):
            started = self._start(plan.ahead, group)
            yield from before
            before = started
        self._under_way = None
        yield from before

    def _start(self, ahead: Startable, group: list[_Entry]) -> list[_Entry]:
        """Start the frozen part of a group; return its entries, which know how to get at it."""
        batches = [entry.device for entry in group if isinstance(entry.device, Mapping)]
        if len(batches) != len(group):
            return group
        started = self._under_way = ahead.start(batches)
        taken = _Taken(started)
        return [replace(entry, ahead=partial(taken.part, index)) for index, entry in enumerate(group)]

    def before_optimizer(self) -> None:
        """Start what a coming group left for the time of the optimizer; called in every step."""
        if self._under_way is not None:
            self._under_way.finish()

    def __len__(self) -> int:
        return len(self._prefetcher)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._prefetcher, name)

    def state_dict(self) -> dict[str, object]:
        """Return the position after the last batch that was handed out."""
        return self._prefetcher.state_dict() if self._state is None else dict(self._state)

    def load_state_dict(self, state: Mapping[str, object], *, reshard: bool = False) -> None:
        """Go to a position; what was copied ahead is dropped.

        Args:
            state: What :meth:`state_dict` returned.
            reshard: Accept the position of another number of ranks, where the loader can.
        """
        self._generation += 1
        self._state = None
        self._prefetcher.load_state_dict(state, **({"reshard": True} if reshard else {}))

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; naming the epoch of the position keeps the position."""
        self._generation += 1
        if self._state is not None:
            # The prefetcher has handed out batches whose step has not come yet.
            self._prefetcher.load_state_dict(self._state)
            self._state = None
        self._prefetcher.set_epoch(epoch)  # type: ignore[attr-defined]

    def close(self) -> None:
        """Give up graphs and copies, and close the loader."""
        self._generation += 1
        self._under_way = None
        if self._plan is not None:
            self._plan.ahead.release()
        close = getattr(self._prefetcher, "close", None)
        if callable(close):
            close()

    def stats(self) -> dict[str, object]:
        """Return the counters of loader and copies; ``device_prefetch`` is the depth.

        With the frozen part run ahead also ``frozen_ahead`` (micro-batches), ``frozen_ahead_replays``,
        ``frozen_ahead_discarded`` and ``frozen_ahead_failed`` (shapes that could not be captured).
        """
        counters = {**self._prefetcher.stats(), "device_prefetch": self._depth}  # type: ignore[attr-defined]
        if self._plan is not None:
            ahead = self._plan.ahead.stats()
            counters["frozen_ahead"] = ahead.started
            counters["frozen_ahead_replays"] = ahead.replays
            counters["frozen_ahead_discarded"] = ahead.discarded
            counters["frozen_ahead_failed"] = len(ahead.failures)
        return counters


def _grouped(entries: Iterator[_Entry], size: int) -> Iterator[list[_Entry]]:
    while group := list(itertools.islice(entries, size)):
        yield group


def stage(
    loader: Iterable[object],
    model: nn.Module,
    device: torch.device,
    *,
    seed: int,
    depth: int,
    plan: AheadPlan | None = None,
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
    make = data.DevicePrefetcher  # type: ignore[attr-defined]
    return StagedLoader(loader, model, device, seed=seed, depth=depth, prefetcher=make, plan=plan)  # type: ignore[arg-type]
