"""Recipes by name: each is a TOML file, here or anywhere, on top of a family that builds it."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from loongforge.errors import ConfigError
from loongforge.recipes.base import Recipe

_FIELDS = {"base", "family", "description", "options", "training"}


def recipe_names() -> list[str]:
    """Return the names of the recipes that ship with the package."""
    folder = resources.files("loongforge.recipes") / "configs"
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def recipe_text(name: str) -> str:
    """Return the TOML file of a recipe: one that ships with the package, or a path to a copy.

    Raises:
        ConfigError: No such recipe or file.
    """
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            msg = f"recipe file {path} does not exist"
            raise ConfigError(msg)
        return path.read_text()
    entry = resources.files("loongforge.recipes") / "configs" / f"{name}.toml"
    if not entry.is_file():
        msg = (
            f"unknown recipe '{name}'; known are {', '.join(recipe_names())}, or give the path of a "
            ".toml file"
        )
        raise ConfigError(msg)
    return entry.read_text()


def get_recipe(name: str) -> Recipe:
    """Return a recipe by name or by the path of its TOML file.

    The file has ``base`` (another recipe whose options it starts from) or ``family`` (``gr00t_n1_6`` or
    ``multimodal``), a ``description``, a table ``options`` for the recipe's options and a table ``training``
    with suggested settings of the run.
    """
    layers: list[Mapping[str, object]] = []
    seen: list[str] = []
    current = name
    while True:
        if current in seen:
            msg = f"recipe '{name}' is based on itself: {' -> '.join([*seen, current])}"
            raise ConfigError(msg)
        seen.append(current)
        try:
            table = tomllib.loads(recipe_text(current))
        except tomllib.TOMLDecodeError as error:
            msg = f"recipe '{current}' is not valid TOML: {error}"
            raise ConfigError(msg) from error
        unknown = set(table) - _FIELDS
        if unknown:
            msg = (
                f"recipe '{current}' has unknown fields {', '.join(sorted(unknown))}; "
                f"allowed are {', '.join(sorted(_FIELDS))}"
            )
            raise ConfigError(msg)
        layers.append(table)
        base = table.get("base")
        if not isinstance(base, str):
            return _build(name, str(table.get("family", "")), list(reversed(layers)))
        current = base


def _build(name: str, family: str, layers: list[Mapping[str, object]]) -> Recipe:
    short = Path(name).stem
    description = str(layers[-1].get("description", ""))
    training: dict[str, object] = {}
    for layer in layers:
        training = _merged(training, _table(layer, "training", name))
    recipe: Recipe
    if family == "gr00t_n1_6":
        from loongforge.recipes.gr00t_n1_6.recipe import GrootOptions, GrootRecipe

        options = GrootOptions()
        for layer in layers:
            options = GrootRecipe(short, options).options(_table(layer, "options", name))
        recipe = GrootRecipe(short, options, description=description, training=training)
    elif family == "multimodal":
        from loongforge.recipes.multimodal.recipe import MultimodalOptions, MultimodalRecipe

        chosen = MultimodalOptions()
        for layer in layers:
            chosen = MultimodalRecipe(short, chosen).options(_table(layer, "options", name))
        recipe = MultimodalRecipe(short, chosen, description=description, training=training)
    else:
        msg = f"recipe '{name}' names no known family, got '{family}'; allowed are gr00t_n1_6, multimodal"
        raise ConfigError(msg)
    return recipe


def _merged(base: Mapping[str, object], more: Mapping[str, object]) -> dict[str, object]:
    result = dict(base)
    for name, value in more.items():
        known = result.get(name)
        nested = isinstance(value, Mapping) and isinstance(known, Mapping)
        result[name] = _merged(known, value) if nested else value  # type: ignore[arg-type]
    return result


def _table(layer: Mapping[str, object], key: str, name: str) -> Mapping[str, object]:
    value = layer.get(key, {})
    if not isinstance(value, Mapping):
        msg = f"'{key}' of recipe '{name}' must be a table, got {value!r}"
        raise ConfigError(msg)
    return value
