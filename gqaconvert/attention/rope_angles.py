"""How far RoPE turns each plane from one token to the next, as the config says. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gqaconvert.kv_cache.model_config import ModelConfig


def rope_angles(
    config: ModelConfig, layer_type: str | None, rotary_dims: int
) -> tuple[float, ...] | None:
    """Return the angle of each plane, fastest first.

    Args:
        config: of the model.
        layer_type: of the layer, since some classes turn each type otherwise.
        rotary_dims: dimensions that RoPE turns.

    Returns:
        Radians a token; None where the base is unknown, or the scaling is none of those that
        depend on the plane alone (default, linear, llama3).
    """
    parameters = _parameters(config, layer_type)
    theta = parameters.get("rope_theta", config.rope.theta)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(theta, int | float) or theta <= 0:
        return None
    plain = [theta ** (-2 * plane / rotary_dims) for plane in range(rotary_dims // 2)]
    if kind in ("default", "mrope"):
        return tuple(plain)
    try:
        if kind == "linear":
            return tuple(angle / parameters["factor"] for angle in plain)
        if kind == "llama3":
            return tuple(_llama3(angle, parameters) for angle in plain)
    except (KeyError, TypeError, ZeroDivisionError):
        return None
    return None


def _parameters(config: ModelConfig, layer_type: str | None) -> Mapping[str, Any]:
    found = config.text.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        return {}
    own = found.get(layer_type) if layer_type else None
    return own if isinstance(own, Mapping) else found


def _llama3(angle: float, parameters: Mapping[str, Any]) -> float:
    """Slow planes by `factor` slower, fast ones as they were, those between in between."""
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * angle / (2 * math.pi)
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return float((1 - share) * angle / parameters["factor"] + share * angle)
