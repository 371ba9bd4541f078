"""What was one head before it was repeated and disguised is found again, in every layout.

A grouped-query model is expanded to all heads, every head is changed by what leaves the model's
results as they are, and heads are shuffled. `svd` with `similarity` gives back the first model's
logits from second moments of the inputs alone; averaging is far off.
"""

from __future__ import annotations

import pytest
from scrambling import gather_inputs, open_model, scramble, spread
from zoo import ZOO, build, largest_difference, logits

import gqaconvert

EXACT = 1e-4
"""In standard deviations of the logits, in float32; 4e-6 was the most that was seen."""

NOTHING_FREE = {
    "afmoe", "beam", "dbrx", "dory", "gemma3n_text", "gemma4_text", "gemma4_text-k_is_v",
    "gemma4_text-moe", "gemma4_unified_text", "olmo-clip", "qwen3_5", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "zamba", "zamba2",
}  # fmt: skip
"""Keys and values are normalised, gated, clipped or shared by layers: they can only be averaged."""


@pytest.mark.parametrize("name", [name for name in ZOO if name not in NOTHING_FREE])
def test_disguised_heads_are_found_again(name):
    all_heads, kv_heads = ZOO[name].legal[:2]
    model = build(name, num_kv_heads=kv_heads)
    before = logits(model)
    wide = open_model(gqaconvert.convert_model(model, num_kv_heads=all_heads))
    assert scramble(wide)
    assert largest_difference(logits(wide.model), before) <= EXACT * spread(before)

    found = gqaconvert.convert_model(
        wide.model,
        num_kv_heads=kv_heads,
        statistics=gather_inputs(wide),
        grouping="similarity",
    )
    assert largest_difference(logits(found), before) <= EXACT * spread(before)
    mean = gqaconvert.convert_model(wide.model, num_kv_heads=kv_heads)
    assert largest_difference(logits(mean), before) > 0.5 * spread(before)


@pytest.mark.parametrize("name", sorted(NOTHING_FREE))
def test_where_nothing_is_free_heads_are_averaged(name):
    opened = open_model(build(name))
    assert not any(freedom.is_calibratable for _, freedom in opened.blocks)
    kv_heads = ZOO[name].legal[1]
    found = gqaconvert.convert_model(opened.model, num_kv_heads=kv_heads, statistics={})
    mean = gqaconvert.convert_model(opened.model, num_kv_heads=kv_heads)
    for key, tensor in mean.state_dict().items():
        assert found.state_dict()[key].equal(tensor), key
