"""config.json read without transformers says what transformers says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gqaconvert.errors import CheckpointError
from gqaconvert.kv_cache.class_records import known_model_types, record_for
from gqaconvert.kv_cache.config_faults import config_faults
from gqaconvert.kv_cache.model_config import parse_config, read_config

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"

# Files as they were published, cut down to what describes shapes.
PUBLISHED = {
    "Llama-2-7b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "vocab_size": 32000, "pretraining_tp": 1, "use_cache": True,
    },
    "Qwen2-7B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
        "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "rope_theta": 1000000.0, "sliding_window": 131072, "use_sliding_window": False,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 152064,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 10000.0,
        "sliding_window": 4096, "torch_dtype": "bfloat16", "vocab_size": 32000,
    },
    "Mixtral-8x7B": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "rope_theta": 1000000.0, "sliding_window": None,
        "vocab_size": 32000, "torch_dtype": "bfloat16",
    },
    "falcon-7b": {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": False,
        "bias": False, "hidden_size": 4544, "multi_query": True, "new_decoder_architecture": False,
        "num_attention_heads": 71, "num_hidden_layers": 32, "parallel_attn": True,
        "torch_dtype": "bfloat16", "vocab_size": 65024,
    },
    "falcon-40b": {
        "model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 8192,
        "new_decoder_architecture": True, "num_attention_heads": 128, "num_hidden_layers": 60,
        "num_kv_heads": 8, "parallel_attn": True, "vocab_size": 65024, "multi_query": True,
    },
    "falcon-rw-1b": {
        "model_type": "falcon", "alibi": True, "bias": True, "hidden_size": 2048,
        "multi_query": False, "new_decoder_architecture": False, "num_attention_heads": 32,
        "num_hidden_layers": 24, "parallel_attn": False, "vocab_size": 50304,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
        "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
        "activation_function": "gelu_new",
    },
    "pythia-1.4b": {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 2048,
        "intermediate_size": 8192, "max_position_embeddings": 2048, "num_attention_heads": 16,
        "num_hidden_layers": 24, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "tie_word_embeddings": False, "torch_dtype": "float16", "use_parallel_residual": True,
        "vocab_size": 50304,
    },
    "opt-1.3b": {
        "model_type": "opt", "do_layer_norm_before": True, "ffn_dim": 8192, "hidden_size": 2048,
        "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 24,
        "torch_dtype": "float16", "vocab_size": 50272, "word_embed_proj_dim": 2048,
    },
    "gemma-2-2b": {
        "model_type": "gemma2", "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "vocab_size": 256000, "torch_dtype": "float32",
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152},
    },
    "phi-2": {
        "architectures": ["PhiForCausalLM"], "model_type": "phi", "hidden_size": 2560,
        "intermediate_size": 10240, "max_position_embeddings": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 51200,
    },
    "llava-1.5-7b": {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
        "image_token_index": 32000, "torch_dtype": "float16",
        "text_config": {
            "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096, "model_type": "llama", "vocab_size": 32064,
        },
        "vision_config": {
            "hidden_size": 1024, "model_type": "clip_vision_model", "num_attention_heads": 16,
            "num_hidden_layers": 24,
        },
    },
    "starcoder": {
        "architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode", "n_embd": 6144,
        "n_head": 48, "n_inner": 24576, "n_layer": 40, "n_positions": 8192, "multi_query": True,
        "vocab_size": 49152,
    },
    "dbrx": {
        "model_type": "dbrx", "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 5e5},
        "d_model": 6144, "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16},
        "max_seq_len": 32768, "n_heads": 48, "n_layers": 40, "vocab_size": 100352,
    },
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "num_attention_heads": 16,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
        "first_k_dense_replace": 1,
    },
    "mpt-7b": {
        "model_type": "mpt", "attn_config": {"alibi": True, "attn_impl": "torch"}, "d_model": 4096,
        "n_heads": 32, "n_layers": 32, "max_seq_len": 2048, "vocab_size": 50432,
    },
    "bloom-560m": {
        "model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16,
        "vocab_size": 250880,
    },
    "t5-small": {
        "model_type": "t5", "d_ff": 2048, "d_kv": 64, "d_model": 512, "num_heads": 8,
        "num_layers": 6, "num_decoder_layers": 8, "is_encoder_decoder": True, "vocab_size": 32128,
    },
    "bart-large-cnn": {
        "model_type": "bart", "d_model": 1024, "decoder_attention_heads": 8, "decoder_layers": 6,
        "encoder_attention_heads": 16, "encoder_layers": 12, "vocab_size": 50264,
        "num_hidden_layers": 12, "is_encoder_decoder": True,
    },
    "t5gemma-2b": {
        "model_type": "t5gemma", "is_encoder_decoder": True,
        "encoder": {"hidden_size": 2304, "num_hidden_layers": 20},
        "decoder": {"hidden_size": 2304, "num_hidden_layers": 26, "num_key_value_heads": 2},
    },
    "Qwen2-VL-7B": {  # flat, as published in 2024
        "model_type": "qwen2_vl", "hidden_size": 3584, "intermediate_size": 18944,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "sliding_window": 32768, "use_sliding_window": False, "vocab_size": 152064,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584},
    },
    "gemma-3n-E2B": {
        "model_type": "gemma3n",
        "text_config": {
            "model_type": "gemma3n_text", "num_hidden_layers": 30, "num_kv_shared_layers": 10,
            "hidden_size": 2048, "intermediate_size": 8192,
        },
    },
    "gemma-4": {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text", "num_hidden_layers": 12, "num_kv_shared_layers": 4,
            "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        },
    },
    "gemma-4-sliding-to-the-end": {
        "model_type": "gemma4_text", "num_hidden_layers": 3,
        "layer_types": ["sliding_attention"] * 3,
    },
    "Step-3.5": {
        "model_type": "step3p5", "num_hidden_layers": 4, "num_attention_groups": 2,
    },
    "Llama-4-Scout": {
        "model_type": "llama4",
        "text_config": {"model_type": "llama4_text", "num_hidden_layers": 8, "hidden_size": 512},
    },
    "SmolLM3-3B": {
        "model_type": "smollm3", "num_hidden_layers": 36, "no_rope_layer_interval": 4,
        "sliding_window": 512, "use_sliding_window": False, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 4,
    },
    "Qwen3-Next": {"model_type": "qwen3_next", "num_hidden_layers": 48},
    "Jamba": {"model_type": "jamba", "num_hidden_layers": 32, "attn_layer_offset": 3},
    "Nemotron-H": {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*E-M*"},
    "mistral-as-ministral": {
        "model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "per-layer": {
        "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8,
        "per_layer_config": {"1": {"num_key_value_heads": 2}},
    },
    "alias": {"model_type": "gpt2", "num_hidden_layers": 3, "num_attention_heads": 6},
}  # fmt: skip


def read(name: str, **changes):
    return parse_config({**PUBLISHED[name], **changes}, "config.json")


@pytest.fixture(scope="module")
def trial():
    """The real classes, imported once."""
    sys.path.insert(0, str(SCRIPTS))
    import class_trial
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    yield class_trial
    sys.path.remove(str(SCRIPTS))


def real(trial, raw: dict):
    raw = json.loads(json.dumps(raw))
    model_type = raw["model_type"]
    if model_type == "mistral" and "layer_types" in raw:
        model_type = "ministral"
    return trial.CONFIG_MAPPING[model_type].from_dict(raw)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_reads_as_its_class_reads_it(trial, name):
    config, ours = real(trial, PUBLISHED[name]), read(name)
    read_back = trial.facts_read(ours)
    for key, value in trial.facts_of(config).items():
        if key == "rope" and ours.rope.kind != "rotary":
            continue
        assert read_back[key] == value, key
    text = config
    for key in ours.text_path:
        text = getattr(text, key)
    assert ours.known
    assert ours.class_name == type(config.get_text_config(decoder=True)).__name__
    for key in ("hidden_act", "intermediate_size", "hidden_size", "qk_rope_head_dim", "alibi"):
        expected = getattr(config.get_text_config(decoder=True), key, None)
        if not isinstance(expected, list):
            assert ours.get(key) == expected


@pytest.mark.parametrize(
    ("name", "layers", "heads", "kv_heads", "head_dim", "key"),
    [
        ("Llama-2-7b", 32, 32, 32, 128, ("num_key_value_heads",)),
        ("Qwen2-7B", 28, 28, 4, 128, ("num_key_value_heads",)),
        ("falcon-7b", 32, 71, 1, 64, ("multi_query",)),
        ("falcon-40b", 60, 128, 8, 64, ("num_kv_heads",)),
        ("falcon-rw-1b", 24, 32, 32, 64, ("multi_query",)),
        ("gpt2", 12, 12, 12, 64, None),
        ("starcoder", 40, 48, 1, 128, ("multi_query",)),
        ("dbrx", 40, 48, 8, 128, ("attn_config", "kv_n_heads")),
        ("mpt-7b", 32, 32, 32, 128, None),
        ("bloom-560m", 24, 16, 16, 64, None),
        ("llava-1.5-7b", 32, 32, 32, 128, ("num_key_value_heads",)),
        ("gemma-2-2b", 26, 8, 4, 256, ("num_key_value_heads",)),
        ("DeepSeek-V2-Lite", 27, 16, 16, 192, ("num_key_value_heads",)),
        ("t5-small", 8, 8, 8, 64, None),
        ("bart-large-cnn", 6, 8, 8, 128, None),
        ("t5gemma-2b", 26, 8, 2, 256, ("num_key_value_heads",)),
        ("gemma-4", 12, 8, 2, 512, ("num_key_value_heads",)),
    ],
)
def test_published_counts_are_the_published_ones(name, layers, heads, kv_heads, head_dim, key):
    config = read(name)
    assert (config.num_layers, config.num_heads) == (layers, heads)
    assert (config.num_kv_heads, config.head_dim) == (kv_heads, head_dim)
    assert config.kv_heads_key == key
    assert config.declares_kv_heads == (key is not None)


def test_sections_are_where_they_must_be_edited():
    assert read("Llama-2-7b").text_path == ()
    assert read("llava-1.5-7b").text_path == ("text_config",)
    assert read("Qwen2-VL-7B").text_path == ()
    assert read("t5gemma-2b").text_path == ("decoder",)
    assert parse_config({"model_type": "llava"}, "x").text_path == ("text_config",)
    assert parse_config({"model_type": "qwen2_vl", "text_config": {}}, "x").text_path == (
        "text_config",
    )
    omni = parse_config({"model_type": "qwen2_5_omni"}, "x")
    assert omni.text_path == ("thinker_config", "text_config")
    assert omni.text == {}
    assert read("Step-3.5").kv_heads_key == ("num_attention_groups",)
    assert read("llava-1.5-7b").text is PUBLISHED["llava-1.5-7b"]["text_config"]


def test_a_window_that_is_switched_off_is_none():
    assert read("Qwen2-7B").sliding_window is None
    on = read("Qwen2-7B", use_sliding_window=True, max_window_layers=20)
    assert on.sliding_window == 131072
    assert on.layer_kinds == ("full",) * 20 + ("sliding",) * 8
    assert read("Mistral-7B-v0.1").layer_kinds == ("sliding",) * 32
    assert read("Mistral-7B-v0.1", sliding_window=None).layer_kinds == ("full",) * 32
    assert read("SmolLM3-3B").sliding_window is None
    assert read("SmolLM3-3B").get("sliding_window") == 512


def test_layers_that_differ_differ():
    gemma3n = read("gemma-3n-E2B")
    assert [layer.shared for layer in gemma3n.layers] == [False] * 20 + [True] * 10
    assert gemma3n.num_kv_shared_layers == 10
    gemma4 = read("gemma-4")
    assert [(layer.num_kv_heads, layer.head_dim) for layer in gemma4.layers[4:6]] == [
        (4, 256),
        (2, 512),
    ]
    mimo = parse_config({"model_type": "mimo_v2_flash", "num_hidden_layers": 3}, "x").layers
    assert [layer.num_kv_heads for layer in mimo] == [4, 8, 8]
    assert (mimo[0].head_dim, mimo[0].v_head_dim) == (192, 128)
    inkling = parse_config(
        {"model_type": "inkling_text", "swa_num_key_value_heads": 3, "swa_head_dim": 7}, "x"
    )
    assert (inkling.layers[0].num_kv_heads, inkling.layers[0].head_dim) == (3, 7)
    assert inkling.layers[0].constant_state
    assert inkling.num_kv_heads == inkling.layers[5].num_kv_heads == 8
    assert read("per-layer").layers[1].num_kv_heads == 2
    assert read("Nemotron-H").layer_kinds == (
        "linear", "none", "linear", "full", "none", "none", "linear", "full",
    )  # fmt: skip


def test_positions_dtype_and_quantisation():
    assert read("pythia-1.4b").rope.partial_rotary_factor == 0.25
    assert read("phi-2").rope.partial_rotary_factor == 0.4
    assert read("Llama-2-7b").rope.partial_rotary_factor == 1.0
    assert read("Qwen2-7B").rope.theta == 1000000.0
    kinds = {name: read(name).rope.kind for name in PUBLISHED}
    assert [name for name, kind in kinds.items() if kind == "alibi"] == [
        "falcon-rw-1b",
        "mpt-7b",
        "bloom-560m",
    ]
    assert kinds["gpt2"] == kinds["opt-1.3b"] == kinds["bart-large-cnn"] == "none"
    assert read("Llama-2-7b").dtype == "float16"
    assert read("Llama-2-7b", dtype="bfloat16").dtype == "bfloat16"
    assert read("llava-1.5-7b").dtype == "float16"
    assert read("gpt2").dtype is None
    assert read("Llama-2-7b").quantization is None
    assert read("Llama-2-7b", quantization_config={"quant_method": "gptq"}).quantization == "gptq"
    assert read("gpt2").tie_word_embeddings
    assert not read("Llama-2-7b").tie_word_embeddings


def test_null_counts_follow_from_others():
    config = read("Llama-2-7b", num_key_value_heads=None, head_dim=None)
    assert (config.num_kv_heads, config.head_dim) == (32, 128)
    assert not config.head_dim_explicit
    assert read("Llama-2-7b", head_dim=64).head_dim == 64
    assert read("Llama-2-7b", head_dim=64).head_dim_explicit
    assert not read("gpt2", head_dim=8).head_dim_explicit
    assert read("gpt2", head_dim=8).head_dim == 64


def test_a_class_without_the_field_ignores_it():
    config = read("gpt2", num_key_value_heads=2)
    assert config.num_kv_heads == 12
    assert not config.declares_kv_heads
    assert config_faults(config) == [
        "num_key_value_heads is 2, but GPT2Config ignores it and has 12"
    ]


def test_every_count_is_written_where_the_reader_says(trial):
    """Edit the number of KV heads under text_path and kv_heads_key: the real class must see it."""
    seen = 0
    for model_type in known_model_types():
        record = record_for(model_type)
        config = trial.build(trial.CONFIG_MAPPING[model_type], {})
        if record.fallback or config is None or trial.facts_of(config) is None:
            continue
        ours = parse_config({"model_type": model_type}, "x")
        if not ours.declares_kv_heads or ours.kv_heads_key == ("multi_query",):
            continue
        kv_heads = 2 if ours.num_kv_heads != 2 else 4
        edited: dict = {"model_type": model_type}
        place = edited
        for key in (*ours.text_path, *ours.kv_heads_key)[:-1]:
            place = place.setdefault(key, {})
        place[ours.kv_heads_key[-1]] = kv_heads
        changed = trial.build(trial.CONFIG_MAPPING[model_type], edited)
        truth = None if changed is None else trial.facts_of(changed)
        if truth is None or ours.layers[0].num_kv_heads != ours.num_kv_heads:
            continue
        seen += 1
        assert parse_config(edited, "x").num_kv_heads == kv_heads, model_type
        if truth.get("heads"):
            assert kv_heads in {heads for heads, _ in truth["heads"]}, model_type
    assert seen > 150


def test_records_agree_with_the_real_classes(trial):
    known = 0
    for model_type in known_model_types():
        cls = trial.CONFIG_MAPPING[model_type]
        record = record_for(model_type)
        assert record.name == cls.__name__
        for name, default in record.fields.items():
            item = cls.__dataclass_fields__.get(name)
            if item is not None and name not in ("attn_config", "rope_parameters"):
                value = getattr(cls, name, None)
                if isinstance(value, bool | int | float | str):
                    assert default == value, (model_type, name)
        if record.fallback:
            continue
        config = trial.build(cls, {})
        truth = trial.facts_of(config)
        if truth is not None:
            known += 1
            ours = trial.facts_read(parse_config({"model_type": model_type}, "x"))
            differing = {key for key in truth if key in ours and ours[key] != truth[key]}
            assert not differing, (model_type, differing)
    assert known > 400


@pytest.mark.parametrize(
    "model_type", ["gpt_neox", "qwen2_moe", "lfm2", "bamba", "exaone4", "t5", "moonshine"]
)
def test_variations_of_a_config_agree(trial, model_type):
    assert trial.first_difference(model_type) is None


def test_what_the_rules_do_not_cover_is_asked_of_transformers(trial):
    asked = 0
    for model_type in known_model_types():
        if not record_for(model_type).fallback:
            continue
        config = trial.build(trial.CONFIG_MAPPING[model_type], {})
        truth = None if config is None else trial.facts_of(config)
        if truth is None:
            continue
        asked += 1
        ours = trial.facts_read(parse_config({"model_type": model_type}, "x"))
        differing = {key for key in truth if key in ours and ours[key] != truth[key]}
        assert not differing, (model_type, differing)
    assert asked > 8


def test_a_config_that_transformers_refuses_is_an_error(trial):
    with pytest.raises(CheckpointError, match="transformers refuses"):
        parse_config({"model_type": "cohere2_moe", "num_hidden_layers": "many"}, "x")


def test_a_model_type_nobody_knows_is_read_by_its_keys(trial):
    raw = {
        "model_type": "RefinedWeb", "n_layer": 60, "n_head": 128, "n_head_kv": 8,
        "hidden_size": 8192, "vocab_size": 65024,
    }  # fmt: skip
    config = parse_config(raw, "x")
    assert not config.known
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (60, 128, 8)
    assert config.head_dim == 64
    assert config.kv_heads_key == ("n_head_kv",)
    nested = parse_config({"model_type": "new_vlm", "text_config": raw}, "x")
    assert nested.text_path == ("text_config",)
    assert nested.num_kv_heads == 8
    with pytest.raises(CheckpointError) as caught:
        parse_config({"model_type": "new_lm", "n_layer": 3}, "config.json")
    assert "hidden_size" in str(caught.value)


def test_the_file_is_what_the_generator_writes():
    """Marks of classes left to transformers excepted: those take a slow test."""
    run = subprocess.run(
        [sys.executable, str(SCRIPTS / "class_defaults.py"), "--check", "--quick"],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
def test_the_file_is_what_the_generator_writes_marks_included():
    run = subprocess.run(
        [sys.executable, str(SCRIPTS / "class_defaults.py"), "--check", "--verbose"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


def test_reading_imports_neither_torch_nor_transformers(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["llava-1.5-7b"]))
    code = (
        "import sys, pathlib\n"
        "from gqaconvert.kv_cache.model_config import read_config\n"
        "assert read_config(pathlib.Path(sys.argv[1])).num_layers == 32\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"model_type": "llama", "model_type": "gpt2"}', "'model_type' occurs twice"),
        ('{"hidden_size": 8}', "does not name a model_type"),
        ('{"model_type": "llama", "num_hidden_layers": null}', "does not say num_hidden_layers"),
        ('{"model_type": "gpt2", "n_head": "12"}', "n_head is '12'"),
        ('{"model_type": "llama", "num_key_value_heads": 2.0}', "num_key_value_heads is 2.0"),
        ('{"model_type": "llama", "hidden_size": true}', "hidden_size is True"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path, text, what):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=what) as caught:
        read_config(tmp_path)
    assert str(tmp_path) in (caught.value.at or "")
    assert caught.value.remedy


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"num_key_value_heads": 5}, "32 attention heads cannot share 5 key-value heads evenly"),
        ({"num_key_value_heads": 64}, "32 attention heads cannot share 64"),
        ({"hidden_size": 4097}, "hidden_size 4097 is not a multiple of 32 heads"),
        ({"num_hidden_layers": 0}, "the number of layers is 0, not positive"),
        ({"num_attention_heads": -32, "num_key_value_heads": 8}, "heads is -32, not positive"),
        ({"num_attention_heads": 0}, "heads is 0, not positive"),
        ({"num_key_value_heads": -1}, "heads is -1, not positive"),
        ({"intermediate_size": "11008"}, "intermediate_size is '11008'"),
        ({"vocab_size": -5}, "vocab_size is -5"),
    ],
)
def test_counts_that_cannot_be_right_are_said(changes, fault):
    assert any(fault in found for found in config_faults(read("Llama-2-7b", **changes)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_no_faults(name):
    assert config_faults(read(name)) == []


def test_layers_and_their_list_must_agree():
    config = read("gemma-2-2b", layer_types=["full_attention"] * 3)
    assert config_faults(config) == ["26 layers, but layer_types lists 3"]
    assert config_faults(read("gemma-2-2b", layer_types=["full"] * 26)) == [
        "layer_types names 'full', which no class knows"
    ]


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.floats(allow_nan=True),
    st.text(max_size=4),
    st.lists(st.integers(-1, 3) | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_value_reads_or_is_an_error_of_ours(trial, data):
    name = data.draw(st.sampled_from(sorted(PUBLISHED)))
    raw = json.loads(json.dumps(PUBLISHED[name]))
    section = data.draw(st.sampled_from([raw] + [v for v in raw.values() if isinstance(v, dict)]))
    keys = [
        *section,
        "layer_types",
        "head_dim",
        "per_layer_config",
        "sliding_window",
        "text_config",
    ]
    section[data.draw(st.sampled_from(keys))] = data.draw(VALUES)
    try:
        config_faults(parse_config(raw, "x"))
    except CheckpointError as error:
        if not error.what or not error.at:
            pytest.fail("an error that names nothing")
