"""Config keys on the way from one class to another: what is carried over, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gqaconvert.errors import UnsupportedModelError
from gqaconvert.kv_cache.model_config import ModelConfig

_ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn"})
"""Kinds of RoPE that were compared across the classes."""


def require(config: ModelConfig, target: str, **wanted: object) -> None:
    """Refuse options under which the other class would compute something else.

    Args:
        config: the source's config.
        target: the other class.
        wanted: option → the only value that has an equivalent.

    Raises:
        UnsupportedModelError: naming the option.
    """
    for option, value in wanted.items():
        found = config.get(option, value)
        if found != value:
            raise UnsupportedModelError(
                f"{config.model_type} with {option}={found!r} cannot be converted: its own class"
                f" has no number of KV heads, and {target}, which equals it otherwise, has no such"
                " option",
                at=f"{config.at} {option}",
            )


def carried(
    config: ModelConfig,
    *,
    model_type: str,
    architecture: str,
    tokens: Mapping[str, int | None],
    tokenizer: str,
) -> dict[str, Any]:
    """Return the keys of the other class's config.json that every class has.

    Args:
        config: the source's config.
        model_type: of the other class.
        architecture: its model class.
        tokens: ids of special tokens → what the source's class defaults them to.
        tokenizer: tokenizer class that the source's class implies; the other may imply another.
    """
    raw: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
    for key, default in tokens.items():
        raw[key] = config.raw.get(key, default)
    for key in ("dtype", "torch_dtype", "quantization_config", "compression_config"):
        if key in config.raw:
            raw[key] = config.raw[key]
    raw["tie_word_embeddings"] = config.tie_word_embeddings
    raw["tokenizer_class"] = config.raw.get("tokenizer_class") or tokenizer
    raw["use_cache"] = config.get("use_cache", True)
    raw["vocab_size"] = config.vocab_size
    return raw


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Return the source's RoPE under the keys that every rotary class reads.

    Raises:
        UnsupportedModelError: a kind of RoPE that was not compared.
    """
    given = config.raw.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise UnsupportedModelError(
            f"RoPE of type {kind!r} is not known to be the same in the class that"
            f" {config.model_type} is rewritten into",
            at=f"{config.at} rope_scaling",
        )
    return {
        **{key: value for key, value in given.items() if key != "type"},
        "rope_type": kind,
        "rope_theta": config.rope.theta,
        "partial_rotary_factor": config.rope.partial_rotary_factor,
    }
