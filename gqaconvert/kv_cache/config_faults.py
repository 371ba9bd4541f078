"""Says what in a config cannot be right, from the config alone."""

from __future__ import annotations

import re

from gqaconvert.kv_cache.layer_attention import KINDS
from gqaconvert.kv_cache.model_config import ModelConfig

_COUNT = re.compile(
    r"^(num_|n_)\w+|(_size|_dim|_layers|_heads|_embeddings|_positions|sliding_window|max_window_layers|d_model|d_kv)$"
)


def config_faults(config: ModelConfig) -> list[str]:
    """Return what cannot be right, one sentence each; empty when nothing was found."""
    faults = _odd_values(config) + _signs(config)
    if not faults:
        faults = _divisions(config) + _ignored(config)
    return faults


def _odd_values(config: ModelConfig) -> list[str]:
    faults = []
    for key, value in config.text.items():
        text = isinstance(value, str) and _COUNT.search(key)
        fraction = isinstance(value, float) and key.startswith(("num_", "n_"))
        truth = isinstance(value, bool) and key.endswith(("_heads", "_layers", "_size"))
        if text or fraction or truth:
            faults.append(f"{key} is {value!r}, not a whole number")
    return faults


def _signs(config: ModelConfig) -> list[str]:
    heads = any(layer.kind not in ("linear", "none") for layer in config.layers)
    heads = heads or not config.layers
    counts = {
        "the number of layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "the number of attention heads": config.num_heads if heads else 1,
        "the number of key-value heads": config.num_kv_heads if heads else 1,
        "vocab_size": 1 if config.vocab_size is None else config.vocab_size,
    }
    faults = [f"{name} is {count}, not positive" for name, count in counts.items() if count <= 0]
    if not faults and heads and config.head_dim <= 0:
        faults.append(f"head_dim is {config.head_dim}, not positive")
    for key in ("sliding_window", "attention_chunk_size"):
        width = getattr(config, key)
        if isinstance(width, int) and width <= 0:
            faults.append(f"{key} is {width}, not positive")
    return faults


def _divisions(config: ModelConfig) -> list[str]:
    faults = []
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads and heads % kv_heads:
        faults.append(f"{heads} attention heads cannot share {kv_heads} key-value heads evenly")
    implied = config.section.get("head_dim") is None and not config.head_dim_explicit
    if heads and implied and config.kv_lora_rank is None and config.hidden_size % heads:
        faults.append(
            f"hidden_size {config.hidden_size} is not a multiple of {heads} heads,"
            " and there is no head_dim"
        )
    names = {layer.type_name for layer in config.layers} - set(KINDS)
    faults += [f"layer_types names {name!r}, which no class knows" for name in sorted(names)]
    declared = config.get("num_hidden_layers")
    types = config.section.layer_types
    if types is not None and not config.is_encoder_decoder and declared != len(types):
        faults.append(f"{declared} layers, but layer_types lists {len(types)}")
    return faults


def _ignored(config: ModelConfig) -> list[str]:
    written = config.text.get("num_key_value_heads")
    ignored = config.kv_heads_key is None or "num_key_value_heads" not in config.kv_heads_key
    alias = (
        config.section.record.field_name("num_key_value_heads")
        == (config.kv_heads_key or ("",))[-1]
    )
    if (
        config.known
        and ignored
        and not alias
        and isinstance(written, int)
        and written != config.num_kv_heads
    ):
        return [
            f"num_key_value_heads is {written}, but {config.class_name} ignores it"
            f" and has {config.num_kv_heads}"
        ]
    return []
