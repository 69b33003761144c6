"""Recipes: configuration files that build a model, open its data and batch it."""

from loongforge.recipes.base import Recipe
from loongforge.recipes.registry import get_recipe, recipe_names, recipe_text

__all__ = ["Recipe", "get_recipe", "recipe_names", "recipe_text"]
