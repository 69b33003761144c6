"""The policy to evaluate: from a run's checkpoint folder or from a folder in the published layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from loongforge.checkpoint.find import find_newest
from loongforge.checkpoint.layout import STATE, TRAINER, load_tensors
from loongforge.checkpoint.state import load_weights
from loongforge.errors import CheckpointError, ConfigError
from loongforge.recipes import Recipe, get_recipe


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
    return Policy(recipe=built, options=options, model=model, dataset=None, source=folder)


def _from_run(
    folder: Path, recipe: str | None, overrides: Mapping[str, object], device: str, *, average: bool
) -> Policy:
    trainer = json.loads((folder / TRAINER).read_text())
    config = trainer.get("config", {})
    built = get_recipe(recipe or str(config.get("recipe")))
    stored = config.get("recipe_options") or {}
    # The weights are in the folder: the checkpoint the run started from is not needed again.
    options = built.options({**stored, **overrides})
    fresh = (
        built.options({**stored, **overrides, "checkpoint": "none"}) if "checkpoint" in stored else options
    )
    model = built.build_model(fresh, 0, device=device)
    model.load_state_dict(dict(load_weights(folder)))
    if average:
        path = folder / STATE / "average.pt"
        if not path.is_file():
            msg = f"{folder} has no moving average: train with --set ema_decay=0.999, or leave --ema out"
            raise CheckpointError(msg)
        _load_average(model, load_tensors(path))
    dataset = config.get("dataset")
    return Policy(
        recipe=built,
        options=fresh,
        model=model,
        dataset=None if dataset is None else str(dataset),
        source=folder,
    )


def _load_average(model: nn.Module, state: object) -> None:
    if not isinstance(state, Mapping):
        msg = "average.pt does not hold a table of weights: the file is damaged"
        raise CheckpointError(msg)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in state.items():
            parameters[str(name)].copy_(value)
