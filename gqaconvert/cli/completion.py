"""What the shell offers for words on the command line: models, recipes, configs, GPUs.

Where a function returns nothing, the shell offers its own files and folders.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gqaconvert.settings.shipped import Kind


def complete_model(incomplete: str) -> list[str]:
    """Offer the bundled model, aliases, and folders that hold a model or lead on."""
    from gqaconvert.checkpoint.sources import ALIASES, BUNDLED_MODEL

    names = _beginning((BUNDLED_MODEL, *ALIASES), incomplete)
    folders = [path for path in _paths(incomplete) if path.is_dir()]
    models = [path for path in folders if (path / "config.json").is_file()]
    if not names and not models:
        return []  # the shell's own completion walks folders better
    return [*names, *(f"{path}{'' if path in models else '/'}" for path in folders)]


def complete_recipe(incomplete: str) -> list[str]:
    """Offer recipes that ship, and YAML files."""
    return _shipped("recipes", incomplete)


def complete_accelerate_config(incomplete: str) -> list[str]:
    """Offer configurations of accelerate that ship, and YAML files."""
    return _shipped("accelerate", incomplete)


def complete_suite(incomplete: str) -> list[str]:
    """Offer suites of measurements that ship, and YAML files."""
    return _shipped("eval", incomplete)


def complete_gpu(incomplete: str) -> list[str]:
    """Offer the GPUs of the table."""
    from gqaconvert.kv_cache.hardware import accelerators

    return _beginning(accelerators(), incomplete)


def _shipped(kind: Kind, incomplete: str) -> list[str]:
    from gqaconvert.settings.shipped import shipped_files

    names = _beginning(shipped_files(kind), incomplete)
    files = [str(path) for path in _paths(incomplete) if path.suffix in (".yaml", ".yml")]
    return [*names, *files]


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _paths(incomplete: str) -> list[Path]:
    """Return what lies where an unfinished path points to, hidden files apart."""
    folder, _, begun = incomplete.rpartition("/")
    where = Path(folder or ("/" if incomplete.startswith("/") else ""))
    try:
        found = sorted(where.iterdir())
    except OSError:
        return []
    return [
        path
        for path in found
        if path.name.startswith(begun) and (begun or not path.name.startswith("."))
    ]
