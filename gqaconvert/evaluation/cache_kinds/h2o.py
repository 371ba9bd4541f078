"""`h2o:N`: recent tokens and those that drew most attention so far (H2O, arXiv 2306.14048).

As in the paper, half of the budget goes to the most recent tokens and half to the heavy hitters:
after each step, the tokens before the recent ones with the smallest accumulated attention are
dropped. Query heads that share a KV head vote together, by the sum of their weights; the paper has
one query head for each. The accumulated weights are kept in fp32 beside the cache, and counted.

A prompt's weights are computed a second time where attention is fused (see `watched_attention`):
as much again as its attention costs, in slices. A step of decoding adds one row a head.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from gqaconvert.evaluation.cache_kinds.dropping import (
    DroppingLayer,
    recent_places,
    refuse_places_in_cache,
)
from gqaconvert.evaluation.cache_kinds.kind import CacheKind
from gqaconvert.evaluation.cache_kinds.layers import swap_layers
from gqaconvert.evaluation.cache_kinds.watched_attention import (
    never_observed,
    report_to,
    watch_attention,
)
from gqaconvert.modelling.models import LoadedModel


def heavy_hitters(scores: torch.Tensor, heavy: int, recent: int) -> torch.Tensor:
    """Return the places to keep, ascending: (B, K, heavy + recent).

    Args:
        scores: accumulated attention of each token, (B, K, T) with T >= heavy + recent.
        heavy: tokens to keep for their score, among those before the recent ones.
        recent: last tokens to keep, whatever their score.
    """
    length = scores.shape[-1]
    hitters = scores[..., : length - recent].topk(heavy, dim=-1).indices.sort(dim=-1).values
    return torch.cat([hitters, recent_places(length, recent, scores)], dim=-1)


class H2OLayer(DroppingLayer):
    """Holds `budget` tokens between two steps, chosen for each KV head by itself."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.heavy = budget // 2
        self.recent = budget - self.heavy
        self.scores: torch.Tensor | None = None
        self._awaits_attention = False

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; some are dropped when attention over them is reported."""
        if self._awaits_attention:
            raise never_observed()
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self._awaits_attention = True
        report_to(self, keys)
        return keys, values

    def rows_wanted(self, queries: int) -> int:
        """Attention of all new tokens counts."""
        return queries if self._awaits_attention else 0

    def observe(self, columns: torch.Tensor) -> None:
        """Add attention that each token drew, (B, K, T), and drop down to the budget."""
        self._awaits_attention = False
        if self.scores is not None:
            columns[..., : self.scores.shape[-1]] += self.scores
        self.scores = columns
        if self.kept > self.heavy + self.recent:
            places = heavy_hitters(columns, self.heavy, self.recent)
            self.keep(places)
            self.scores = columns.gather(-1, places)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.scores = None
        self._awaits_attention = False

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Follow a beam search."""
        super().reorder_cache(beam_idx)
        if self.scores is not None:
            self.scores = self.scores.index_select(0, beam_idx.to(self.scores.device))


def h2o(budget: int) -> CacheKind:
    """Return the kind with a budget of so many tokens."""

    def make(loaded: LoadedModel, _tokens: int) -> Cache:
        refuse_places_in_cache(loaded)
        cache = swap_layers(loaded, full=lambda: H2OLayer(budget))
        watch_attention(loaded)
        return cache

    return CacheKind(
        f"h2o:{budget}",
        f"{budget - budget // 2} recent tokens and the {budget // 2} that drew most attention,"
        " for each KV head",
        make,
        by_attention=True,
    )
