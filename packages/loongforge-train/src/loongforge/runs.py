"""From a configuration to a running session: recipe, data set, loader, parts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from loongforge.batches import add_draws, move
from loongforge.checkpoint.find import find_newest
from loongforge.checkpoint.state import MDG_FILE
from loongforge.composition import Kept
from loongforge.config import SHARDED, TrainConfig
from loongforge.errors import ConfigError, require
from loongforge.fusing import plan_ahead
from loongforge.pillars import MemoryPillar, build_memory
from loongforge.ranks import Ranks, join
from loongforge.recipes import Recipe, get_recipe
from loongforge.rng import seed_rank
from loongforge.session import AUTOCAST, Callback, Session, build_parts
from loongforge.sources import BatchSource
from loongforge.staging import stage

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
    check_run(config)
    ranks = ranks or join(config.device)
    ranks.require_equal("the configuration", repr(config))
    return assemble(config, prepare(config, ranks.device), ranks, callbacks=callbacks)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What of a run does not depend on how many ranks there are."""

    recipe: Recipe
    options: object
    memory: MemoryPillar
    model: nn.Module
    dataset: object
    collate: Collate


def check_run(config: TrainConfig) -> None:
    """Fail before anything is built when the configuration names no data set or options that do not fit."""
    if config.dataset is None:
        msg = "no data set: pass --dataset DIR (a LeRobot v2.x or v3.0 directory)"
        raise ConfigError(msg)
    get_recipe(config.recipe).options(config.recipe_options)


def prepare(config: TrainConfig, device: torch.device) -> Prepared:
    """Build model and data set; nothing here waits for another rank."""
    recipe = get_recipe(config.recipe)
    options = recipe.options(config.recipe_options)
    memory = build_memory(config.pillars, device)
    with memory.persistent():
        model = recipe.build_model(options, config.seed, device=str(device))
    dataset = recipe.build_dataset(str(config.dataset), options)
    collate = recipe.build_collate(dataset, model, options)
    return Prepared(
        recipe=recipe,
        options=options,
        memory=memory,
        model=model,
        dataset=dataset,
        collate=collate,  # type: ignore[arg-type]
    )


def assemble(
    config: TrainConfig,
    prepared: Prepared,
    ranks: Ranks,
    *,
    callbacks: Sequence[Callback] = (),
    earlier: Kept | None = None,
) -> Run:
    """Build a session among ranks; all of them call it.

    Args:
        config: The run.
        prepared: What does not depend on the ranks.
        ranks: This process among its peers.
        callbacks: Called with each step record.
        earlier: What goes on of the same model's training among other ranks.
    """
    recipe, options, model = prepared.recipe, prepared.options, prepared.model
    dataset, collate = prepared.dataset, prepared.collate
    graph = "" if earlier is not None else describe_modules(config, model, dataset, collate, ranks)
    seed_rank(config.seed, ranks.rank)
    loader = build_loader(dataset, collate, config, ranks)
    if config.pillars.data == "on":
        depth, plan = config.pillars.device_prefetch, plan_ahead(config, model, ranks)
        loader = stage(loader, model, ranks.device, seed=config.seed, depth=depth, plan=plan)
    fingerprint = getattr(dataset, "fingerprint", None)
    source = BatchSource(loader, fingerprint=None if fingerprint is None else str(fingerprint))
    groups = functools.partial(recipe.param_groups, learning_rate=config.learning_rate)
    parts = build_parts(config, model, source, ranks, groups=groups, memory=prepared.memory, earlier=earlier)
    if graph:
        parts.documents[MDG_FILE] = graph
    try:
        session = Session(config, parts, callbacks=callbacks)
        session.validation = build_validation(config, recipe, options, model, collate, ranks)
    except BaseException:
        # The model outlives this in an elastic run, and must not keep the hooks of a failed beginning.
        parts.parallel.close()
        raise
    return Run(session=session, model=model, ranks=ranks)


def build_validation(
    config: TrainConfig, recipe: Recipe, options: object, model: nn.Module, collate: Collate, ranks: Ranks
) -> Callable[[], float] | None:
    """Return what measures the loss on the recipe's held-out episodes, on rank 0 of unsharded strategies."""
    held_out = getattr(options, "held_out", ())
    if not config.validate_every or ranks.rank != 0 or config.strategy in SHARDED:
        return None
    if not held_out or config.dataset is None:
        msg = (
            "validate_every is set but the recipe holds no episode out: "
            "set recipe_options.held_out = [episode, ...]"
        )
        raise ConfigError(msg)
    from loongforge.evaluation.validation import Validation

    dataset = recipe.build_dataset(config.dataset, options, episodes=list(held_out))
    validation = Validation(dataset, collate)  # type: ignore[arg-type]
    return functools.partial(validation.loss, model, autocast=AUTOCAST[config.precision])


def describe_modules(
    config: TrainConfig, model: nn.Module, dataset: object, collate: Collate, ranks: Ranks
) -> str:
    """Return the module dependency graph as JSON, or "" where none is needed or stored already.

    It is made before any pillar puts hooks on the model, on rank 0, and travels in the checkpoint, so that a
    resume analyses nothing again.
    """
    wanted = ranks.rank == 0 and ranks.world_size > 1 and config.pillars.comm != "off"
    if not wanted or (config.resume != "never" and find_newest(Path(config.output), checksums=False).folder):
        return ""
    comm = require("loongforge_comm", "loongforge-comm", "use stock DDP (--comm off)")
    count = min(2, len(dataset))  # type: ignore[arg-type]
    batch = add_draws(model, collate([dataset[i] for i in range(count)]), seed=config.seed, epoch=0)  # type: ignore[index]
    try:
        return str(comm.build_mdg(model, (move(batch, ranks.device),)).to_json())  # type: ignore[attr-defined]
    except Exception as error:  # a model that cannot be described still trains; the plan comes from hooks
        log.warning("no module dependency graph: %s: %s", type(error).__name__, error)
        return ""


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
    """Batch sampler for torch's DataLoader in the order of the data pillar: switching the pillar off changes
    who loads a sample, never which one.

    Args:
        length: Samples of the data set.
        batch_size: Samples per batch and rank.
        shuffle: Permute each epoch.
        seed: Seed of the permutations.
        rank: This rank.
        world_size: Number of ranks; the last global batch is shared equally (see ``loongforge_data.order``).
    """

    def __init__(
        self, length: int, *, batch_size: int, shuffle: bool, seed: int, rank: int, world_size: int
    ) -> None:
        from loongforge_data.order import EpochPlan, OrderConfig

        self._config = OrderConfig(
            length=length,
            batch_size=batch_size,
            world_size=world_size,
            shuffle="full" if shuffle else "none",
            seed=seed,
        )
        self._plan = EpochPlan(self._config, epoch=0, rank=rank)

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation of an epoch."""
        self._plan = type(self._plan)(self._config, epoch=epoch, rank=self._plan.rank)

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self._plan)):
            yield self._plan.batch(step).tolist()
