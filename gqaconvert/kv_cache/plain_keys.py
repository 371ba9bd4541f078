"""Config files of classes that transformers does not know: how they call the same few counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gqaconvert.kv_cache.class_records import ClassRecord, SubSection

NAMES: Mapping[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": (
        "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "kv_n_heads",
        "multi_query_group_num", "num_query_groups", "num_attention_groups",
    ),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed", "dim"),
    "head_dim": ("head_dim", "kv_channels", "d_kv"),
    "max_position_embeddings": (
        "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx",
        "max_sequence_length",
    ),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
}  # fmt: skip
"""What we call a count → how files call it, commonest first."""


def plain_record(model_type: str, raw: Mapping[str, Any]) -> ClassRecord:
    """Return a record that fits the keys that a file happens to have; its name is empty."""
    nested = isinstance(raw.get("text_config"), dict)
    section = raw["text_config"] if nested else raw
    alias, fields = {}, dict[str, Any]()
    for name, spellings in NAMES.items():
        used = next((key for key in spellings if section.get(key) is not None), name)
        fields[used] = None
        if used != name:
            alias[name] = used
    if section.get("multi_query") is not None or section.get("multi_query_attention") is False:
        fields.pop(alias.pop("num_key_value_heads", "num_key_value_heads"), None)
    rules: dict[str, Any] = (
        {"rope": {}} if "rope_theta" in section or "rope_scaling" in section else {}
    )
    if section.get("multi_query") is not None:
        rules["kv_heads"] = "multi_query"
    sub = {"text_config": SubSection(model_type)} if nested else {}
    return ClassRecord("", model_type, fields, alias, rules, sub)
