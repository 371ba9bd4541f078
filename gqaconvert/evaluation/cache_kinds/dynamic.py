"""`dynamic`: transformers' ordinary cache, which grows by concatenation; others are held to it."""

from __future__ import annotations

from gqaconvert.evaluation.cache_kinds.kind import CacheKind
from gqaconvert.evaluation.cache_kinds.layers import ordinary_cache


def dynamic() -> CacheKind:
    """Return the ordinary kind."""
    return CacheKind(
        "dynamic",
        "every key and value in the model's own type",
        lambda loaded, _tokens: ordinary_cache(loaded),
    )
