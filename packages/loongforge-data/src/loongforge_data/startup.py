"""Small decisions a loader makes when it is built or started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

from loongforge_data.cache import CacheConfig
from loongforge_data.order import EpochPlan

Decode = Literal["auto", "cpu", "cuda"]
DECODES: tuple[Decode, ...] = ("auto", "cpu", "cuda")


@runtime_checkable
class MapDataset(Protocol):
    """Anything with a length and samples by index."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> object:
        """Return sample ``index``."""
        ...


def following(plan: EpochPlan) -> EpochPlan:
    """Return the plan of the next epoch: a regular one, also after an epoch that began elsewhere."""
    return EpochPlan(plan.config, epoch=plan.epoch + 1, rank=plan.rank)


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Refuse a number outside of [low, high]."""
    if not low <= value <= high:
        msg = f"{name} is {value}, allowed is {low} to {high}"
        raise ValueError(msg)


def cache_config(cache: str | os.PathLike[str] | CacheConfig | None, dataset: object) -> CacheConfig | None:
    """Return the cache settings with the fingerprint of the data set."""
    if cache is None:
        return None
    config = cache if isinstance(cache, CacheConfig) else CacheConfig(directory=os.fspath(cache))
    return replace(config, fingerprint=config.fingerprint or fingerprint(dataset) or "")


def threads_per_worker(workers: int, *, video: bool) -> int:
    """Share the cores out: decoding releases the interpreter lock, user code of other data sets may not."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(4, cores // max(1, workers))) if video else 1


def fingerprint(dataset: object) -> str | None:
    """Return the fingerprint of a data set, or None when it has none."""
    value = getattr(dataset, "fingerprint", None)
    return None if value is None else str(value)


def block_starts(dataset: MapDataset) -> tuple[int, ...]:
    """Return the block bounds of a data set: its own, or runs of 32 samples."""
    own = getattr(dataset, "block_starts", None)
    if callable(own):
        starts: Sequence[int] = own()
        return tuple(int(value) for value in starts)
    return tuple(range(0, len(dataset), 32))
