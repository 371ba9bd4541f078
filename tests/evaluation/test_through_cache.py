"""Perplexity through a cache: the plain one where nothing is lost, and worse where something is."""

from __future__ import annotations

import math

import loaded_zoo
import pytest
import torch
from transformers.cache_utils import DynamicLayer

from gqaconvert.corpus.text import load_text
from gqaconvert.corpus.windows import Window, strided_windows
from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.evaluation.cache_kinds import CacheKind, CacheUnavailable, cache_kind
from gqaconvert.evaluation.cache_kinds.layers import swap_layers
from gqaconvert.evaluation.through_cache import perplexity_through_cache
from gqaconvert.modelling.models import load_model

PREFILL = 128


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", dtype="float32")


@pytest.fixture(scope="module")
def windows(tiny):
    return strided_windows(tiny.tokenizer, load_text("bundled"), length=160, limit=3)


def plain(loaded, windows, first: int) -> float:
    """Perplexity by the shortest code there is, over tokens from `first` on."""
    losses = []
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor([window.token_ids])
            logits = loaded.model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
            for place in range(max(first, window.first_scored), ids.shape[1]):
                losses.append(-logits[0, place - 1, ids[0, place]].item())
    return math.exp(math.fsum(losses) / len(losses))


def made_windows(vocabulary: int = 90) -> list[Window]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(7, vocabulary, (4, 16), generator=generator).tolist()
    return [
        Window(ids[0], 1, 10),
        Window(ids[1], 13, 10),
        Window(ids[2][:14], 1, 10),
        Window(ids[3], 1, 10),
    ]


@pytest.mark.parametrize("kind", ["dynamic", "static", "sliding:500", "sinks:4+500"])
def test_what_loses_nothing_gives_plain_perplexity(kind, tiny, windows):
    got = perplexity_through_cache(tiny, windows, cache_kind(kind), prefill=PREFILL)
    assert got.value == pytest.approx(plain(tiny, windows, PREFILL + 1), abs=1e-3)
    assert got.n == 3
    assert got.metric == f"cache/{kind}"
    assert got.detail["tokens"] == 3 * (160 - PREFILL - 1)
    assert got.stderr > 0
    assert got.detail["decode_tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("name", "attn"),
    [
        ("llama", "sdpa"), ("gpt_neox", "sdpa"), ("qwen3_next", "sdpa"), ("gemma2", "eager"),
        ("gemma3n_text-shared", "sdpa"), ("mistral", "sdpa"), ("gpt_oss", "eager"),
        ("llama4_text", "sdpa"), ("opt", "eager"), ("granite", "sdpa"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_classes_of_all_sorts_agree_with_the_plain_loop(name, attn, kind):
    loaded = loaded_zoo.load(name, attn)
    windows = made_windows()
    expected = plain(loaded, windows, 9)
    for batch_size in (1, 2):
        got = perplexity_through_cache(
            loaded, windows, cache_kind(kind), prefill=8, batch_size=batch_size
        )
        assert math.log(got.value) == pytest.approx(math.log(expected), abs=1e-4)


def test_fewer_bits_are_further_from_the_source(tiny, windows):
    exact = perplexity_through_cache(tiny, windows, cache_kind("dynamic"), prefill=PREFILL)
    change = {}
    for element in ("int8", "int4", "int2"):
        kind = cache_kind(f"quantised:{element}")
        got = perplexity_through_cache(tiny, windows, kind, prefill=PREFILL)
        change[element] = abs(got.detail["nll"] - exact.detail["nll"])
        assert got.detail["cache_bytes"] < exact.detail["cache_bytes"]
    assert change["int8"] < 2e-3
    assert change["int8"] < change["int4"] < change["int2"]


def test_dropping_most_of_a_text_is_seen(tiny, windows):
    def nll(kind):
        return perplexity_through_cache(tiny, windows, cache_kind(kind), prefill=PREFILL).detail[
            "nll"
        ]

    exact = nll("dynamic")
    for kind in ("sliding:8", "h2o:8", "snapkv:8", "sinks:2+6"):
        assert nll(kind) > exact + 0.05, kind


def test_the_cache_is_what_is_read(tiny, windows):
    class Forgetful(DynamicLayer):
        def update(self, key_states, value_states, *args, **kwargs):
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            if key_states.shape[-2] > 1:
                return keys, values
            past = values.clone()
            past[:, :, :-1] = 0
            return keys, past

    kind = CacheKind("forgetful", "nothing", lambda loaded, _: swap_layers(loaded, full=Forgetful))
    got = perplexity_through_cache(tiny, windows, kind, prefill=PREFILL)
    assert got.value > 1.5 * plain(tiny, windows, PREFILL + 1)


def test_texts_that_are_decoded_together_give_the_same(tiny, windows):
    kind = cache_kind("h2o:48")
    alone = perplexity_through_cache(tiny, windows, kind, prefill=PREFILL)
    together = perplexity_through_cache(tiny, windows, kind, prefill=PREFILL, batch_size=3)
    assert together.detail["nll"] == pytest.approx(alone.detail["nll"], abs=1e-4)
    assert together.detail["cache_bytes"] == alone.detail["cache_bytes"]


def test_bytes_are_those_of_one_text_at_its_end(tiny, windows):
    got = perplexity_through_cache(tiny, windows, cache_kind("dynamic"), prefill=PREFILL)
    row = 2 * 4 * 8 * 32 * 4  # keys and values, layers, KV heads, head_dim, bytes
    assert got.detail["tokens_seen"] == 159
    assert got.detail["cache_bytes"] == got.detail["cache_bytes_kept"] == 159 * row


def test_windows_with_nothing_to_score_are_left_out(tiny, windows):
    short = Window(windows[0].token_ids[: PREFILL + 1], 1, 1)
    kind = cache_kind("dynamic")
    got = perplexity_through_cache(tiny, [short, windows[0]], kind, prefill=PREFILL)
    assert got.n == 1
    assert got.stderr is None
    with pytest.raises(UsageError, match="no window has a token to score"):
        perplexity_through_cache(tiny, [short], kind, prefill=PREFILL)
    with pytest.raises(UsageError, match="prompt of 0"):
        perplexity_through_cache(tiny, windows, kind, prefill=0)


def test_progress_reaches_its_end(tiny, windows):
    seen = []
    perplexity_through_cache(
        tiny, windows, cache_kind("dynamic"), prefill=150,
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(9, 27), (18, 27), (27, 27)]


def test_a_kind_that_cannot_work_says_so_before_anything_is_read(windows):
    with pytest.raises(CacheUnavailable):
        perplexity_through_cache(
            loaded_zoo.load("mistral"), windows, cache_kind("h2o:4"), prefill=PREFILL
        )


def test_a_model_that_gives_no_numbers_is_not_measured():
    loaded = loaded_zoo.load("llama")
    with torch.no_grad():
        loaded.model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(GqaconvertError, match="not numbers"):
        perplexity_through_cache(loaded, made_windows(), cache_kind("dynamic"), prefill=8)
