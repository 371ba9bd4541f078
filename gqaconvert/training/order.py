"""Seeded order: numbers that depend on a seed and a count alone, the same in every version.

numpy's and Python's generators keep a state and may change between versions; a run that is resumed
years later, or on another machine, must still find the next document.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]


def hash_counts(*counts: int) -> int:
    """Return 64 bits that look random and depend on the counts alone."""
    text = " ".join(map(str, counts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permutation(size: int, *counts: int) -> Numbers:
    """Return 0 … size − 1 in an order that depends on the counts alone.

    Numbers are sorted by a hash of 64 bits each (the finaliser of SplitMix64).
    """
    key = np.uint64(hash_counts(*counts))
    with np.errstate(over="ignore"):
        mixed = key + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.argsort(mixed, kind="stable")
