"""Parameters counted from a config are those of the built model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import zoo
from transformers import AutoConfig, AutoModelForCausalLM

from gqaconvert.kv_cache.element_types import STORAGE_TYPES
from gqaconvert.kv_cache.model_config import parse_config, read_config
from gqaconvert.kv_cache.parameter_shapes import SHAPES
from gqaconvert.kv_cache.parameters import count_parameters, kv_projection_parameters
from gqaconvert.kv_cache.weights import StoredWeights, weights_of

COVERED = [
    name
    for name, entry in {**zoo.ZOO, **zoo.MHA_ONLY, **zoo.REFUSED}.items()
    if entry.type in SHAPES and name not in ("opt-post_ln", "opt-projected")
]
COMPOSITE = ["gemma3", "internvl", "llava", "mistral3", "paligemma", "qwen2_vl", "qwen3_vl"]

# As published, and counted by their makers.
PUBLISHED = {
    "Llama-2-7b": (6_738_415_616, {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    }),
    "Qwen2-7B": (7_615_616_512, {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
        "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4,
    }),
    "Mistral-7B": (7_241_732_096, {"model_type": "mistral"}),
    "Mixtral-8x7B": (46_702_792_704, {"model_type": "mixtral"}),
    "gpt2": (124_439_808, {"model_type": "gpt2"}),
    "phi-2": (2_779_683_840, {
        "model_type": "phi", "vocab_size": 51200, "hidden_size": 2560,
        "intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 32,
    }),
    "gemma-2-2b": (2_614_341_888, {
        "model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256,
    }),
}  # fmt: skip


def built(name: str, folder: Path):
    entry = {**zoo.ZOO, **zoo.MHA_ONLY, **zoo.REFUSED}[name]
    # A class that has the key and no such option, as MLA, takes all heads alone.
    model = zoo.build(name, num_kv_heads=entry.legal[0 if name in zoo.REFUSED else -1])
    model.config.save_pretrained(folder)
    return model, read_config(folder)


@pytest.mark.parametrize("name", COVERED)
def test_the_count_is_that_of_the_built_model(name, tmp_path):
    model, config = built(name, tmp_path)
    assert count_parameters(config).total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", COMPOSITE)
def test_of_a_composite_model_the_language_model_is_counted(name, tmp_path):
    model, config = built(name, tmp_path)
    text = model.get_decoder()
    head = model.get_output_embeddings()
    own = {id(p): p for part in (text, head) for p in part.parameters()}
    assert count_parameters(config).total == sum(p.numel() for p in own.values())


def test_no_class_is_listed_without_being_compared():
    compared = {zoo_entry.type for zoo_entry in {**zoo.ZOO, **zoo.MHA_ONLY, **zoo.REFUSED}.values()}
    compared |= {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"}  # inside composite ones
    assert set(SHAPES) <= compared


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    total, raw = PUBLISHED[name]
    assert count_parameters(parse_config(raw, name)).total == total


def test_full_size_models_agree_on_the_meta_device():
    for model_type in ("llama", "mixtral", "falcon", "gpt_neox", "deepseek_v3", "qwen3_moe"):
        config = AutoConfig.for_model(model_type)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        counted = count_parameters(parse_config({"model_type": model_type}, model_type))
        assert counted.total == sum(p.numel() for p in model.parameters()), model_type


def test_options_no_shape_speaks_of_are_not_counted(tmp_path):
    for name in ("opt-post_ln", "opt-projected", "bamba", "t5", "gemma3n_text"):
        assert count_parameters(built(name, tmp_path / name)[1]) is None


def test_a_token_passes_the_experts_it_uses_and_all_else():
    counted = count_parameters(parse_config(PUBLISHED["Mixtral-8x7B"][1], "config.json"))
    assert counted.total - counted.active == 32 * 6 * 3 * 4096 * 14336
    assert round(counted.active / 1e9, 1) == 12.9


class TestWeights:
    config = parse_config(PUBLISHED["Llama-2-7b"][1] | {"torch_dtype": "float16"}, "config.json")
    total = PUBLISHED["Llama-2-7b"][0]

    def test_without_headers_they_follow_from_the_config(self):
        assert weights_of(self.config).size(32, None) == 2 * self.total

    def test_fewer_kv_heads_have_fewer_rows(self):
        less = 2 * 32 * 4096 * 128 * (32 - 8)
        assert weights_of(self.config).size(8, None) == 2 * (self.total - less)
        assert kv_projection_parameters(self.config, 8) == 2 * 32 * 4096 * 128 * 8

    def test_more_kv_heads_have_more(self):
        raw = PUBLISHED["Qwen2-7B"][1] | {"torch_dtype": "bfloat16"}
        weights = weights_of(parse_config(raw, "config.json"))
        assert weights.size(28, None) - weights.size(4, None) == 2 * 2 * 28 * 3584 * 128 * 24

    def test_headers_win_over_the_config_and_the_user_over_both(self):
        stored = StoredWeights(parameters=self.total, size_bytes=4 * self.total)
        assert weights_of(self.config, stored).size(32, None) == 4 * self.total
        assert weights_of(self.config, stored, 14 * 10**9).size(32, None) == 14 * 10**9

    def test_quantised_weights_leave_embeddings_in_16_bits(self):
        ends = 2 * 32000 * 4096
        norms = (2 * 32 + 1) * 4096
        matrices = self.total - ends - norms
        int4 = STORAGE_TYPES["int4"]
        expected = int4.size_bytes(matrices) + 2 * (ends + norms)
        assert weights_of(self.config).size(32, int4) == expected
        assert 3.8 * 2**30 < expected < 4 * 2**30

    def test_gpus_divide_them_and_replicate_the_kv_projections(self):
        weights = weights_of(self.config)
        assert weights.size(32, None, 8) == weights.size(32, None) // 8
        projections = 2 * kv_projection_parameters(self.config, 1)
        assert weights.size(1, None, 8) == -(-(weights.size(1, None) + 7 * projections) // 8)

    def test_of_packed_weights_the_size_counts_and_not_the_elements(self):
        quantised = self.config.raw | {"quantization_config": {"quant_method": "gptq"}}
        config = parse_config(quantised, "config.json")
        weights = weights_of(config, StoredWeights(parameters=10**8, size_bytes=4 * 10**9))
        assert weights.parameters == self.total
        assert weights.size(32, None) == 4 * 10**9
        less = kv_projection_parameters(config, 32) - kv_projection_parameters(config, 8)
        assert 4e9 - weights.size(8, None) == pytest.approx(less * 4e9 / self.total)

    def test_unknown_ones_are_unknown(self):
        config = parse_config({"model_type": "bamba"}, "config.json")
        assert weights_of(config).size(8, None) is None
        assert weights_of(config).origin == "unknown"
