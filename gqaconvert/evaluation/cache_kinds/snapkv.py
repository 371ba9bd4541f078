"""`snapkv:N`: of a prompt, what its last tokens look at (SnapKV, arXiv 2404.14469).

Once, after the prompt: the attention that the last 32 tokens pay to the tokens before them is
summed, smoothed by a maximum over 7 neighbours, and the N - 32 best tokens of each KV head stay,
with the 32 themselves. Tokens that follow are all kept, so the cache holds N and grows. Query heads
that share a KV head vote together, by the sum of their weights; the paper has one for each.
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

OBSERVATION_WINDOW = 32
"""Last tokens of the prompt that vote; half the budget where that is less."""

POOLING_WIDTH = 7
"""Neighbours whose best vote a token gets, so that whole phrases stay."""


def voted_places(votes: torch.Tensor, budget: int, window: int) -> torch.Tensor:
    """Return the places to keep, ascending: (B, K, budget).

    Args:
        votes: attention that the last `window` tokens paid to each token, (B, K, T).
        budget: tokens to keep, the window among them.
        window: last tokens, kept whatever they drew.
    """
    length = votes.shape[-1]
    smooth = torch.nn.functional.max_pool1d(
        votes[..., : length - window], POOLING_WIDTH, stride=1, padding=POOLING_WIDTH // 2
    )
    chosen = smooth.topk(budget - window, dim=-1).indices.sort(dim=-1).values
    return torch.cat([chosen, recent_places(length, window, votes)], dim=-1)


class SnapKVLayer(DroppingLayer):
    """Holds `budget` tokens of the prompt and everything after it."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self.budget = budget
        self.window = min(OBSERVATION_WINDOW, budget // 2)
        self._awaits_attention = False

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens; the first call is the prompt, cut when attention over it is reported."""
        if self._awaits_attention:
            raise never_observed()
        is_prompt = self.seen == 0
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if is_prompt and self.kept > self.budget:
            self._awaits_attention = True
            report_to(self, keys)
        return keys, values

    def rows_wanted(self, queries: int) -> int:
        """The last tokens of the prompt vote, once."""
        return min(self.window, queries) if self._awaits_attention else 0

    def observe(self, columns: torch.Tensor) -> None:
        """Take the votes, (B, K, T), and drop down to the budget."""
        self._awaits_attention = False
        self.keep(voted_places(columns, self.budget, self.window))

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._awaits_attention = False


def snapkv(budget: int) -> CacheKind:
    """Return the kind with a budget of so many tokens for the prompt."""

    def make(loaded: LoadedModel, _tokens: int) -> Cache:
        refuse_places_in_cache(loaded)
        cache = swap_layers(loaded, full=lambda: SnapKVLayer(budget))
        watch_attention(loaded)
        return cache

    return CacheKind(
        f"snapkv:{budget}",
        f"{budget} tokens of the prompt, those its last {min(OBSERVATION_WINDOW, budget // 2)}"
        " look at, and all that follow",
        make,
        by_attention=True,
    )
