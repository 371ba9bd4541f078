"""`--attn packed`: the same results as sdpa, with every KV head read once."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from gqaconvert.evaluation.cache_kinds import cache_kind
from gqaconvert.modelling import packed_attention as packed_module
from gqaconvert.modelling.models import load_model
from gqaconvert.modelling.packed_attention import packed_attention
from gqaconvert.surgery.in_memory import convert_model


def step(loaded, kind: str = "dynamic", padded: bool = False) -> torch.Tensor:
    """Logits of a step after a prompt, in a batch whose second text may be shorter."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 2048, (2, 21), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :9] = 0
    cache = cache_kind(kind).make(loaded, 24)
    with torch.inference_mode():
        loaded.model(ids[:, :20], attention_mask=mask[:, :20], cache=cache)
        return loaded.model(ids[:, 20:], attention_mask=mask, cache=cache).logits


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
@pytest.mark.parametrize("kind", ["dynamic", "static", "sliding:12"])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_are_those_of_sdpa(kv_heads, kind, padded):
    logits = []
    for attn in ("sdpa", "packed"):
        loaded = load_model("tiny", dtype="float32", attn=attn)
        if kv_heads < 8:
            loaded.model = convert_model(loaded.model, num_kv_heads=kv_heads)
            loaded.model.set_attn_implementation(loaded.model.config._attn_implementation)
        logits.append(step(loaded, kind, padded))
    assert logits[1] == pytest.approx(logits[0], abs=2e-5)


def test_masks_of_every_form_hold():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, n, 8) for heads, n in ((6, 1), (3, 7), (3, 7)))
    may_look = torch.rand(2, 6, 1, 7) > 0.4
    may_look[..., 0] = True
    added = torch.zeros(2, 6, 1, 7).masked_fill(~may_look, float("-inf"))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), attn_mask=may_look
    ).transpose(1, 2)
    module = torch.nn.Module()
    for mask in (may_look, added):
        found = packed_attention(module, query, key, value, mask)[0]
        assert torch.allclose(found, expected, atol=1e-6)
    shared = may_look[:, :1]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), attn_mask=shared
    ).transpose(1, 2)
    found = packed_attention(module, query, key, value, shared)[0]
    assert torch.allclose(found, expected, atol=1e-6)


def test_it_is_in_use_for_steps_and_sdpa_for_prompts(monkeypatch):
    calls = []
    sdpa = packed_module.sdpa_attention_forward

    def watched(module, query, *rest, **options):
        calls.append(query.shape[2])
        return sdpa(module, query, *rest, **options)

    monkeypatch.setattr(packed_module, "sdpa_attention_forward", watched)
    loaded, cache = load_model("tiny", attn="packed"), DynamicCache()
    with torch.inference_mode():
        loaded.model(torch.ones(1, 3, dtype=torch.long), cache=cache)
        assert calls == [3] * 4  # one a layer
        loaded.model(torch.ones(1, 1, dtype=torch.long), cache=cache)
        assert calls == [3] * 4
