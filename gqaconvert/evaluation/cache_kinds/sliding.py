"""`sliding:N`: every layer sees the last N tokens, as if the model had such a window.

N counts the token at work, as `sliding_window` in a config does, so N - 1 are held between two
steps. A prompt is read by the model's own attention; the window holds for what is kept of it.
"""

from __future__ import annotations

from transformers import Cache
from transformers.cache_utils import DynamicSlidingWindowLayer

from gqaconvert.evaluation.cache_kinds.dropping import refuse_places_in_cache
from gqaconvert.evaluation.cache_kinds.kind import CacheKind
from gqaconvert.evaluation.cache_kinds.layers import swap_layers
from gqaconvert.evaluation.cache_kinds.sinks import SinkLayer
from gqaconvert.modelling.models import LoadedModel


def sliding(tokens: int) -> CacheKind:
    """Return the kind with a window of so many tokens."""

    def make(loaded: LoadedModel, _tokens: int) -> Cache:
        refuse_places_in_cache(loaded)
        # Not transformers' layer for full attention: by it, models choose the mask of a window,
        # whose width is that of the config.
        return swap_layers(
            loaded,
            full=lambda: SinkLayer(0, tokens - 1),
            window=lambda own: DynamicSlidingWindowLayer(min(own, tokens)),
        )

    return CacheKind(f"sliding:{tokens}", f"the last {tokens} tokens in every layer", make)
