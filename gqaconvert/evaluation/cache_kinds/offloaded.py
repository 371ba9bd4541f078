"""`offloaded`: keys and values wait in the computer's memory, layer by layer, not on the GPU."""

from __future__ import annotations

import torch
from transformers import Cache, DynamicCache

from gqaconvert.evaluation.cache_kinds.kind import CacheKind, CacheUnavailable
from gqaconvert.evaluation.cache_kinds.layers import decoder_config, ordinary_cache
from gqaconvert.modelling.models import LoadedModel


def offloaded() -> CacheKind:
    """Return the kind that keeps one layer at a time on the GPU."""
    return CacheKind(
        "offloaded",
        "every key and value, in the computer's memory but for the layer at work and the next",
        _make,
    )


def _make(loaded: LoadedModel, _tokens: int) -> Cache:
    if not torch.cuda.is_available():
        raise CacheUnavailable(
            "offloading moves keys and values between GPU and memory; no CUDA driver answers here",
            at=loaded.name,
            remedy="a machine with a CUDA device and --device cuda",
        )
    if loaded.device != "cuda":
        raise CacheUnavailable(
            "offloading is of use only to a model on the GPU",
            at=loaded.name,
            remedy="--device cuda",
        )
    ordinary_cache(loaded)
    return DynamicCache(config=decoder_config(loaded), offloading=True)
