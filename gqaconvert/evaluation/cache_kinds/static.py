"""`static`: room for all tokens is taken at once, as compiled decoding needs it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from transformers import Cache, StaticCache
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING

from gqaconvert.evaluation.cache_kinds.kind import CacheKind, CacheUnavailable
from gqaconvert.evaluation.cache_kinds.layers import decoder_config, ordinary_cache
from gqaconvert.modelling.models import LoadedModel

_TRIAL_ROOM = 8
_TRIAL_TOKENS = (3, 1)
_LARGEST_CHANGE = 1e-2
"""Relative to the spread of the logits; masks that are off by a token change them altogether."""

_tried: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()


def static() -> CacheKind:
    """Return the kind that allocates once."""
    return CacheKind(
        "static", "every key and value, in room that is taken for the longest text at once", _make
    )


def _make(loaded: LoadedModel, tokens: int) -> Cache:
    ordinary_cache(loaded)  # refuses what has no cache of the usual layers
    config = decoder_config(loaded)
    types = set(getattr(config, "layer_types", None) or ()) - {"moe", "mlp"}
    if unknown := sorted(types - STATIC_LAYER_TYPE_MAPPING.keys()):
        raise CacheUnavailable(
            f"transformers has no static layers for {', '.join(unknown)}", at=loaded.name
        )
    if loaded.model not in _tried:
        _tried[loaded.model] = _fault(loaded)
    if fault := _tried[loaded.model]:
        raise CacheUnavailable(
            f"{type(loaded.model).__name__} makes masks that do not fit a static cache: {fault}",
            at=loaded.name,
        )
    return StaticCache(config=config, max_cache_len=tokens)


def _fault(loaded: LoadedModel) -> str | None:
    """Try four tokens: classes that make masks of their own may take empty room for tokens."""
    expected = _trial(loaded, ordinary_cache(loaded))
    room = StaticCache(config=decoder_config(loaded), max_cache_len=_TRIAL_ROOM)
    try:
        got = _trial(loaded, room)
    except (RuntimeError, ValueError, IndexError) as error:
        return str(error).partition("\n")[0]
    change = float((got - expected).abs().max() / expected.std())
    return None if change < _LARGEST_CHANGE else f"logits change by {change:.2g} of their spread"


@torch.inference_mode()
def _trial(loaded: LoadedModel, cache: Cache) -> torch.Tensor:
    logits, begin = [], 1
    for count in _TRIAL_TOKENS:
        tokens = torch.arange(begin, begin + count, device=loaded.device)[None]
        logits.append(loaded.model(input_ids=tokens, cache=cache, use_cache=True).logits)
        begin += count
    return torch.cat(logits, dim=1).float()
