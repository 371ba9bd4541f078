"""Where a teacher's cache keeps what, and how it says what it was made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gqaconvert.checkpoint.staging import MANIFEST
from gqaconvert.errors import CheckpointError, RefusedError, UsageError

VERSION = 1
KINDS = (np.int32, np.float16)
"""Types of tokens and of log-probabilities on disk."""


Identity = Mapping[str, Any]
"""What a cache depends on beside its own options: plain JSON values by name, such as hashes of the
data's settings and of the teacher's weights."""


def cache_exists(folder: Path) -> bool:
    """Whether a finished cache is there."""
    return (folder / MANIFEST).is_file()


def bytes_needed(num_sequences: int, context: int, top_k: int) -> int:
    """Size of a cache in bytes, but for its headers."""
    a_token = 4 * top_k + 2 * (top_k + 1)  # int32 and float16, the rest included
    return num_sequences * context * a_token


def shard_paths(folder: Path, number: int) -> tuple[Path, Path]:
    """Files of a shard: tokens and log-probabilities, in the order of `KINDS`."""
    return folder / f"tokens-{number:05d}.npy", folder / f"log_probs-{number:05d}.npy"


def read_about(folder: Path) -> dict[str, Any]:
    """Read the description of a finished cache.

    Raises:
        UsageError: there is none.
        CheckpointError: it is damaged.
        RefusedError: it is of another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise UsageError("no teacher's cache here", at=str(folder), remedy="make it first")
    try:
        about: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["teacher_cache"]
        version = about["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError("not a teacher's cache", at=str(path)) from error
    if version != VERSION:
        raise RefusedError(
            f"a teacher's cache of version {version}", at=str(path), remedy="make it again"
        )
    return about


def check_identity(found: Identity, wanted: Identity, folder: Path) -> None:
    """Compare what a cache was made of with what it should be.

    Raises:
        RefusedError: they differ; the error says in what.
    """
    differing = [
        f"{key}: {found.get(key)} there, {wanted.get(key)} here"
        for key in sorted({*found, *wanted})
        if found.get(key) != wanted.get(key)
    ]
    if differing:
        raise RefusedError(
            f"the teacher's cache was made of something else ({'; '.join(differing)})",
            at=str(folder),
            remedy="the data and teacher it was made of, or a new cache in another folder",
        )
