"""Known answers of the ruler, and what each kind of layer keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gqaconvert.errors import UsageError
from gqaconvert.kv_cache.element_types import STORAGE_TYPES, storage_type
from gqaconvert.kv_cache.model_config import parse_config
from gqaconvert.kv_cache.sizes import (
    CachedLayer,
    cache_bytes,
    cached_layers,
    kv_bytes_per_token,
    reads_a_source,
    token_bytes,
    transformers_caches_all_heads,
)
from gqaconvert.kv_cache.states import constant_state

FP16, GIB = storage_type("fp16"), 2**30

LLAMA_2_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip
QWEN2_7B = {
    "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "sliding_window": 131072, "use_sliding_window": False, "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}  # fmt: skip
FALCON_40B = {
    "model_type": "falcon", "hidden_size": 8192, "new_decoder_architecture": True,
    "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "multi_query": True,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096,
}  # fmt: skip


def layers(raw, kv_heads=None, **options):
    return cached_layers(parse_config(raw, "config.json"), kv_heads, **options)


class TestKnownAnswers:
    @pytest.mark.parametrize(
        ("tokens", "batch", "expected"),
        [
            (1, 1, 524_288),
            (2048, 1, 1 * GIB),
            (2048, 8, 8 * GIB),
            (4096, 1, 2 * GIB),
            (32_768, 1, 16 * GIB),
        ],
    )
    def test_llama_2_7b(self, tokens, batch, expected):
        assert cache_bytes(layers(LLAMA_2_7B), tokens, FP16, batch=batch) == expected

    def test_llama_2_7b_keeps_16384_bytes_a_token_a_layer(self):
        assert token_bytes(layers(LLAMA_2_7B), FP16) == 524_288 == 32 * 16_384

    @pytest.mark.parametrize(("tokens", "expected"), [(4096, 268_435_456), (32_768, 2 * GIB)])
    def test_llama_2_7b_with_4_kv_heads(self, tokens, expected):
        assert cache_bytes(layers(LLAMA_2_7B, 4), tokens, FP16) == expected

    def test_qwen2_7b(self):
        as_it_is = cache_bytes(layers(QWEN2_7B), 8192, storage_type("bf16"))
        assert as_it_is == 469_762_048
        assert cache_bytes(layers(QWEN2_7B, 28), 8192, storage_type("bf16")) == 7 * as_it_is

    def test_falcon_40b_is_gqa(self):
        (layer, count), *rest = layers(FALCON_40B).items()
        assert (layer.heads, count, rest) == (8, 60, [])
        assert token_bytes(layers(FALCON_40B), FP16) == 2 * 60 * 8 * 64 * 2

    def test_eight_heads_keep_eight_times_what_one_keeps(self):
        eight, one = layers(LLAMA_2_7B, 8), layers(LLAMA_2_7B, 1)
        assert cache_bytes(eight, 777, FP16, batch=3) == 8 * cache_bytes(one, 777, FP16, batch=3)


class TestKindsOfLayers:
    @pytest.mark.parametrize("tokens", [1, 4095, 4096, 4097, 100_000])
    def test_a_window_keeps_the_last_tokens_alone(self, tokens):
        one = token_bytes(layers(MISTRAL), FP16)
        assert cache_bytes(layers(MISTRAL), tokens, FP16) == one * min(tokens, 4096)
        between = cache_bytes(layers(MISTRAL), tokens, FP16, between_steps=True)
        assert between == one * min(tokens, 4095)

    def test_a_window_that_a_switch_turns_off_is_none(self):
        assert all(layer.window is None for layer in layers(QWEN2_7B))

    def test_chunks_stop_growing_and_full_layers_do_not(self):
        raw = {"model_type": "llama4_text", "num_hidden_layers": 8}
        kinds = {layer.window: count for layer, count in layers(raw).items()}
        assert kinds == {8192: 6, None: 2}
        growth = cache_bytes(layers(raw), 10_001, FP16) - cache_bytes(layers(raw), 10_000, FP16)
        assert growth == token_bytes(layers(raw), FP16) / 4

    def test_latent_attention_keeps_latent_and_rotary_key(self):
        raw = {"model_type": "deepseek_v3"}
        assert token_bytes(layers(raw), FP16) == 61 * (512 + 64) * 2
        (layer,) = layers(raw)
        assert layer.on_one_of(8) == layer

    def test_an_index_key_comes_on_top(self):
        plain, indexed = (
            layers({"model_type": "deepseek_v3"}),
            layers({"model_type": "deepseek_v32"}),
        )
        more = token_bytes(indexed, FP16) - token_bytes(plain, FP16)
        assert more == 61 * 128 * 2

    def test_shared_layers_keep_nothing(self):
        raw = {"model_type": "gemma3n_text"}
        assert sum(layers(raw).values()) == 35 - 15

    def test_linear_layers_keep_a_state_that_does_not_grow(self):
        raw = {"model_type": "jamba"}
        assert sum(layers(raw).values()) == 4
        state = constant_state(parse_config(raw, "config.json"))
        assert (state.convolution, state.recurrent) == (28 * 8192 * 4, 28 * 8192 * 16)
        assert state.size_bytes(FP16) == 2 * state.convolution + 4 * state.recurrent

    def test_mamba_has_no_cache_and_a_state(self):
        config = parse_config({"model_type": "mamba2"}, "config.json")
        assert not cached_layers(config)
        assert constant_state(config).recurrent == 64 * 128 * 64 * 128

    def test_cross_attention_keeps_the_encoder_tokens_once(self):
        raw = {"model_type": "t5"}
        config = parse_config(raw, "config.json")
        assert reads_a_source(config)
        row = 2 * 6 * 8 * 64 * 2
        assert cache_bytes(layers(raw), 10, FP16, source_tokens=0) == 10 * row
        assert cache_bytes(layers(raw), 10, FP16, source_tokens=100) == 110 * row
        assert token_bytes(layers(raw), FP16) == row

    def test_layers_that_look_at_images_keep_no_text(self):
        raw = {
            "model_type": "mllama_text_model", "num_hidden_layers": 5, "hidden_size": 4096,
            "cross_attention_layers": [3],
        }  # fmt: skip
        assert reads_a_source(parse_config(raw, "config.json"))
        assert {layer.of_source: count for layer, count in layers(raw).items()} == {
            False: 4, True: 1,
        }  # fmt: skip

    def test_only_falcon_is_cached_whole_by_transformers(self):
        assert transformers_caches_all_heads(parse_config(FALCON_40B, "config.json"))
        assert not transformers_caches_all_heads(parse_config(LLAMA_2_7B, "config.json"))
        (theirs,) = layers(FALCON_40B, as_transformers=True)
        assert theirs.heads == 128


class TestTensorParallelism:
    @pytest.mark.parametrize(("gpus", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (64, 1)])
    def test_below_the_degree_heads_are_replicated(self, gpus, heads):
        share = CachedLayer(8, 8 * 64, 8 * 32).on_one_of(gpus)
        assert (share.heads, share.key_elements, share.value_elements) == (
            heads, heads * 64, heads * 32,
        )  # fmt: skip


class TestElementTypes:
    @pytest.mark.parametrize(
        ("name", "bytes_of_64"),
        [
            ("fp32", 256), ("fp16", 128), ("bf16", 128), ("fp8", 64),
            ("int8", 68), ("int4", 36), ("int2", 20),
        ],
    )  # fmt: skip
    def test_64_elements(self, name, bytes_of_64):
        assert STORAGE_TYPES[name].size_bytes(64) == bytes_of_64

    def test_a_group_begun_is_paid_for(self):
        assert storage_type("int4").size_bytes(65) == 33 + 8

    @pytest.mark.parametrize("name", ["torch.float16", "half", "FP16", "float16"])
    def test_other_names(self, name):
        assert storage_type(name) is FP16

    def test_an_unknown_type_names_the_known_ones(self):
        with pytest.raises(UsageError, match="int3") as error:
            storage_type("int3")
        assert "int4" in error.value.remedy

    def test_int4_of_llama_2_7b(self):
        int4 = cache_bytes(layers(LLAMA_2_7B), 4096, storage_type("int4"))
        assert int4 == 2 * GIB * 36 // 128


class TestPages:
    @pytest.mark.parametrize(("tokens", "taken"), [(1, 16), (16, 16), (17, 32), (4096, 4096)])
    def test_tokens_are_rounded_up_to_pages(self, tokens, taken):
        assert cache_bytes(layers(LLAMA_2_7B), tokens, FP16, page=16) == taken * 524_288

    @given(
        tokens=st.integers(1, 5000), batch=st.integers(1, 9), kind=st.sampled_from(["fp16", "fp8"])
    )
    def test_a_batch_is_so_many_requests(self, tokens, batch, kind):
        one = cache_bytes(layers(MISTRAL), tokens, storage_type(kind), page=16)
        many = cache_bytes(layers(MISTRAL), tokens, storage_type(kind), page=16, batch=batch)
        assert many == batch * one


def test_one_token_in_a_plain_type():
    config = parse_config(LLAMA_2_7B, "config.json")
    assert kv_bytes_per_token(config, 2) == 524_288
    assert kv_bytes_per_token(config, 2, kv_heads=4) == 65_536
    assert kv_bytes_per_token(config, 8) == 4 * 524_288
