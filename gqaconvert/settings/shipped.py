"""YAML files that come with this package: in the repository, or in an installed package.

In the repository they lie where people read them, in `recipes/` and `configs/`; a wheel holds the
same files below `gqaconvert/bundled/`.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

from gqaconvert.errors import UsageError

Kind = Literal["recipes", "accelerate", "eval"]

_PACKAGE = Path(__file__).resolve().parent.parent
_IN_REPOSITORY = {
    "recipes": Path("recipes"),
    "accelerate": Path("configs", "accelerate"),
    "eval": Path("configs", "eval"),
}
_SUFFIXES = (".yaml", ".yml")


def shipped_files(kind: Kind) -> dict[str, Path]:
    """Return the files of one kind by name, in the order of names."""
    installed = _PACKAGE / "bundled" / kind
    folder = installed if installed.is_dir() else _PACKAGE.parent / _IN_REPOSITORY[kind]
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find_shipped(kind: Kind, spec: str, *, what: str) -> Path:
    """Find a file by its path, or by the name of one that ships.

    Args:
        kind: which files ship.
        spec: a path, or a name without suffix.
        what: the kind in words, for errors.

    Raises:
        UsageError: neither; names those there are.
    """
    path = Path(spec).expanduser()
    if path.is_file():
        return path
    known = shipped_files(kind)
    if spec in known:
        return known[spec]
    name = path.stem if path.suffix in _SUFFIXES else path.name
    near = [name] if name in known else difflib.get_close_matches(name, known, 1)
    if path.suffix in _SUFFIXES or path.parent != Path():
        raise UsageError(
            f"no such file, for {what}", at=spec, remedy=near[0] if near else ", ".join(known)
        )
    raise UsageError(
        f"no {what} {spec!r}" + (f"; {near[0]}?" if near else ""),
        remedy=f"{', '.join(known)}, or a YAML file",
    )
