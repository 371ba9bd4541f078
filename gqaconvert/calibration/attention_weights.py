"""Computes what attention weights do to second moments, without ever holding all of them.

With X the inputs of a window (T, M+1) and A_h the weights of query head h (T, T), z = A_h X is what
the head averages, so Σ_h Σ_i z_i z_iᵀ = Xᵀ (Σ_h A_hᵀ A_h) X: two (T, T) sums over heads say all,
and no head's z is needed. Weights are computed a second time from queries and keys, in blocks of
queries; the model's own attention gives the output, against which the weights are checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gqaconvert.errors import UnsupportedModelError
from gqaconvert.modelling.classes import quiet_transformers

_NAME = "gqaconvert_weighed_{}"
_BLOCK_ELEMENTS = 2**24
_BLOCK_QUERIES = 128
_CHECKED_QUERIES = 16
_LARGEST_DEVIATION = 3e-2
"""Relative to the output's size: bfloat16 attention rounds, another formula is off by far more."""


@dataclass
class WeightSums:
    """Attention weights of one call summed up.

    Attributes:
        shared: (B, T, T), Σ_h A_hᵀ A_h.
        received: (B, T), the weight that each token receives, over heads and queries.
        heads: H.
    """

    shared: torch.Tensor
    received: torch.Tensor
    heads: int


@dataclass
class Scale:
    """A scale that takes the sums of one attention module.

    Attributes:
        last: of the latest call.
        calls: so far.
        fault: why sums cannot be had, None while they can.
    """

    last: WeightSums | None = None
    calls: int = 0
    fault: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


_scales: dict[torch.nn.Module, Scale] = {}


@contextmanager
def weighing(model: Any) -> Iterator[None]:  # noqa: ANN401
    """Let attention of a model report to scales; its results stay the same.

    Classes that do not call attention through transformers' interface never report.
    """
    before = model.config.get_text_config(decoder=True)._attn_implementation
    name = _NAME.format(before)
    base = None if before == "eager" else ALL_ATTENTION_FUNCTIONS[before]
    AttentionInterface.register(name, _weighed(base))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    try:
        with quiet_transformers():
            model.set_attn_implementation(name)
        yield
    finally:
        with quiet_transformers():
            model.set_attn_implementation(before)


@contextmanager
def on_scale(module: torch.nn.Module) -> Iterator[Scale]:
    """Weigh the attention of one module."""
    scale = _scales[module] = Scale()
    try:
        yield scale
    finally:
        del _scales[module]


def sum_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, Any],
    check: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> WeightSums:
    """Sum attention weights over heads, in float32.

    Args:
        query: (B, H, T, D).
        key: (B, K, T, D).
        mask: (B or 1, H or 1, T, T), true where attention may look or else added to scores; None
            for causal attention.
        options: of transformers' attention interface: scaling, softcap, s_aux, position_bias.
        check: values (B, K, T, Dv) and the attention's own output (B, T, H, Dv), to compare the
            weights with.

    Raises:
        UnsupportedModelError: the weights do not give that output.
    """
    batch, heads, length, _ = query.shape
    shared = query.new_zeros((batch, length, length), dtype=torch.float32)
    received = query.new_zeros((batch, length), dtype=torch.float32)
    step = max(1, min(_BLOCK_QUERIES, _BLOCK_ELEMENTS // (batch * heads * length)))
    for begin in range(0, length, step):
        end = min(begin + step, length)
        seen = _keys_seen(mask, begin, end, length)
        weights = _weights(query[:, :, begin:end], key[:, :, :seen], mask, begin, options)
        if check is not None:
            _compare(weights, check[0][:, :, :seen], check[1][:, begin:end])
        rows = weights.flatten(1, 2)
        shared[:, :seen, :seen].baddbmm_(rows.transpose(1, 2), rows)
        received[:, :seen] += rows.sum(1)
    return WeightSums(shared, received, heads)


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    begin: int,
    options: dict[str, Any],
) -> torch.Tensor:
    """Weights (B, H, Q, seen) of the queries from `begin` on, in float32."""
    batch, heads, count, width = query.shape
    kv_heads, seen = key.shape[1], key.shape[2]
    packed = query.reshape(batch, kv_heads, -1, width)
    scaling = options.get("scaling")
    scores = (packed @ key.transpose(-1, -2)).float() * (
        width**-0.5 if scaling is None else scaling
    )
    scores = scores.view(batch, heads, count, seen)
    softcap = options.get("softcap")
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    bias = options.get("position_bias")
    if bias is not None:
        scores = scores + bias[:, :, begin : begin + count, :seen].float()
    lowest = torch.finfo(torch.float32).min
    if mask is None:
        keys = torch.arange(seen, device=key.device)
        queries = torch.arange(begin, begin + count, device=key.device)
        scores = scores.masked_fill(keys > queries[:, None], lowest)
    else:
        part = mask[:, :, begin : begin + count, :seen]
        hides = part.dtype == torch.bool
        scores = scores.masked_fill(~part, lowest) if hides else scores + part.float()
    sinks = options.get("s_aux")
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(batch, heads, count, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights: torch.Tensor = scores.softmax(dim=-1)[..., :seen]
    return weights


def _keys_seen(mask: torch.Tensor | None, begin: int, end: int, length: int) -> int:
    """How many keys, from the first on, the queries of a block may look at."""
    if mask is None:
        return end
    later = mask[:, :, begin:end, end:length]
    visible = later if later.dtype == torch.bool else later > torch.finfo(later.dtype).min / 2
    return length if bool(visible.any()) else end


def _compare(weights: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
    """Refuse weights (B, H, Q, seen) that do not give an output (B, Q, H, Dv)."""
    batch, heads, _, seen = weights.shape
    some = weights[:, :, :_CHECKED_QUERIES]
    count = some.shape[2]
    packed = some.reshape(batch, value.shape[1], -1, seen)
    expected = (packed @ value.float()).view(batch, heads, count, -1).transpose(1, 2)
    found = output[:, :count].float()
    same = expected.shape == found.shape
    deviation = float((expected - found).norm() / found.norm().clamp_min(1e-20)) if same else 1.0
    if deviation > _LARGEST_DEVIATION:
        raise UnsupportedModelError(
            f"attention is not a softmax of scaled products of the usual form (off by"
            f" {deviation:.2g})"
        )


def _weighed(base: Callable[..., Any] | None) -> Callable[..., Any]:
    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        forward = _own_eager(module) if base is None else base
        result = forward(module, query, key, value, attention_mask, **options)
        scale = _scales.get(module)
        if scale is not None and scale.fault is None:
            check = (value, result[0]) if scale.calls == 0 else None
            try:
                scale.last = sum_weights(query, key, attention_mask, options, check)
            except UnsupportedModelError as error:
                scale.fault = error.what
            scale.calls += 1
        return result

    return attention


def _own_eager(module: torch.nn.Module) -> Callable[..., Any]:
    """Find the eager attention of a module's class, which stands beside it in its file."""
    for each in type(module).__mro__:
        found = getattr(sys.modules[each.__module__], "eager_attention_forward", None)
        if found is not None:
            return found  # type: ignore[no-any-return]
    raise UnsupportedModelError(
        f"{type(module).__name__} has no eager attention in transformers' usual form"
    )
