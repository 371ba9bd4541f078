# ruff: noqa: ANN401
"""Puts the records of config classes to the test: class and reader get the same configs."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from class_tables import LINEAR, NOISE
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqaconvert.errors import CheckpointError
from gqaconvert.kv_cache import class_records
from gqaconvert.kv_cache.model_config import ModelConfig, parse_config


@cache
def source_of(cls: Any) -> str:
    """Return the text of a class."""
    return inspect.getsource(cls)


def build(cls: Any, raw: dict[str, Any]) -> Any:
    """Build a config; None when the class refuses."""
    try:
        return cls.from_dict(json.loads(json.dumps(raw)))
    except Exception:
        return None


def first_difference(name: str) -> str | None:
    """Say where the class and our reader first differ on variations of a config."""
    cls = CONFIG_MAPPING[name]
    if build(cls, {}) is None and getattr(cls, "sub_configs_defaults", None):
        return "it has no defaults of its own"
    for raw in variations(name):
        config = build(cls, raw)
        truth = facts_of(config) if config is not None else None
        if truth is None:
            continue
        try:
            ours = facts_read(parse_config({"model_type": name, **raw}, "test"))
        except CheckpointError as error:
            return f"{raw}: {error.what}"
        for key, value in truth.items():
            if key in ours and ours[key] != value:
                return f"{raw}: {key} is {value}, read as {ours[key]}"
    return None


def variations(name: str) -> Iterator[dict[str, Any]]:
    """Configs that say a little: each field changed, absent, null, under its other name."""
    record = class_records.record_for(name)
    assert record is not None
    yield {}
    if record.sub:
        key = next(iter(record.sub))
        yield {key: {"num_hidden_layers": 3}}
        yield {key: {"tie_word_embeddings": True}, "tie_word_embeddings": False}
        yield {"tie_word_embeddings": True}
        yield {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
        return
    layers = record.field_name("num_hidden_layers")
    few = {layers: 30} if "num_kv_shared_layers" in record.fields else {layers: 7}
    few = few if type(record.fields.get(layers)) is int else {}
    for count in (1, 2, 5, 12) if few else ():
        yield {layers: count + few[layers] - 1}
        yield {layers: count} if few[layers] == 7 else {}
    for key, value in record.fields.items():
        if type(value) is bool:
            yield {**few, key: not value}
        elif type(value) is int and key != layers:
            yield {**few, key: value * 2}
            yield {**few, key: 2}
        if re.search(r"window|chunk|head_dim|key_value|kv_|pattern|interval|period", key):
            yield from ({**few, key: 3}, {**few, key: None})
    for key, target in record.alias.items():
        if type(record.fields.get(target)) is int:
            yield {key: record.fields[target] * 2}
    window = {**few, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    if "use_sliding_window" in record.fields:
        yield window
        yield {**window, "use_sliding_window": False}
    if few and "layer_types" in {*record.fields, *record.alias}:
        yield {**few, record.field_name("layer_types"): ["full_attention"] * few[layers]}
        yield {
            **few,
            record.field_name("layer_types"): (["sliding_attention", "full_attention"] * 15)[
                : few[layers]
            ],
        }
        if "per_layer" not in record.rules:
            yield {
                **few,
                record.field_name("layer_types"): (["mamba", "attention"] * 15)[: few[layers]],
            }
    source = source_of(CONFIG_MAPPING[name])
    for key in sorted(set(re.findall(r"kwargs\.(?:pop|get|setdefault)\(\s*\"(\w+)\"", source))):
        if not NOISE.search(key) and key != "model_type":
            value = (
                0.75
                if re.search("factor|pct", key)
                else "M*M*-ME"
                if key.endswith("_pattern")
                else 3
            )
            yield {**few, key: 3 if key == "sliding_window_pattern" else value}


PLAIN_FACTS = (
    "num_layers", "hidden_size", "num_heads", "vocab_size", "max_position_embeddings",
    "tie_word_embeddings", "kv_lora_rank",
)  # fmt: skip

CACHED_AS = {
    "full_attention": "full", "indexed_attention": "full", "minimax_m3_sparse": "full",
    "hybrid": "full", "sliding_attention": "sliding", "hybrid_sliding": "sliding",
    "reference_sliding_attention": "sliding", "chunked_attention": "chunked",
    "compressed_sparse_attention": "compressed", "heavily_compressed_attention": "compressed",
    "linear_attention": "linear", "conv": "linear", "dummy": "none",
}  # fmt: skip


def facts_of(config: Any) -> dict[str, Any] | None:
    """Read a config object as caches and attention modules do; None without attention."""
    try:
        text = config.get_text_config(decoder=True)
        text = text if text is config else text.get_text_config(decoder=True)
        kinds, widths = get_layer_types_and_kwargs(text)
    except Exception:
        return None
    peek = text._getattr_without_heterogeneous_validation
    if type(text.num_hidden_layers) is not int or type(peek("hidden_size", None)) is not int:
        return None
    heads = peek("num_attention_heads", None) or 0
    if (
        type(heads) is not int
        or (not heads and set(kinds) != {LINEAR})
        or not set(kinds) <= set(CACHED_AS)
    ):
        return None
    decoder_layers = getattr(text, "num_decoder_layers", None) if text.is_encoder_decoder else None
    facts = {
        "num_layers": decoder_layers or text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "num_heads": heads,
        "vocab_size": getattr(text, "vocab_size", None),
        "max_position_embeddings": getattr(text, "max_position_embeddings", None),
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
        "kv_lora_rank": peek("kv_lora_rank", None),
    }
    if facts["max_position_embeddings"] == -1:  # XLNet's way to say that there is no limit
        facts["max_position_embeddings"] = None
    own_cache = text.model_type in ("rwkv", "xlstm")
    if facts["num_layers"] == len(kinds) and not own_cache:
        facts["kinds"] = [CACHED_AS[kind] for kind in kinds]
        facts["windows"] = [width.get("sliding_window") or None for width in widths]
        facts["heads"] = [
            (0, 0) if facts["kinds"][i] in ("linear", "none") else head_shape(layer)
            for i, layer in enumerate(text.per_layer_config)
        ]
    parameters = getattr(text, "rope_parameters", None)
    if parameters and not any(isinstance(value, dict) for value in parameters.values()):
        facts["rope"] = (
            parameters.get("partial_rotary_factor") or 1.0,
            parameters.get("rope_theta"),
        )
    return facts


def head_shape(layer: Any) -> tuple[int, int]:
    heads = getattr(layer, "num_attention_heads", None) or 0
    kv_heads = getattr(layer, "num_key_value_heads", None) or heads
    if layer.model_type == "falcon":
        old = heads if not layer.multi_query else 1
        kv_heads = layer.num_kv_heads if layer.new_decoder_architecture else old
    if getattr(layer, "kv_lora_rank", None) is not None:
        return kv_heads, layer.qk_nope_head_dim + layer.qk_rope_head_dim
    head_dim = getattr(layer, "head_dim", None)
    return kv_heads, head_dim or (layer.hidden_size // heads if heads else 0)


def facts_read(config: ModelConfig) -> dict[str, Any]:
    """Read the same facts off our own reader."""
    shared = [layer.shared for layer in config.layers]
    facts: dict[str, Any] = {key: getattr(config, key) for key in PLAIN_FACTS}
    facts["kinds"] = [
        "none" if mine else layer.kind for layer, mine in zip(config.layers, shared, strict=True)
    ]
    facts["windows"] = [
        None if mine else layer.window for layer, mine in zip(config.layers, shared, strict=True)
    ]
    facts["heads"] = [
        (0, 0) if layer.shared else (layer.num_kv_heads, layer.head_dim) for layer in config.layers
    ]
    if "per_layer_code" in config.section.record.rules:
        del facts["heads"]  # only the attention module knows
    if config.rope.kind == "rotary":
        facts["rope"] = (config.rope.partial_rotary_factor, config.rope.theta)
    return facts
