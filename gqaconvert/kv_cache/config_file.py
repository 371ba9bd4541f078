"""Reads a JSON object from a file of a model, refusing what Python's reader lets pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gqaconvert.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: it cannot be read, or as `load_json`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"there is no {path.name}",
            at=str(path.parent),
            remedy="a folder made by save_pretrained",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read: {error}",
            at=str(path),
            remedy="fetch the checkpoint again",
        ) from error
    return load_json(text, str(path))


def load_json(text: str, at: str) -> dict[str, Any]:
    """Read a JSON object in which no key may occur twice.

    Raises:
        CheckpointError: anything else.
    """
    try:
        raw = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON: {error}", at=at, remedy=_REPAIR) from error
    if not isinstance(raw, dict):
        raise CheckpointError("not a JSON object", at=at, remedy=_REPAIR)
    return raw


_REPAIR = "repair the file, or fetch it again"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice")
    return entries
