"""Swaps layers of transformers' ordinary cache for layers that keep less.

Which layers a model has is transformers' knowledge; a kind says only what takes the place of full
attention, and of windows. States of linear attention stay as they are: they do not grow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Cache, DynamicCache
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from gqaconvert.evaluation.cache_kinds.kind import CacheUnavailable
from gqaconvert.modelling.models import LoadedModel


def decoder_config(loaded: LoadedModel) -> Any:  # noqa: ANN401
    """Return the config of the part of a model that writes text.

    Raises:
        CacheUnavailable: a model with an encoder, whose cache is of another kind.
    """
    if getattr(loaded.model.config, "is_encoder_decoder", False):
        raise CacheUnavailable(
            "encoder-decoder models keep a second cache, which no kind here covers",
            at=loaded.name,
        )
    return loaded.model.config.get_text_config(decoder=True)


def ordinary_cache(loaded: LoadedModel) -> DynamicCache:
    """Make the cache that transformers makes for a model by itself.

    Raises:
        CacheUnavailable: the class brings a cache of its own.
    """
    config = decoder_config(loaded)
    if not getattr(loaded.model, "_supports_default_dynamic_cache", lambda: True)():
        raise CacheUnavailable(
            f"{type(loaded.model).__name__} insists on a cache class of its own", at=loaded.name
        )
    return DynamicCache(config=config)


def swap_layers(
    loaded: LoadedModel,
    *,
    full: Callable[[], CacheLayerMixin],
    window: Callable[[int], CacheLayerMixin] | None = None,
) -> Cache:
    """Make an ordinary cache with other layers in place of those that keep every token.

    Args:
        loaded: the model.
        full: makes what takes the place of a layer that keeps all tokens.
        window: makes what takes the place of a layer with a window of so many tokens; None to
            leave those alone.

    Raises:
        CacheUnavailable: nothing to swap, or layers whose choice of tokens depends on all of them.
    """
    cache = ordinary_cache(loaded)
    swapped = 0
    for number, layer in enumerate(cache.layers):
        # Exact types: what inherits from these keeps something beside keys and values.
        if type(layer) is DynamicLayer:
            cache.layers[number] = full()
            swapped += 1
        elif type(layer) is DynamicSlidingWindowLayer:
            if window is not None:
                cache.layers[number] = window(layer.sliding_window)
                swapped += 1
        elif type(layer) not in (LinearAttentionLayer, DummyLayer):
            raise CacheUnavailable(
                f"layer {number} keeps more than keys and values ({type(layer).__name__})",
                at=loaded.name,
                remedy="the kinds dynamic and static",
            )
    if not swapped:
        raise CacheUnavailable(
            "no layer keeps every token: windows and states are all there is", at=loaded.name
        )
    return cache
