"""Cache layers that drop tokens: what is common to sinks, H2O and SnapKV.

Positions: keys are kept as the model rotated them, at the place the token has in the text, and a
new token is rotated at its own place. H2O and SnapKV do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from gqaconvert.errors import UsageError
from gqaconvert.evaluation.cache_kinds.kind import CacheUnavailable
from gqaconvert.evaluation.cache_kinds.layers import decoder_config
from gqaconvert.modelling.models import LoadedModel


class DroppingLayer(DynamicLayer):
    """Keys and values of some tokens, (B, K, kept, D), which may differ from head to head.

    What is kept stands before what is new, so that everything kept is visible to every new token.
    Texts of a batch must be equally long: padding cannot be told from text once tokens are gone.
    """

    keys: torch.Tensor
    values: torch.Tensor
    is_croppable = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    @property
    def kept(self) -> int:
        """Tokens held."""
        return self.keys.shape[-2] if self.is_initialized and self.keys.dim() == 4 else 0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, and return what attention reads now: what was kept, and them."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.seen += key_states.shape[-2]
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens seen, from which models derive positions."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys to mask and where they begin: as if the last tokens before the new were kept."""
        return self.kept + query_length, self.seen - self.kept

    def keep(self, places: torch.Tensor) -> None:
        """Drop all tokens but those at `places`, (B, K, n), ascending."""
        self.keys = _gather(self.keys, places)
        self.values = _gather(self.values, places)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.seen = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Cannot be done: what was dropped does not come back."""
        raise UsageError(
            f"a cache that drops tokens cannot take back {abs(tokens_to_remove)} of them",
            remedy="the kind dynamic",
        )


def refuse_places_in_cache(loaded: LoadedModel) -> None:
    """Refuse models that take a token's place in the cache for its place in the text.

    Raises:
        CacheUnavailable: ALiBi adds a bias by place, GPT-Neo cuts its windows by place.
    """
    config = decoder_config(loaded)
    attention = getattr(config, "attn_config", None)
    biased = config.model_type == "bloom" or any(
        getattr(each, "alibi", False) for each in (config, attention)
    )
    if biased or config.model_type == "gpt_neo":
        how = "ALiBi adds a bias" if biased else "GPT-Neo cuts its windows"
        raise CacheUnavailable(
            f"{how} by a token's place in the cache, which changes once others are dropped",
            at=loaded.name,
        )


def recent_places(length: int, recent: int, like: torch.Tensor) -> torch.Tensor:
    """Return the last `recent` of `length` places, (B, K, recent), for places like `like`."""
    places = torch.arange(length - recent, length, device=like.device)
    return places.expand(*like.shape[:-1], recent)


def _gather(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return states.gather(2, places[..., None].expand(*places.shape, states.shape[-1]))
