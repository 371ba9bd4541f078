"""`sinks:S+W`: the first S tokens and the last W (StreamingLLM, arXiv 2309.17453).

The paper counts positions inside the cache, so that a text may outgrow the positions the model was
trained on. Here tokens keep their place in the text: distances inside the window are the same, that
to the sinks grows with the text. Texts within the trained length read alike but for that distance;
longer ones need the paper's own way.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from gqaconvert.evaluation.cache_kinds.dropping import DroppingLayer, refuse_places_in_cache
from gqaconvert.evaluation.cache_kinds.kind import CacheKind
from gqaconvert.evaluation.cache_kinds.layers import swap_layers
from gqaconvert.modelling.models import LoadedModel


class SinkLayer(DroppingLayer):
    """Between two steps, holds the first `sinks` and the last `window` tokens."""

    def __init__(self, sinks: int, window: int) -> None:
        super().__init__()
        self.sinks = sinks
        self.window = window

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; drop what is between the sinks and the window after this step."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.kept > self.sinks + self.window:
            self.keys, self.values = self._ends(keys), self._ends(values)
        return keys, values

    def _ends(self, states: torch.Tensor) -> torch.Tensor:
        first = states[:, :, : self.sinks]
        return torch.cat([first, states[:, :, states.shape[-2] - self.window :]], dim=-2)


def sinks(count: int, window: int) -> CacheKind:
    """Return the kind that holds `count` tokens of the beginning and `window` recent ones."""

    def make(loaded: LoadedModel, _tokens: int) -> Cache:
        refuse_places_in_cache(loaded)
        return swap_layers(loaded, full=lambda: SinkLayer(count, window))

    return CacheKind(
        f"sinks:{count}+{window}",
        f"the first {count} tokens and the last {window}, at their places in the text",
        make,
    )
