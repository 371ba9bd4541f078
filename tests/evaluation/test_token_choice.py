"""Which tokens H2O and SnapKV keep, held against their papers on attention made by hand."""

from __future__ import annotations

import loaded_zoo
import pytest
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st

from gqaconvert.evaluation.cache_kinds import cache_kind, watched_attention
from gqaconvert.evaluation.cache_kinds.h2o import H2OLayer, heavy_hitters
from gqaconvert.evaluation.cache_kinds.snapkv import SnapKVLayer, voted_places
from gqaconvert.evaluation.cache_kinds.watched_attention import column_sums


def numbered(begin: int, end: int) -> torch.Tensor:
    """Keys (1, 1, T, 1) that say which token they are."""
    return torch.arange(begin, end, dtype=torch.float32)[None, None, :, None]


def kept(layer) -> list[int]:
    assert torch.equal(layer.keys, layer.values)
    return layer.keys[0, 0, :, 0].int().tolist()


def feed(layer, begin: int, attention: torch.Tensor) -> None:
    """Let a layer take tokens and see attention (queries, kept and new tokens)."""
    states = numbered(begin, begin + len(attention))
    layer.update(states, states.clone())
    if rows := layer.rows_wanted(len(attention)):
        layer.observe(attention[-rows:].sum(dim=0)[None, None].clone())


def greedy(attention: list[dict[int, float]], heavy: int, recent: int) -> list[set[int]]:
    """The policy of the paper, word for word: attend, accumulate, evict the least, step by step.

    `attention[i]` holds what token i gives to each token; only tokens still kept draw any.
    """
    held: list[int] = []
    score: dict[int, float] = {}
    history = []
    for token, weights in enumerate(attention):
        held.append(token)
        for each in held:
            score[each] = score.get(each, 0.0) + weights[each]
        while len(held) > heavy + recent:
            old = held[: len(held) - recent]
            held.remove(min(old, key=lambda each: score[each]))
        history.append(set(held))
    return history


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.integers(2, 7))
def test_h2o_decodes_as_the_paper_says(seed, budget):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(14, 14, generator=generator)
    layer = H2OLayer(budget)
    seen = []
    for token in range(14):
        held = [*(kept(layer) if layer.seen else []), token]
        feed(layer, token, weights[token, held][None])
        seen.append(set(kept(layer)))
    rows = [{key: float(weights[token, key]) for key in range(14)} for token in range(14)]
    assert seen == greedy(rows, budget // 2, budget - budget // 2)


def test_h2o_keeps_heavy_and_recent_tokens_of_a_prompt():
    attention = torch.full((6, 6), 0.01).tril()
    attention[:, 1] = 0.9
    attention[:2, 0] = 0.02  # drew more than 2 and 3, less than 1
    layer = H2OLayer(4)
    feed(layer, 0, attention)
    assert kept(layer) == [0, 1, 4, 5]
    # 4 is no longer recent and has drawn more than 0 by now.
    feed(layer, 6, torch.tensor([[0.0, 0.3, 0.2, 0.1, 0.4]]))
    assert kept(layer) == [1, 4, 5, 6]


def test_h2o_scores_stay_with_their_tokens():
    layer = H2OLayer(2)
    feed(layer, 0, torch.tensor([[5.0, 0, 0], [0, 3.0, 0], [0, 0, 1.0]]))
    assert kept(layer) == [0, 2]
    assert layer.scores[0, 0].tolist() == [5.0, 1.0]
    feed(layer, 3, torch.tensor([[0.5, 9.0, 2.0]]))
    assert kept(layer) == [2, 3]
    assert layer.scores[0, 0].tolist() == [10.0, 2.0]


def test_kv_heads_choose_for_themselves():
    scores = torch.tensor([[[9.0, 1, 1, 1], [1, 9.0, 1, 1]]])
    assert heavy_hitters(scores, 1, 1).tolist() == [[[0, 3], [1, 3]]]


def test_snapkv_keeps_what_the_last_tokens_look_at_and_its_neighbours():
    length, window = 40, 4
    attention = torch.full((length, length), 1e-4).tril()
    attention[:-window, 5] = 1.0  # early tokens look here: no vote
    attention[-window:, 20] = 1.0
    layer = SnapKVLayer(11)
    layer.window = window
    feed(layer, 0, attention)
    assert kept(layer) == [17, 18, 19, 20, 21, 22, 23, 36, 37, 38, 39]


def test_snapkv_cuts_the_prompt_once():
    layer = SnapKVLayer(8)
    feed(layer, 0, torch.rand(20, 20, generator=torch.Generator().manual_seed(0)).tril())
    before = kept(layer)
    assert len(before) == 8
    for token in range(20, 25):
        feed(layer, token, torch.rand(1, len(kept(layer)) + 1))
    assert kept(layer) == [*before, *range(20, 25)]


def test_snapkv_leaves_a_prompt_that_fits():
    layer = SnapKVLayer(8)
    feed(layer, 0, torch.rand(8, 8).tril())
    assert kept(layer) == list(range(8))


def test_the_observation_window_itself_stays():
    votes = torch.zeros(1, 1, 16)
    votes[..., 0] = 1
    [[places]] = voted_places(votes, 8, 4).tolist()
    assert places == [0, 1, 2, 3, 12, 13, 14, 15]


@pytest.mark.parametrize("mask", ["none", "bool", "added", "bool by head"])
@pytest.mark.parametrize("rows", [5, 2])
def test_columns_are_sums_of_softmax_rows(mask, rows, monkeypatch):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 6, 5, 8, generator=generator)
    key = torch.randn(2, 3, 9, 8, generator=generator)
    visible = torch.ones(5, 9, dtype=torch.bool).tril(4)
    scores = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) * 0.3
    weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    expected = weights[:, :, -rows:].sum(dim=2).view(2, 3, 2, 9).sum(dim=2)
    given_mask = {
        "none": None,
        "bool": visible[None, None],
        "added": torch.zeros(5, 9).masked_fill(~visible, torch.finfo(torch.float32).min)[
            None, None
        ],
        "bool by head": visible.expand(2, 6, 5, 9),
    }[mask]
    for elements in (2**24, 2 * 6 * 9 * 2):  # all at once, and two rows at a time
        monkeypatch.setattr(watched_attention, "_SLICE_ELEMENTS", elements)
        got = column_sums(query, key, given_mask, rows=rows, scaling=0.3)
        assert torch.allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "cohere2", "qwen3"])
def test_accumulated_attention_is_that_of_the_model(name, attn):
    loaded = loaded_zoo.load(name, attn)
    ids = zoo.inputs(loaded.model, length=9)["input_ids"]
    cache = cache_kind("h2o:64").make(loaded, 9)
    with torch.inference_mode():
        loaded.model(input_ids=ids[:, :6], cache=cache, use_cache=True)
        for place in range(6, 9):
            loaded.model(input_ids=ids[:, place : place + 1], cache=cache, use_cache=True)
        loaded.model.set_attn_implementation("eager")
        weights = loaded.model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    watched = [(n, layer) for n, layer in enumerate(cache.layers) if isinstance(layer, H2OLayer)]
    assert watched
    for number, layer in watched:
        kv_heads = layer.keys.shape[1]
        expected = weights[number].sum(dim=2).unflatten(1, (kv_heads, -1)).sum(dim=2)
        assert torch.allclose(layer.scores, expected, atol=1e-5)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_votes_are_the_attention_of_the_last_tokens(name, attn):
    loaded = loaded_zoo.load(name, attn)
    ids = zoo.inputs(loaded.model, length=30)["input_ids"]
    cache, full = (cache_kind(spec).make(loaded, 30) for spec in ("snapkv:12", "dynamic"))
    with torch.inference_mode():
        for each in (cache, full):
            loaded.model(input_ids=ids, cache=each, use_cache=True)
        loaded.model.set_attn_implementation("eager")
        weights = loaded.model(input_ids=ids, use_cache=False, output_attentions=True).attentions
    for number, layer in enumerate(cache.layers):
        every = full.layers[number].keys
        votes = weights[number][:, :, -6:].sum(dim=2).unflatten(1, (every.shape[1], -1)).sum(dim=2)
        places = voted_places(votes, 12, 6)
        index = places[..., None].expand(*places.shape, every.shape[-1])
        assert torch.equal(layer.keys, every.gather(2, index))
