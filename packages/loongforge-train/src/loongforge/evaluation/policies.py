"""The policy to evaluate: from a run's checkpoint folder or from a folder in the published layout."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from loongforge.checkpoint.find import find_newest
from loongforge.checkpoint.layout import TRAINER
from loongforge.checkpoint.state import load_average, load_weights
from loongforge.errors import CheckpointError, ConfigError
from loongforge.recipes import Recipe, get_recipe
from loongforge.recipes.gr00t_n1_6.checkpoint import find_checkpoint

log = logging.getLogger("loongforge")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model with the recipe that built it.

    Attributes:
        recipe: The recipe.
        options: The recipe's options.
        model: The model with its weights.
        dataset: Data set the run trained on, or None.
        source: Folder the weights came from.
    """

    recipe: Recipe
    options: object
    model: nn.Module
    dataset: str | None
    source: Path


def load_policy(
    checkpoint: str,
    *,
    recipe: str | None = None,
    overrides: Mapping[str, object] | None = None,
    device: str = "cpu",
    average: bool = False,
) -> Policy:
    """Load a policy.

    Args:
        checkpoint: A checkpoint folder of a run, the run's folder (newest checkpoint), or a folder or hub id
            in the published layout.
        recipe: Recipe name; a run's checkpoint knows its own.
        overrides: Recipe options on top of those of the run.
        device: Where the model goes.
        average: Use the exponential moving average of the weights.

    Raises:
        CheckpointError: Nothing usable in ``checkpoint``.
        ConfigError: A published folder without a recipe.
    """
    folder = Path(checkpoint)
    if folder.is_dir() and not (folder / TRAINER).is_file() and not (folder / "config.json").is_file():
        found = find_newest(folder, checksums=False).folder
        if found is None:
            msg = (
                f"{folder} holds no complete checkpoint; give a run folder, a checkpoint, or a "
                "published folder"
            )
            raise CheckpointError(msg)
        folder = found
    if (folder / TRAINER).is_file():
        return _from_run(folder, recipe, overrides or {}, device, average=average)
    if recipe is None:
        msg = f"{checkpoint} is no checkpoint of a run, so its recipe is unknown: pass --recipe NAME"
        raise ConfigError(msg)
    if average:
        msg = f"{checkpoint} is no checkpoint of a run and has no moving average: leave --ema out"
        raise ConfigError(msg)
    built = get_recipe(recipe)
    options = built.options({**(overrides or {}), "checkpoint": checkpoint})
    model = built.build_model(options, 0, device=device)
    deployed = getattr(built, "deployed", None)
    if callable(deployed):
        options = deployed(options, folder if folder.is_dir() else find_checkpoint(checkpoint))
    return Policy(recipe=built, options=options, model=model, dataset=None, source=folder)


def _from_run(
    folder: Path, recipe: str | None, overrides: Mapping[str, object], device: str, *, average: bool
) -> Policy:
    trainer = json.loads((folder / TRAINER).read_text())
    config = trainer.get("config", {})
    built = get_recipe(recipe or str(config.get("recipe")))
    stored = config.get("recipe_options") or {}
    options = built.options({**stored, **overrides})
    options, model = _unfilled_model(built, options, {**stored, **overrides}, device)
    model.load_state_dict(dict(load_weights(folder)))
    if average:
        weights = load_average(folder)
        if weights is None:
            msg = f"{folder} has no moving average: train with --set ema_decay=0.999, or leave --ema out"
            raise CheckpointError(msg)
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in weights.items():
                parameters[name].copy_(value)
    dataset = config.get("dataset")
    return Policy(
        recipe=built,
        options=options,
        model=model,
        dataset=None if dataset is None else str(dataset),
        source=folder,
    )


def _unfilled_model(
    recipe: Recipe, options: object, given: Mapping[str, object], device: str
) -> tuple[object, nn.Module]:
    """Build the model of a run, whose weights come from the run's own checkpoint.

    The checkpoint the run started from still says sizes, slots and processor, where it can be reached.
    """
    blank = getattr(recipe, "blank_model", None)
    if not callable(blank):
        return options, recipe.build_model(options, 0, device=device)
    start = getattr(options, "checkpoint", None)
    try:
        return options, blank(options, device=device)
    except CheckpointError as error:
        if start is None:
            raise
        log.warning(
            "the run started from %s, which is not here (%s): sizes, slots and processor are those of recipe "
            "'%s'; --option checkpoint=DIR names its new place",
            start,
            error,
            recipe.name,
        )
        options = recipe.options({**given, "checkpoint": "none"})
        return options, blank(options, device=device)
