"""Heads come out of every layout and go back bit for bit, and what is called free is free.

Over every class of the zoo: changing all that its freedom allows leaves the logits as they are, and
changing what is called fixed does not.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from scrambling import open_model, scramble, scramble_keys, scramble_values, spread
from zoo import ZOO, build, largest_difference, logits

from gqaconvert.surgery.layer_tensors import mean_rows, move_rows, query_order, rounded

SAME = 2e-4
"""Rounding of float32 weights, in standard deviations of the logits; experts that are nearly as
likely as others magnify it."""

NOT_REACHED = {"dbrx"}
"""Its clipping at 8 is not reached by so small a model."""


def fewest_but_several(name: str) -> int:
    return ZOO[name].legal[1] if ZOO[name].legal[1] > 1 else ZOO[name].legal[0]


@pytest.mark.parametrize("name", ZOO)
def test_heads_go_back_bit_for_bit_and_what_is_free_is_free(name):
    opened = open_model(build(name, num_kv_heads=fewest_but_several(name)))
    before = logits(opened.model)
    stored = {key: tensor.clone() for key, tensor in opened.model.state_dict().items()}
    for block, freedom in opened.blocks:
        if freedom.is_calibratable:
            opened.put_heads(block, opened.heads(block, freedom))
    assert all(torch.equal(stored[key], t) for key, t in opened.model.state_dict().items())

    scramble(opened)
    assert largest_difference(logits(opened.model), before) <= SAME * spread(before)

    for role, change in (("keys", scramble_keys), ("values", scramble_values)):
        opened.model.load_state_dict(stored)
        rng = np.random.default_rng(1)
        changed = False
        for block, freedom in opened.blocks:
            fixed = getattr(freedom, f"{role}_fixed") and freedom.unread is None
            if fixed and reads_plainly(block, opened):
                opened.put_heads(block, change(opened.heads(block, freedom), rng))
                changed = True
        if changed and name not in NOT_REACHED:
            assert largest_difference(logits(opened.model), before) > 1e-3 * spread(before)


def reads_plainly(block, opened) -> bool:
    """Whether the block is stored as heads alone: no gate among the queries, values of its own."""
    if "qkv" in block.stems:
        return True
    rows = opened.read(f"{block.stems['q']}.weight").shape[0]
    return "v" in block.stems and rows == block.num_heads * block.head_dim


@pytest.mark.parametrize(
    ("name", "rotary"),
    [
        ("llama", [8, 8]),
        ("glm", [8, 8]),  # half of 16
        ("stablelm", [2, 2]),  # a quarter of 8
        ("smollm3", [8, 0]),  # the second layer has no positions
        ("cohere2", [8, 8, 8, 0]),
        ("cohere_compass_text", [16, 0]),
        ("falcon-old-alibi", [0, 0]),
        ("gpt_bigcode", [0, 0]),
        ("llama4_text", [16, 0]),
    ],
)
def test_dimensions_that_rope_turns_are_known_layer_by_layer(name, rotary):
    assert [freedom.rotary_dims for _, freedom in open_model(build(name)).blocks] == rotary


def test_planes_pair_halves_or_neighbours_of_the_rotary_part():
    (_, halves), *_ = open_model(build("phi")).blocks
    assert halves.planes() == [(0, 2), (1, 3)]
    (_, adjacent), *_ = open_model(build("glm")).blocks
    assert adjacent.planes() == [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("qwen3", "keys are normalised"),
        ("bitnet", "head outputs are normalised together"),
        ("afmoe", "gated element by element"),
        ("gemma3n_text", "values are normalised"),
        ("dbrx", "clipped"),
        ("zamba", "one block serves several layers"),
    ],
)
def test_what_is_not_free_is_said(name, what):
    freedoms = [freedom for _, freedom in open_model(build(name)).blocks]
    assert all(what in freedom.reason for freedom in freedoms)


def test_layers_that_read_images_are_left_out():
    opened = open_model(build("mllama"))
    assert [freedom.is_calibratable for _, freedom in opened.blocks] == [True, False, True]


def test_heads_stay_where_an_indexer_norm_modules_or_slopes_tell_them_apart():
    for name in ("minimax_m3_vl_text-sparse", "stablelm-qk_norm", "falcon-old-alibi"):
        assert any(freedom.heads_fixed for _, freedom in open_model(build(name)).blocks)


def test_query_heads_follow_their_kv_heads():
    assert query_order([(2, 0), (1, 3)], 8) == [4, 5, 0, 1, 2, 3, 6, 7]
    rows = np.arange(8.0)
    assert move_rows(rows, [(1,), (0,)], 4).tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert mean_rows(rows, [(0, 2), (1, 3)], 4).tolist() == [2, 3, 4, 5]


def test_bfloat16_is_rounded_once():
    half_way = 1 + 2.0**-8
    exact = np.array([half_way + 2.0**-40, half_way, half_way - 2.0**-40, -half_way - 2.0**-40])
    found = rounded(exact, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
    assert found.tolist() == [1 + 2.0**-7, 1, 1, -1 - 2.0**-7]
    assert (exact.astype(ml_dtypes.bfloat16).astype(np.float64) == 1).sum() == 3  # rounds twice
