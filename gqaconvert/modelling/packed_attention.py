"""`--attn packed`: a decoding step reads every KV head once, however many query heads share it.

torch's fused attention on CPUs goes through the query heads one by one, with or without
`enable_gqa`, so that fewer KV heads save memory but hardly any time. Here the query heads of a
group become the rows of one product with their KV head. Prompts go through sdpa as ever.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

NAME = "gqaconvert_packed"
"""What transformers calls it."""

_OTHERWISE = ("position_bias", "softcap", "s_aux")
"""Arguments of classes that do more than attention; they are left to sdpa."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, None]:
    """Attend with one query a head to all keys, in transformers' form.

    Args:
        module: the attention module.
        query: (B, H, 1, D); longer ones go to sdpa.
        key: (B, K, T, D).
        value: (B, K, T, D).
        attention_mask: (B or 1, 1 or H, 1, T), true where attention may look or else added to
            scores.
        scaling: of the products; D to the power of -1/2 by default.
        options: for sdpa.

    Returns:
        (B, 1, H, D), and no weights.
    """
    batch, heads, count, width = query.shape
    if count != 1 or any(options.get(name) is not None for name in _OTHERWISE):
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return result
    kv_heads = key.shape[1]
    packed = query.reshape(batch, kv_heads, heads // kv_heads, width)
    scores = packed @ key.transpose(-1, -2)
    scores = scores.float() * (width**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        mask = attention_mask[..., : key.shape[2]]
        if mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], kv_heads, heads // kv_heads, -1)
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
    weights = scores.softmax(dim=-1).to(query.dtype)
    output = weights @ value
    return output.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
