"""From a configuration to a running session: recipe, data set, loader, parts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader

from loongforge.config import TrainConfig
from loongforge.errors import ConfigError, require
from loongforge.pillars import build_memory
from loongforge.ranks import Ranks, join
from loongforge.recipes import get_recipe
from loongforge.rng import seed_rank
from loongforge.session import Callback, Session, build_parts
from loongforge.sources import BatchSource

log = logging.getLogger("loongforge")
Collate = Callable[[Sequence[object]], object]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A session with what it was built from."""

    session: Session
    model: nn.Module
    ranks: Ranks


def build_run(config: TrainConfig, *, ranks: Ranks | None = None, callbacks: Sequence[Callback] = ()) -> Run:
    """Build model, data and session of a configuration.

    Args:
        config: The run; ``dataset`` and ``recipe`` must be set.
        ranks: This process among its peers; found from the environment by default.
        callbacks: Called with each step record.

    Raises:
        ConfigError: A setting does not fit.
        MissingPillarError: A pillar is asked for that is not installed.
    """
    if config.dataset is None:
        msg = "no data set: pass --dataset DIR (a LeRobot v2.x or v3.0 directory)"
        raise ConfigError(msg)
    recipe = get_recipe(config.recipe)
    options = recipe.options(config.recipe_options)
    ranks = ranks or join(config.device)
    ranks.require_equal("the configuration", repr(config))
    memory = build_memory(config.pillars)
    with memory.persistent():
        model = recipe.build_model(options, config.seed, device=str(ranks.device))
    dataset = recipe.build_dataset(config.dataset, options)
    collate = recipe.build_collate(dataset, model, options)
    seed_rank(config.seed, ranks.rank)
    loader = build_loader(dataset, collate, config, ranks)  # type: ignore[arg-type]
    fingerprint = getattr(dataset, "fingerprint", None)
    source = BatchSource(loader, fingerprint=None if fingerprint is None else str(fingerprint))
    groups = functools.partial(recipe.param_groups, learning_rate=config.learning_rate)
    parts = build_parts(config, model, source, ranks, groups=groups, memory=memory)
    return Run(session=Session(config, parts, callbacks=callbacks), model=model, ranks=ranks)


def build_loader(dataset: object, collate: Collate, config: TrainConfig, ranks: Ranks) -> Iterable[object]:
    """Return the loader of this rank: ADFEDataLoader, or torch's with the data pillar off.

    Both give every rank the same number of batches and the same samples for the same seed.
    """
    if len(dataset) == 0:  # type: ignore[arg-type]
        msg = f"the data set {config.dataset} has no sample: record something, or choose other episodes"
        raise ConfigError(msg)
    pin = ranks.device.type == "cuda"
    if config.pillars.data == "on":
        data = require("loongforge_data", "loongforge-data", "use torch's DataLoader (--data off)")
        return data.ADFEDataLoader(  # type: ignore[attr-defined]
            dataset,
            batch_size=config.batch_size,
            num_workers=config.workers,
            pin_memory=pin,
            collate_fn=collate,
            prefetch_factor=config.pillars.prefetch_factor,
            # Kept workers fill slots of the next epoch while this one is consumed: no bubble at the border.
            persistent_workers=config.workers > 0,
            shuffle=config.shuffle,
            seed=config.seed,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
    batches = EpochBatches(
        len(dataset),  # type: ignore[arg-type]
        batch_size=config.batch_size,
        shuffle=config.shuffle,
        seed=config.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    return DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=batches,
        num_workers=config.workers,
        collate_fn=collate,
        pin_memory=pin,
        prefetch_factor=config.pillars.prefetch_factor if config.workers else None,
    )


class EpochBatches:
    """Batch sampler for torch's DataLoader: one permutation per epoch, contiguous slices of each global
    batch.

    Args:
        length: Samples of the data set.
        batch_size: Samples per batch and rank.
        shuffle: Permute each epoch.
        seed: Seed of the permutations.
        rank: This rank.
        world_size: Number of ranks; a last global batch that does not fill every rank is dropped.
    """

    def __init__(
        self, length: int, *, batch_size: int, shuffle: bool, seed: int, rank: int, world_size: int
    ) -> None:
        self._length = length
        self._batch = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._rank = rank
        self._world = world_size
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of an epoch."""
        self._epoch = epoch

    def __len__(self) -> int:
        whole, rest = divmod(self._length, self._batch * self._world)
        return whole + (1 if self._world == 1 and rest else 0)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._length)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
            order = torch.randperm(self._length, generator=generator)
        step = self._batch * self._world
        for number in range(len(self)):
            first = number * step + self._rank * self._batch
            yield order[first : first + self._batch].tolist()
