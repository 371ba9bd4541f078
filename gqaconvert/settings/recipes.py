"""Recipes and configurations of accelerate by name or path: found, read, written, described."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gqaconvert.settings.loading import load_settings, make_settings
from gqaconvert.settings.recipe import Recipe
from gqaconvert.settings.shipped import find_shipped, shipped_files
from gqaconvert.settings.yaml_file import write_yaml

_SCHEMA_VERSION = "https://json-schema.org/draft/2020-12/schema"
_REMEDY = "gqaconvert recipes show tiny-cpu prints an example, gqaconvert recipes schema all keys"


def recipe_files() -> dict[str, Path]:
    """Recipes that ship with this package, by name."""
    return shipped_files("recipes")


def find_recipe(spec: str) -> Path:
    """Find a recipe by its path, or by the name of one that ships.

    Raises:
        UsageError: there is none; names those there are.
    """
    return find_shipped("recipes", spec, what="recipe")


def load_recipe(spec: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, with its `name` filled in.

    Args:
        spec: a path, or the name of one that ships.
        overrides: as in `load_settings`.

    Raises:
        UsageError: there is none, or anything wrong in it, all at once.
    """
    path = find_recipe(str(spec))
    recipe = load_settings(Recipe, path, overrides, remedy=_REMEDY)
    if recipe.name is not None:
        return recipe
    return make_settings(
        Recipe,
        recipe.model_dump() | {"name": path.stem},
        at=str(path),
        remedy="a `name:` in the recipe: the file's own cannot name a run folder",
    )


def resolved_yaml(recipe: Recipe) -> str:
    """Write a recipe with every default; `load_recipe` reads the same recipe back."""
    return write_yaml(recipe.model_dump(mode="json"))


def recipe_schema() -> dict[str, Any]:
    """Describe the form of a recipe as JSON schema, for editors, every key with its meaning."""
    schema = Recipe.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        _describe_keys(section)
    return {"$schema": _SCHEMA_VERSION} | schema | {"title": "gqaconvert recipe"}


def _describe_keys(section: dict[str, Any]) -> None:
    """Move what a docstring says of each key from the section's description to the key's."""
    summary, _, attributes = section.get("description", "").partition("\n\nAttributes:\n")
    section["description"] = " ".join(summary.split())
    # A line that is indented further goes on with the one before.
    for entry in textwrap.dedent(attributes).replace("\n    ", " ").splitlines():
        name, _, meaning = entry.partition(": ")
        if name in section["properties"]:
            section["properties"][name]["description"] = meaning


def recipe_summary(path: Path) -> str:
    """Return the first line of a recipe's header, or an empty text."""
    with path.open(encoding="utf-8") as lines:
        first = next(lines, "")
    return first.lstrip("# ").strip() if first.startswith("#") else ""


def accelerate_config(name_or_path: str | Path) -> Path:
    """Find a configuration of accelerate by its path, or by the name of one that ships.

    Raises:
        UsageError: there is none; names those there are.
    """
    return find_shipped("accelerate", str(name_or_path), what="accelerate config")
