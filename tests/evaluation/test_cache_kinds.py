"""Cache kinds change what is kept and nothing else: against masks, papers and the plain model."""

from __future__ import annotations

from importlib.util import find_spec

import loaded_zoo
import pytest
import torch
import zoo

from gqaconvert.errors import UsageError
from gqaconvert.evaluation.cache_kinds import FORMS, CacheUnavailable, cache_kind
from gqaconvert.evaluation.cache_kinds.dropping import DroppingLayer
from gqaconvert.evaluation.cache_kinds.h2o import H2OLayer
from gqaconvert.evaluation.cache_kinds.layers import swap_layers

PROMPT, LENGTH = 8, 12
HIDDEN = torch.finfo(torch.float32).min


def read(loaded, cache, prompt: int = PROMPT, rows: slice = slice(None)) -> torch.Tensor:
    """Logits of a prompt and of tokens read one by one after it."""
    ids = zoo.inputs(loaded.model, length=LENGTH)["input_ids"][rows]
    with torch.inference_mode():
        logits = [loaded.model(input_ids=ids[:, :prompt], cache=cache, use_cache=True).logits]
        for place in range(prompt, LENGTH):
            step = ids[:, place : place + 1]
            logits.append(loaded.model(input_ids=step, cache=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1)


def plain(loaded) -> torch.Tensor:
    return zoo.logits(loaded.model, length=LENGTH)


@pytest.mark.parametrize(
    "name",
    [
        "dynamic", "static", "quantised:int8", "quantised:int4:quanto", "quantised:int2:hqq",
        "sliding:1024", "h2o:512", "snapkv:512", "sinks:4+508", "sinks:0+8", "offloaded",
    ],
)  # fmt: skip
def test_kinds_have_the_name_they_are_asked_for_by(name):
    kind = cache_kind(name)
    assert kind.name == name
    assert kind.describe
    assert kind.by_attention == name.startswith(("h2o", "snapkv"))


def test_own_quantisation_is_the_default():
    assert cache_kind("quantised:int4:own").name == cache_kind(" quantised:int4 ").name


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("dynamc", "dynamic"), ("quantized:int4", "quantised"), ("", FORMS[0]),
        ("quantised", "int8"), ("quantised:int3", "int8"), ("quantised:int4:bits", "quanto"),
        ("static:4", "static"), ("sliding", "TOKENS"), ("sliding:0", "TOKENS"), ("h2o:1", "TOKENS"),
        ("h2o:-4", "TOKENS"), ("snapkv:x", "TOKENS"), ("sinks:4", "+"), ("sinks:4+0", "+"),
    ],
)  # fmt: skip
def test_names_of_no_kind_are_refused(spec, remedy):
    with pytest.raises(UsageError) as error:
        cache_kind(spec)
    assert remedy in error.value.remedy


ROOMY = ("dynamic", "static", "quantised:int2", "sliding:64", "h2o:64", "snapkv:64", "sinks:2+64")


@pytest.mark.parametrize(
    ("name", "attn"),
    [
        ("llama", "sdpa"), ("llama", "eager"), ("gpt_neox", "sdpa"), ("gpt2", "eager"),
        ("qwen3_next", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager"), ("llama4_text", "sdpa"),
        ("gemma3n_text-shared", "sdpa"), ("dory", "sdpa"), ("nemotron_h", "sdpa"),
        ("llava", "sdpa"),
    ],
)  # fmt: skip
def test_a_budget_that_holds_the_text_changes_nothing(name, attn):
    loaded = loaded_zoo.load(name, attn)
    expected = plain(loaded)
    for spec in ROOMY:  # blocks of a quantised cache are longer than the text, too
        got = read(loaded, cache_kind(spec).make(loaded, LENGTH))
        assert zoo.logits_close(got, expected, 2e-5), spec


def masked(loaded, kept: list[int]) -> torch.Tensor:
    """Logits of the last token when it sees `kept` alone, in one pass without a cache."""
    ids = zoo.inputs(loaded.model, length=LENGTH)["input_ids"]
    mask = torch.full((LENGTH, LENGTH), HIDDEN).triu(1)
    mask[-1] = HIDDEN
    mask[-1, kept] = 0
    with torch.inference_mode():
        out = loaded.model(input_ids=ids, attention_mask=mask.expand(2, 1, -1, -1), use_cache=False)
    return out.logits[:, -1]


@pytest.mark.parametrize(
    "name",
    ["llama", "gpt_neox", "gptj", "gpt2", "phi", "cohere", "qwen3", "stablelm", "olmo2", "dbrx"],
)
@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        ("sinks:2+3", [0, 1, 8, 9, 10, 11]),
        ("sinks:0+4", [7, 8, 9, 10, 11]),
        ("sliding:4", [8, 9, 10, 11]),
    ],
)
def test_what_is_dropped_is_as_if_masked_and_positions_stay(name, spec, kept):
    loaded = loaded_zoo.load(name, "eager")
    got = read(loaded, cache_kind(spec).make(loaded, LENGTH), prompt=LENGTH - 1)[:, -1]
    assert zoo.logits_close(got, masked(loaded, kept))
    assert not zoo.logits_close(got, plain(loaded)[:, -1], 1e-4)


@pytest.mark.parametrize("spec", ["sinks:2+3", "sliding:4", "h2o:5", "snapkv:6", "quantised:int8"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_tokens_that_are_read_together_do_not_see_ahead(spec, attn):
    loaded = loaded_zoo.load("llama", attn)
    ids = zoo.inputs(loaded.model, length=LENGTH)["input_ids"]
    alone, together = (cache_kind(spec).make(loaded, LENGTH) for _ in range(2))
    with torch.inference_mode():
        for cache in (alone, together):
            loaded.model(input_ids=ids[:, :PROMPT], cache=cache, use_cache=True)
        ahead = loaded.model(input_ids=ids[:, PROMPT:], cache=together, use_cache=True).logits
        step = ids[:, PROMPT : PROMPT + 1]
        expected = loaded.model(input_ids=step, cache=alone, use_cache=True).logits
    assert zoo.logits_close(ahead[:, :1], expected)


@pytest.mark.parametrize("spec", ["h2o:5", "snapkv:6"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_chosen_tokens_are_as_if_the_others_were_masked(spec, attn):
    # One layer, one KV head and equal rows, so that one mask says it all.
    loaded = loaded_zoo.load("llama", attn, kv_heads=1)
    loaded.model.model.layers = loaded.model.model.layers[:1]
    loaded.model.config.num_hidden_layers = 1
    ids = zoo.inputs(loaded.model, length=LENGTH)["input_ids"][:1]
    cache = cache_kind(spec).make(loaded, LENGTH)
    with torch.inference_mode():
        loaded.model(input_ids=ids[:, :-1], cache=cache, use_cache=True)
        full = swap_layers(loaded, full=DroppingLayer)
        loaded.model(input_ids=ids[:, :-1], cache=full, use_cache=True)
        kept = matches(cache.layers[0].keys[0, 0], full.layers[0].keys[0, 0])
        got = loaded.model(input_ids=ids[:, -1:], cache=cache, use_cache=True).logits[:, -1]
    assert len(kept) == int(spec.partition(":")[2])
    loaded.model.set_attn_implementation("eager")
    assert zoo.logits_close(got, masked(loaded, [*kept, LENGTH - 1])[:1])


def matches(some: torch.Tensor, every: torch.Tensor) -> list[int]:
    return [int((every - row).abs().sum(dim=-1).argmin()) for row in some]


@pytest.mark.parametrize("spec", ["sliding:4", "sinks:1+3", "h2o:5", "snapkv:5", "quantised:int2"])
def test_texts_of_a_batch_do_not_meet(spec):
    loaded = loaded_zoo.load("llama")
    together = read(loaded, cache_kind(spec).make(loaded, LENGTH))
    for row in range(2):
        rows = slice(row, row + 1)
        alone = read(loaded, cache_kind(spec).make(loaded, LENGTH), rows=rows)
        assert zoo.logits_close(together[rows], alone)


@pytest.mark.parametrize("name", ["qwen2-sliding", "gemma3_text", "mistral"])
def test_a_window_of_ours_narrows_those_of_the_model(name):
    loaded = loaded_zoo.load(name)
    own = {
        layer.sliding_window
        for layer in cache_kind("dynamic").make(loaded, 1).layers
        if layer.is_sliding
    }
    assert own == {zoo.SIZES["sliding_window"]}
    cache = cache_kind("sliding:4").make(loaded, LENGTH)
    logits = read(loaded, cache)
    assert torch.isfinite(logits).all()
    assert {layer.keys.shape[-2] for layer in cache.layers} == {3}
    wide = read(loaded, cache_kind("sliding:64").make(loaded, LENGTH))
    assert zoo.logits_close(wide, plain(loaded))


def test_linear_layers_keep_their_states():
    loaded = loaded_zoo.load("qwen3_next")
    kinds = [type(layer).__name__ for layer in cache_kind("sinks:1+3").make(loaded, 1).layers]
    assert kinds == ["LinearAttentionLayer", "SinkLayer", "SinkLayer"]


@pytest.mark.parametrize(
    ("name", "spec", "reason"),
    [
        ("mistral", "quantised:int4", "no layer keeps every token"),
        ("mistral", "h2o:4", "no layer keeps every token"),
        ("falcon_h1", "sinks:1+3", "more than keys and values"),
        ("deepseek_v4", "quantised:int8", "more than keys and values"),
        ("deepseek_v4", "static", "no static layers"),
        ("minimax", "dynamic", "a cache class of its own"),
        ("whisper", "dynamic", "encoder-decoder"),
        ("bloom", "sliding:4", "ALiBi"),
        ("falcon-old-alibi", "sinks:1+3", "ALiBi"),
        ("gpt_neo", "sliding:4", "GPT-Neo"),
        ("gpt_neo", "static", "do not fit a static cache"),
        ("falcon-old-alibi", "static", "do not fit a static cache"),
        ("falcon-new", "h2o:4", "cannot be seen"),
        ("jetmoe", "snapkv:4", "cannot be seen"),
    ],
)  # fmt: skip
def test_a_kind_that_cannot_work_says_why(name, spec, reason):
    loaded = loaded_zoo.load(name, "eager")
    with pytest.raises(CacheUnavailable, match=reason):
        cache_kind(spec).make(loaded, LENGTH)
    assert loaded.model.config._attn_implementation == "eager"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_offloading_needs_a_driver():
    with pytest.raises(CacheUnavailable, match="no CUDA driver"):
        cache_kind("offloaded").make(loaded_zoo.load("llama"), LENGTH)


@pytest.mark.parametrize(("backend", "module"), [("quanto", "optimum"), ("hqq", "hqq")])
def test_libraries_quantise_or_say_how_to_install_them(backend, module):
    loaded = loaded_zoo.load("llama")
    kind = cache_kind(f"quantised:int4:{backend}")
    if find_spec(module) is None:
        with pytest.raises(CacheUnavailable) as error:
            kind.make(loaded, LENGTH)
        assert error.value.remedy == f"pip install 'gqaconvert[{backend}]'"
        return
    change = zoo.largest_difference(read(loaded, kind.make(loaded, LENGTH)), plain(loaded))
    assert 0 < change < 1


def test_quanto_has_no_eight_bits():
    with pytest.raises(CacheUnavailable, match="no cache of 8 bits"):
        cache_kind("quantised:int8:quanto").make(loaded_zoo.load("llama"), LENGTH)


def test_a_layer_that_sees_no_attention_does_not_go_on():
    loaded = loaded_zoo.load("llama")  # not watched: the kind would have switched it
    with pytest.raises(CacheUnavailable, match="was not seen"):
        read(loaded, swap_layers(loaded, full=lambda: H2OLayer(4)))


@pytest.mark.parametrize("spec", ["sliding:4", "h2o:4", "snapkv:4", "sinks:1+3", "quantised:int4"])
def test_what_is_gone_does_not_come_back(spec):
    loaded = loaded_zoo.load("llama")
    cache = cache_kind(spec).make(loaded, LENGTH)
    read(loaded, cache)
    assert not cache.is_croppable
    with pytest.raises(UsageError, match="cannot take back 2"):
        cache.crop(-2)


@pytest.mark.parametrize("spec", ["sliding:4", "h2o:4", "snapkv:4", "sinks:1+3", "quantised:int4"])
def test_a_cache_that_was_reset_reads_as_new(spec):
    loaded = loaded_zoo.load("llama")
    cache = cache_kind(spec).make(loaded, LENGTH)
    first = read(loaded, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(read(loaded, cache), first)
