"""Measured bytes against the ruler's formula, to the byte."""

from __future__ import annotations

import loaded_zoo
import pytest
import torch
import zoo
from transformers import DynamicCache

from gqaconvert.evaluation.cache_bytes import cache_bytes, cache_bytes_kept
from gqaconvert.evaluation.cache_kinds import cache_kind
from gqaconvert.kv_cache import sizes
from gqaconvert.kv_cache.element_types import storage_type
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.kv_cache.states import constant_state
from gqaconvert.modelling.models import load_model

BATCH = 2


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", dtype="float32")


def ruler(loaded, folder):
    loaded.model.config.save_pretrained(folder)
    return read_config(folder)


def fill(loaded, spec: str, prompt: int, steps: int = 0, room: int = 512):
    cache = cache_kind(spec).make(loaded, room)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(7, 90, (BATCH, prompt + steps), generator=generator)
    with torch.inference_mode():
        loaded.model(input_ids=ids[:, :prompt], cache=cache, use_cache=True)
        for place in range(prompt, prompt + steps):
            loaded.model(input_ids=ids[:, place : place + 1], cache=cache, use_cache=True)
    return cache


def formula(config, tokens: int, element: str = "fp32", **options) -> int:
    layers = sizes.cached_layers(config, as_transformers=True)
    return sizes.cache_bytes(layers, tokens, storage_type(element), batch=BATCH, **options)


@pytest.mark.parametrize(
    "name",
    [
        "llama", "gpt_neox", "mistral", "gemma3_text", "llama4_text", "gemma3n_text-shared",
        "falcon-new",
    ],
)  # fmt: skip
def test_the_ordinary_cache_holds_what_the_formula_says(name, tmp_path):
    loaded = loaded_zoo.load(name, "eager")
    config = ruler(loaded, tmp_path)
    cache = fill(loaded, "dynamic", 9, 3)
    assert cache_bytes(cache) == formula(config, 12)
    assert cache_bytes_kept(cache) == formula(config, 12, between_steps=True)


@pytest.mark.parametrize("name", ["qwen3_next", "jamba", "nemotron_h", "lfm2"])
def test_states_are_counted_apart(name, tmp_path):
    loaded = loaded_zoo.load(name)
    config = ruler(loaded, tmp_path)
    cache = fill(loaded, "dynamic", 9, 2)
    state = BATCH * constant_state(config).size_bytes(storage_type("fp32"))
    assert state > 0
    assert cache_bytes_kept(cache, states=False) == formula(config, 11)
    assert cache_bytes_kept(cache) == formula(config, 11) + state
    assert cache_bytes(cache) - cache_bytes(cache, states=False) >= state


@pytest.mark.parametrize("element", ["int8", "int4", "int2"])
@pytest.mark.parametrize("source", ["tiny", "llama", "phi", "olmo2"])
def test_quantised_bytes_are_those_of_the_element_types(source, element, tiny, tmp_path):
    loaded = tiny if source == "tiny" else loaded_zoo.load(source)
    config = ruler(loaded, tmp_path)
    room = min(128, loaded.model.config.max_position_embeddings)
    blocks = fill(loaded, f"quantised:{element}", room)
    assert cache_bytes(blocks) == cache_bytes_kept(blocks) == formula(config, room, element)
    waiting = fill(loaded, f"quantised:{element}", room - 8, 3)
    packed = (room - 8) // 64 * 64
    expected = formula(config, packed, element) + formula(config, room - 5 - packed)
    assert cache_bytes(waiting) == expected


def test_fewer_bits_are_fewer_bytes_of_any_backend_here(tiny):
    held = [cache_bytes(fill(tiny, f"quantised:{e}", 128)) for e in ("int8", "int4", "int2")]
    ordinary = cache_bytes(fill(tiny, "dynamic", 128))
    assert [round(ordinary / each, 2) for each in held] == [3.76, 7.11, 12.8]


def test_dropping_holds_the_budget_and_no_more(tiny, tmp_path):
    config = ruler(tiny, tmp_path)
    assert cache_bytes(fill(tiny, "sliding:32", 60, 3)) == formula(config, 31)
    assert cache_bytes(fill(tiny, "sinks:4+28", 60, 3)) == formula(config, 32)
    assert cache_bytes(fill(tiny, "snapkv:32", 60, 3)) == formula(config, 32 + 3)
    heads, layers = 8, 4
    scores = 4 * BATCH * heads * layers * 32  # fp32, one a token, KV head and layer
    assert cache_bytes(fill(tiny, "h2o:32", 60, 3)) == formula(config, 32) + scores


def test_static_room_is_taken_at_once(tiny, tmp_path):
    config = ruler(tiny, tmp_path)
    assert cache_bytes(fill(tiny, "static", 5, room=40)) == formula(config, 40)


def test_memory_is_counted_once_and_whole():
    cache = DynamicCache()
    base = torch.zeros(1, 1, 10, 4)
    cache.update(base, base, 0)
    layer = cache.layers[0]
    layer.keys = base[:, :, :3]
    layer.values = base[:, :, 3:5]
    layer.more = {"deep": [(base.new_zeros(7), torch.tensor(3))]}
    assert cache_bytes_kept(cache) == 4 * (12 + 8 + 7)
    assert cache_bytes(cache) == 4 * (40 + 7)


def test_a_longer_text_takes_more(tmp_path):
    loaded = loaded_zoo.load("llama")
    config = ruler(loaded, tmp_path)
    assert cache_bytes(fill(loaded, "dynamic", 9)) != formula(config, 10)
    assert zoo.SIZES["num_hidden_layers"] == 2
