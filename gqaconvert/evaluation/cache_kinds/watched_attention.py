"""Lets cache layers see how much attention each token draws, whatever the model's class.

A layer marks the keys it hands out; attention that reads marked keys reports to the layer. Models
that call attention through transformers' `AttentionInterface` can be watched: under sdpa, which
keeps no weights, the rows that are wanted are computed a second time from queries and keys, in
slices; under eager attention the weights are there already. Results of the model do not change.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gqaconvert.evaluation.cache_kinds.kind import CacheUnavailable
from gqaconvert.evaluation.cache_kinds.layers import decoder_config, swap_layers
from gqaconvert.modelling.classes import quiet_transformers
from gqaconvert.modelling.models import LoadedModel

_MARK = "_gqaconvert_observer"
_NAME = "gqaconvert_watched_{}"
_SLICE_ELEMENTS = 2**24
_LARGEST_CHANGE = 1e-3

_watched: weakref.WeakSet[Any] = weakref.WeakSet()


class AttentionObserver(Protocol):
    """Something that wants to know how much attention tokens draw."""

    def rows_wanted(self, queries: int) -> int:
        """Return how many of the last queries count; 0 for none, and no report."""

    def observe(self, columns: torch.Tensor) -> None:
        """Take the weights summed over those queries and the heads of a group: (B, K, T), fp32."""


def report_to(observer: AttentionObserver, keys: torch.Tensor) -> None:
    """Mark keys, so that attention over them is reported to `observer`."""
    setattr(keys, _MARK, observer)


def never_observed() -> CacheUnavailable:
    """Return the error of a layer that was asked to go on without having seen attention."""
    return CacheUnavailable(
        "attention over the tokens of this cache was not seen",
        remedy="make the cache by its kind, for the model that uses it",
    )


def column_sums(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    rows: int,
    scaling: float | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum attention weights over the last `rows` queries and the query heads of each KV head.

    Args:
        query: (B, H, Q, D).
        key: (B, K, T, D).
        mask: (B or 1, H or 1, Q, T), true where attention may look or else added to scores; None
            for causal attention whose last query is the last key.
        rows: how many queries.
        scaling: of the products; D to the power of -1/2 by default.
        bias: added to scores, of the mask's shape.

    Returns:
        (B, K, T) in fp32.
    """
    batch, heads, count, width = query.shape
    kv_heads, length = key.shape[1], key.shape[2]
    group = heads // kv_heads
    scale = width**-0.5 if scaling is None else scaling
    step = max(1, _SLICE_ELEMENTS // (batch * heads * length))
    total = query.new_zeros((batch, kv_heads, length), dtype=torch.float32)
    for begin in range(count - rows, count, step):
        end = min(begin + step, count)
        part = query[:, :, begin:end].reshape(batch, kv_heads, group * (end - begin), width)
        scores = (part @ key.transpose(-1, -2)).float() * scale
        scores = scores.view(batch, heads, end - begin, length)
        if bias is not None:
            scores = scores + bias[:, :, begin:end]
        hidden = torch.finfo(torch.float32).min
        if mask is None:
            ahead = torch.arange(length, device=key.device) - (length - count)
            queries = torch.arange(begin, end, device=key.device)
            scores = scores.masked_fill(ahead > queries[:, None], hidden)
        elif mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask[:, :, begin:end], hidden)
        else:
            scores = scores + mask[:, :, begin:end]
        total += _by_kv_head(scores.softmax(dim=-1).sum(dim=-2), kv_heads)
    return total


def watch_attention(loaded: LoadedModel) -> None:
    """Switch a model to attention that reports, once, and prove that it does.

    A forward pass of four tokens before and after shows that every layer reports and that the
    logits are the same.

    Raises:
        CacheUnavailable: attention that gives no weights, or a class that does not call it through
            transformers' interface; the model is then as before.
    """
    if loaded.model in _watched:
        return
    before = decoder_config(loaded)._attn_implementation
    if before not in _WATCHED_FORMS:
        raise CacheUnavailable(
            f"{before} attention shows no weights", at=loaded.name, remedy="--attn sdpa or eager"
        )
    expected, _ = _trial(loaded)
    name = _NAME.format(before)
    AttentionInterface.register(name, _WATCHED_FORMS[before])
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    _switch(loaded, name)
    try:
        got, reports = _trial(loaded)
        if not all(reports) or not torch.allclose(
            got, expected, atol=_LARGEST_CHANGE, rtol=_LARGEST_CHANGE
        ):
            raise CacheUnavailable(
                f"{type(loaded.model).__name__} does not pass the cached keys to attention as they"
                " are, so the attention that tokens draw cannot be seen",
                at=loaded.name,
            )
    except CacheUnavailable:
        _switch(loaded, before)
        raise
    _watched.add(loaded.model)


def _switch(loaded: LoadedModel, implementation: str) -> None:
    with quiet_transformers():  # it warns where a class cannot; the trial finds out
        loaded.model.set_attn_implementation(implementation)


class _TrialLayer(DynamicLayer):
    """Counts reports and keeps everything."""

    keys: torch.Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reported = False

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        report_to(self, keys)
        return keys, values

    def rows_wanted(self, queries: int) -> int:
        return queries

    def observe(self, columns: torch.Tensor) -> None:
        self.reported = columns.shape[-1] == self.keys.shape[-2]


def _trial(loaded: LoadedModel) -> tuple[torch.Tensor, list[bool]]:
    """Logits of four tokens, and which layers had a report."""
    cache = swap_layers(loaded, full=_TrialLayer)
    tokens = torch.arange(1, 5, device=loaded.model.device)[None]
    with torch.inference_mode():
        logits = loaded.model(input_ids=tokens, cache=cache, use_cache=True).logits
    layers = [layer for layer in cache.layers if isinstance(layer, _TrialLayer)]
    return logits.float(), [layer.reported for layer in layers]


def _by_kv_head(sums: torch.Tensor, kv_heads: int) -> torch.Tensor:
    return torch.unflatten(sums, 1, (kv_heads, -1)).sum(dim=2)


def _watched_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, torch.Tensor | None]:
    result = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)
    observer: AttentionObserver | None = getattr(key, _MARK, None)
    if observer is not None and (rows := observer.rows_wanted(query.shape[2])):
        observer.observe(
            column_sums(
                query,
                key,
                attention_mask,
                rows=rows,
                scaling=options.get("scaling"),
                bias=options.get("position_bias"),
            )
        )
    return result  # type: ignore[no-any-return]


def _watched_eager(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, torch.Tensor | None]:
    output, weights = _own_eager(module)(module, query, key, value, attention_mask, **options)
    observer: AttentionObserver | None = getattr(key, _MARK, None)
    if observer is not None and (rows := observer.rows_wanted(query.shape[2])):
        sums = weights[:, :, -rows:].sum(dim=-2, dtype=torch.float32)
        observer.observe(_by_kv_head(sums, key.shape[1]))
    return output, weights


def _own_eager(module: torch.nn.Module) -> Callable[..., Any]:
    """Find the eager attention of a module's class, which stands beside it in its file."""
    for each in type(module).__mro__:
        found = getattr(sys.modules[each.__module__], "eager_attention_forward", None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    raise CacheUnavailable(
        f"{type(module).__name__} has no eager attention in transformers' usual form",
        remedy="--attn sdpa",
    )


_WATCHED_FORMS: dict[str, Callable[..., Any]] = {"sdpa": _watched_sdpa, "eager": _watched_eager}
