# ruff: noqa: ANN401
"""What `class_defaults.py` cannot find out by trying.

Which fields matter, and how layer types, windows and counts follow from keys.
"""

from __future__ import annotations

import re
from typing import Any

NOISE = re.compile(
    r"token_id|token_index|drop|loss|initializer|init_|_init|return_dict|output_hidden|output_att|feed_forward$"
    r"|id2label|label2id|problem_type|architectures|transformers_version|^dtype$|_cost|pretraining_tp|use_cache"
    r"|summary_|router_aux|router_z|jitter|mask_time|mask_feature|_out_|^chunk_size_feed|out_indices|out_features"
)
"""Fields that say nothing about shapes."""

ATTENTION = re.compile(
    r"hidden_size|heads|layers|head_dim|window|kv|key_value|bias|rope|rotary|max_position|intermediate|d_model|dim$|tie_|depth"
)
"""What is kept of classes without words: towers for images and sound."""


def period(key: str, hit: str, miss: str, **more: Any) -> dict[str, Any]:
    return {"rule": "period", "period": key, "hit": hit, "miss": miss, **more}


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
WINDOW_START = {"rule": "window_start"}
EVERY_SIXTH = period("sliding_window_pattern", FULL, SLIDING, default=6)
SWA_CYCLE = {"cycle": ["hybrid_sliding"] * 5 + ["hybrid"]}
ZAMBA2 = [LINEAR] + ([LINEAR] * 5 + ["hybrid"]) * 7
ZAMBA2 += [LINEAR] * 4 + ["hybrid"] + [LINEAR] * 3 + ["hybrid"] + [LINEAR] * 2

LAYER_TYPES: dict[str, dict[str, Any]] = {
    "afmoe": period("global_attn_every_n_layers", FULL, SLIDING),
    "bailing_hybrid": period("layer_group_size", FULL, LINEAR),
    "bamba": {"rule": "index", "indices": "attn_layer_indices", "hit": FULL, "miss": LINEAR},
    "cohere2": period("sliding_window_pattern", FULL, SLIDING, default=4),
    "deepseek_ocr2_encoder": WINDOW_START,
    "dots1": WINDOW_START,
    "embedding_gemma2_text": EVERY_SIXTH,
    "exaone4": period("sliding_window_pattern", FULL, SLIDING),
    "exaone_moe": period("sliding_window_pattern", FULL, SLIDING),
    "gemma3_text": EVERY_SIXTH,
    "inkling_text": {
        "rule": "index", "indices": "local_layer_ids", "hit": "hybrid_sliding", "miss": "hybrid",
        "otherwise": SWA_CYCLE,
    },
    "jamba": period("attn_layer_period", FULL, LINEAR, offset="attn_layer_offset"),
    "lfm2": {
        "rule": "index", "indices": "full_attn_idxs", "hit": FULL, "miss": "conv",
        "otherwise": {"cycle": [FULL]},
    },
    "llama4_text": {
        "rule": "rope", "width": "attention_chunk_size", "rotary": True, "hit": "chunked_attention",
    },
    "ministral": {"rule": "window", "hit": SLIDING},
    "modernbert": period("global_attn_every_n_layers", FULL, SLIDING, default=3, offset=0),
    "modernbert-decoder": period("global_attn_every_n_layers", FULL, SLIDING, default=3, offset=0),
    "nemotron_h": {
        "rule": "letters", "letters": "hybrid_override_pattern",
        "otherwise": [LINEAR, "moe", FULL, "mlp"],
    },
    "olmo_hybrid": {"rule": "at_least_one", "cycle": [LINEAR] * 3 + [FULL], "needed": FULL},
    "qwen2": WINDOW_START,
    "qwen2_5_omni_talker": WINDOW_START,
    "qwen2_5_omni_text": WINDOW_START,
    "qwen2_5_vl_text": WINDOW_START,
    "qwen2_moe": {"rule": "window_end"},
    "qwen2_vl_text": WINDOW_START,
    "qwen3": WINDOW_START,
    "qwen3_5_moe_text": period("full_attention_interval", FULL, LINEAR, default=4),
    "qwen3_5_text": period("full_attention_interval", FULL, LINEAR, default=4),
    "qwen3_next": period("full_attention_interval", FULL, LINEAR, default=4),
    "qwen4_exp_text": period("full_attention_interval", "indexed_attention", LINEAR, default=4),
    "recurrent_gemma": {
        "rule": "blocks", "blocks": "block_types", "names": {"recurrent": LINEAR}, "other": SLIDING,
    },
    "rwkv": {"rule": "pattern", "cycle": [LINEAR]},
    "smollm3": {
        "rule": "rope", "width": "sliding_window", "switch": "use_sliding_window",
        "rotary": False, "hit": SLIDING,
    },
    "t5gemma2_decoder": EVERY_SIXTH,
    "t5gemma2_text": EVERY_SIXTH,
    "unlimited_ocr_text": {"rule": "window", "hit": "reference_sliding_attention"},
    "zamba2": {"rule": "pattern", "cycle": ZAMBA2},
    "xlstm": {"rule": "pattern", "cycle": [LINEAR]},
}  # fmt: skip
"""Layer types that follow from keys; a fixed cycle is found by trying."""

INDEXED = {FULL: "indexed_attention"}
GEMMA4 = {
    "per_layer": "global_heads",
    "last_layer": FULL,
    "window": {"both_ways_if": "use_bidirectional_attention", "value": "all"},
}
NEOX = {"rope_keys": {"factor_key": "rotary_pct", "theta_key": "rotary_emb_base"}}
WIDTH = {"width_key": "rotary_dim"}
SWA_FIELDS = {"per_layer_code": "swa_fields"}

RULES: dict[str, dict[str, Any]] = {
    "bloom": {"renames": {"n_embed": "hidden_size"}, "alibi": "always"},
    "dbrx": {"kv_heads": "attn_config"},
    "diffusion_gemma_text": GEMMA4,
    "embedding_gemma2_text": {**GEMMA4, "global_kv_heads": 1},
    "falcon": {
        "renames": {"n_embed": "hidden_size"}, "kv_heads": "falcon", "alibi": "alibi",
        "head_dim": "ignored",
    },
    "gemma3_text": {"window": {"both_ways_if": "use_bidirectional_attention"}},
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "glm5_next_text": {"layer_type_names": INDEXED},
    "codegen": {"rope_keys": WIDTH},
    "gptj": {"rope_keys": WIDTH},
    "minimax_m2": {"rope_keys": WIDTH},
    "gpt_bigcode": {"kv_heads": "multi_query"},
    "gpt_neox": NEOX,
    "gpt_neox_japanese": NEOX,
    "hy_v4": {"kv_heads": "as_heads"},
    "hy_v4_vl_text": {"kv_heads": "as_heads"},
    "inkling2_loop_text": SWA_FIELDS,
    "inkling2_text": SWA_FIELDS,
    "inkling_text": SWA_FIELDS,
    "jetmoe": {"attention_heads_product": ["num_key_value_heads", "num_experts_per_tok"]},
    "longcat_flash": {"layers_times_two": "num_layers"},
    "mimo_v2_flash": {
        "per_layer_code": "twice_the_kv_heads", "window": {"one_less": "sliding_window_size"},
    },
    "mistral_large4_text": {"shared": "sources"},
    "modernbert": {"window": {"half_of": "local_attention"}},
    "modernbert-decoder": {"window": {"half_of": "local_attention"}},
    "mpt": {"alibi": "attn_config"},
    "nemotron_h": {"layers_from_types": True},
    "qwen3_vl_moe_text": {"window": {"never": True}},
    "qwen4_exp_text": {"layer_type_names": INDEXED},
    "reformer": {"layers_from_list": "attn_layers"},
    "zamba": {"head_dim": "twice_if_absent"},
    "zamba2": {"head_dim": "twice"},
}  # fmt: skip
"""What else a class derives in a way of its own."""

ALIAS = {"prophetnet": {"num_hidden_layers": "num_encoder_layers"}}
"""Properties that work as another name."""

ROTARY_OLD = ("gptj", "codegen")
"""Classes that rotate without rope_parameters."""

LIFTED = {"unlimited_ocr": "language_config"}
RENAMED = {"exaone4_5": {"exaone4_5_text": "exaone4"}, "kimi_k25": {"kimi_k2": "deepseek_v3"}}
