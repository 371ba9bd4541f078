"""The formula equals what transformers' caches hold, to the byte, for every class of the zoo.

Two measures: what is *kept* (elements of the tensors a cache holds between steps) and what is
*stored* (the memory those tensors are views of). They differ in layers with windows. While decoding
the stored bytes are the formula's; a prompt longer than the window is stored whole until the first
step.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import zoo
from transformers import DynamicCache, EncoderDecoderCache

from gqaconvert.errors import UnsupportedModelError
from gqaconvert.kv_cache.element_types import storage_type
from gqaconvert.kv_cache.model_config import parse_config, read_config
from gqaconvert.kv_cache.sizes import (
    cache_bytes,
    cached_layers,
    kv_bytes_per_token,
    transformers_caches_all_heads,
)
from gqaconvert.kv_cache.states import constant_state

BATCH, PROMPT, STEPS = 2, 11, 3
KEPT = ("keys", "values", "indexer_keys", "idx_keys")
STATES = ("conv_states", "recurrent_states")
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

# Their number of KV heads cannot be chosen, or is no number of cached heads.
AS_THEY_ARE = {*zoo.MHA_ONLY, *zoo.REFUSED}
NO_FORMULA = {"deepseek_v4"}
OWN_CACHE = {"minimax"}
NOT_COUNTED = {"recurrent_gemma", "zaya", "inkling_text", "inkling2_text", "inkling2_loop_text"}


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)


class Measured:
    """The tensors of a cache, by what they are."""

    def __init__(self, cache):
        self.parts = [cache]
        if isinstance(cache, EncoderDecoderCache):
            self.parts = [cache.self_attention_cache, cache.cross_attention_cache]

    def _of(self, names):
        for part in self.parts:
            for layer in part.layers:
                for name in names:
                    yield from tensors(vars(layer).get(name))

    def kept_bytes(self, names=KEPT) -> int:
        return sum(t.numel() * t.element_size() for t in self._of(names))

    def stored_bytes(self) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self._of(KEPT)}
        return sum(storage.nbytes() for key, storage in storages.items() if key)

    def source_tokens(self) -> int:
        return self.parts[1].layers[0].keys.shape[-2] if len(self.parts) > 1 else 0


class Run:
    """A tiny model that has read a prompt, and its config as it is on disk."""

    def __init__(self, name: str, folder: Path, kv_heads: int | None = None, dtype=torch.float32):
        entry = {**zoo.ZOO, **zoo.MHA_ONLY, **zoo.REFUSED}[name]
        fewer = entry.legal[0 if name in AS_THEY_ARE else min(1, len(entry.legal) - 1)]
        model = zoo.build(name, num_kv_heads=kv_heads or fewer, dtype=dtype)
        model.config.save_pretrained(folder)
        self.config = read_config(folder)
        self.kind = storage_type(TYPES[dtype])
        self.model = zoo.text_model(model)
        self.inputs = zoo.inputs(self.model, length=PROMPT)
        self.cache = None
        if name not in OWN_CACHE:
            self.cache = DynamicCache(config=model.config)
            if self.config.is_encoder_decoder:
                self.cache = EncoderDecoderCache(self.cache, DynamicCache(config=model.config))
        self.tokens = 0
        self._call(self.inputs, PROMPT)

    def step(self) -> None:
        ids = "decoder_input_ids" if self.config.is_encoder_decoder else "input_ids"
        self._call({**self.inputs, ids: self.inputs[ids][:, :1]}, 1)

    def _call(self, inputs, count: int) -> None:
        given = {} if self.cache is None else {"cache": self.cache}
        with torch.no_grad():
            result = self.model(**inputs, use_cache=True, **given)
        if self.cache is None:
            self.cache = result.cache
        self.tokens += count
        self.measured = Measured(self.cache)

    def formula(self, **options) -> int:
        layers = cached_layers(self.config, as_transformers=True)
        return cache_bytes(
            layers,
            self.tokens,
            self.kind,
            batch=BATCH,
            source_tokens=self.measured.source_tokens(),
            **options,
        )

    def formula_without_windows(self) -> int:
        wide = dict[object, int]()
        for layer, count in cached_layers(self.config, as_transformers=True).items():
            whole = type(layer)(
                layer.heads, layer.key_elements, layer.value_elements, None,
                layer.index_elements, layer.of_source,
            )  # fmt: skip
            wide[whole] = wide.get(whole, 0) + count
        source = self.measured.source_tokens()
        return cache_bytes(wide, self.tokens, self.kind, batch=BATCH, source_tokens=source)


@pytest.mark.parametrize("name", [*zoo.ZOO, *zoo.MHA_ONLY, *zoo.REFUSED])
def test_the_formula_is_what_the_cache_holds(name, tmp_path):
    run = Run(name, tmp_path)
    if name in NO_FORMULA:
        with pytest.raises(UnsupportedModelError, match="fewer entries than tokens"):
            run.formula()
        return
    assert run.formula() > 0
    assert run.measured.kept_bytes() == run.formula(between_steps=True)
    assert run.measured.stored_bytes() == run.formula_without_windows()
    for _ in range(STEPS):
        run.step()
        assert run.measured.kept_bytes() == run.formula(between_steps=True)
        assert run.measured.stored_bytes() == run.formula()


def test_windows_are_shorter_than_the_prompts_here(tmp_path):
    run = Run("mistral", tmp_path)
    assert run.formula() < run.formula_without_windows()
    assert run.formula(between_steps=True) < run.formula()


@pytest.mark.parametrize("name", [n for n, e in zoo.ZOO.items() if len(e.legal) > 2])
def test_the_cache_after_a_conversion_follows_from_the_config_before_it(name, tmp_path):
    entry = zoo.ZOO[name]
    before = Run(name, tmp_path / "before", kv_heads=entry.legal[0]).config
    after = Run(name, tmp_path / "after", kv_heads=entry.legal[1])
    assert cached_layers(before, entry.legal[1]) == cached_layers(after.config)


@pytest.mark.parametrize("name", ["falcon-new", "falcon-new-bias"])
def test_falcon_keeps_all_heads_in_transformers_and_its_kv_heads_elsewhere(name, tmp_path):
    run = Run(name, tmp_path, kv_heads=2)
    assert transformers_caches_all_heads(run.config)
    alone = cache_bytes(cached_layers(run.config), PROMPT, run.kind, batch=BATCH)
    assert run.measured.kept_bytes() == 2 * alone  # 4 heads, of which 2 are KV heads


@pytest.mark.parametrize("name", ["llama", "mistral", "mimo_v2_flash", "deepseek_v3"])
def test_half_the_element_is_half_the_cache(name, tmp_path):
    run = Run(name, tmp_path, dtype=torch.bfloat16)
    assert run.measured.kept_bytes() == run.formula(between_steps=True)


def test_the_zoo_entries_that_cache_all_heads_are_known(tmp_path):
    for name, entry in zoo.ZOO.items():
        if entry.type == "falcon":
            run = Run(name, tmp_path / name)
            assert transformers_caches_all_heads(run.config) == entry.cache_all


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [
        "bamba", "falcon_h1", "granitemoehybrid", "jamba", "lara_mini", "lfm2", "lfm2_moe", "lfm3",
        "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_next", "zamba", "zamba2",
        "kimi_linear",
    ],
)  # fmt: skip
def test_states_of_constant_size_are_counted_to_the_byte(name, dtype, tmp_path):
    if name == "falcon_h1" and dtype != torch.float32:
        pytest.skip("keeps the inputs of its convolution in fp32, whatever the weights")
    run = Run(name, tmp_path, dtype=dtype)
    state = constant_state(run.config)
    for _ in range(2):
        assert run.measured.kept_bytes(STATES) == BATCH * state.size_bytes(run.kind)
        run.step()


@pytest.mark.parametrize("name", [n for n in [*zoo.ZOO, *zoo.REFUSED] if n in NOT_COUNTED])
def test_a_state_that_is_not_counted_says_so(name, tmp_path):
    assert constant_state(Run(name, tmp_path).config) is None


def test_the_plain_count_agrees_where_nothing_is_special(tmp_path):
    run = Run("llama", tmp_path)
    per_token = kv_bytes_per_token(run.config, 4)
    assert per_token * PROMPT * BATCH == run.measured.kept_bytes()


def test_a_wrong_count_of_heads_would_be_seen(tmp_path):
    run = Run("llama", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"num_key_value_heads": 1}
    layers = cached_layers(parse_config(raw, "config.json"))
    assert cache_bytes(layers, PROMPT, run.kind, batch=BATCH) != run.measured.kept_bytes()
