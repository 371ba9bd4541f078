"""Facts of a config that several places may state: positions, tying, dtype, quantisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gqaconvert.kv_cache.class_rules import Section

Rotary = Literal["rotary", "alibi", "none"]


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions enter the attention.

    Attributes:
        kind: "rotary", "alibi", or "none" when queries and keys are not touched (learned or no
            positions).
        partial_rotary_factor: share of each head that is rotated; None where layers differ or
            nothing is rotated.
        theta: base of the frequencies, None where unknown or where layers differ.
    """

    kind: Rotary
    partial_rotary_factor: float | None = None
    theta: float | None = None


def embeddings_tied(top: Section, section: Section) -> bool:
    """Return whether input and output embeddings are one tensor."""
    # The outermost config decides; some classes take over what older files wrote one level down.
    if top.get("tie_word_embeddings"):
        return True
    if top is not section and top.record.rules.get("tied_as_text"):
        return bool(section.get("tie_word_embeddings"))
    return False


def dtype_name(section: Mapping[str, Any]) -> str | None:
    """Return the dtype a section names, under its new or its old key."""
    for key in ("dtype", "torch_dtype"):
        if isinstance(section.get(key), str):
            return str(section[key]).removeprefix("torch.")
    return None


def quantization_method(section: Mapping[str, Any]) -> str | None:
    """Return the name of the quantisation method, None for plain weights."""
    for key in ("quantization_config", "compression_config"):
        settings = section.get(key)
        if isinstance(settings, dict) and settings:
            bits = settings.get("load_in_8bit") or settings.get("load_in_4bit")
            return str(settings.get("quant_method") or ("bitsandbytes" if bits else "unnamed"))
    return None


def read_rope(section: Section, written: Mapping[str, Any], head_dim: int) -> Rope:
    """Read how positions enter the attention of the language model."""
    rules = section.record.rules
    alibi = rules.get("alibi")
    settings = section.get("attn_config")
    inner = isinstance(settings, dict) and settings.get("alibi") and alibi == "attn_config"
    if alibi == "always" or inner or (alibi == "alibi" and section.get("alibi")):
        return Rope("alibi")
    if alibi == "attn_config" or not ("rope" in rules or section.get("rope_parameters")):
        return Rope("none")
    rule = rules.get("rope", {})
    parameters = written.get("rope_scaling") or section.get("rope_parameters") or {}
    if rule.get("nested"):
        return Rope("rotary")
    if any(isinstance(value, dict) for value in parameters.values()):
        return Rope("rotary")
    theta = parameters.get(
        "rope_theta", section.get(rule.get("theta_key", "rope_theta"), rule.get("theta"))
    )
    factor = parameters.get("partial_rotary_factor")
    if factor is None:
        factor = section.get(rule.get("factor_key", "partial_rotary_factor"), rule.get("factor"))
    width = section.get(rule.get("width_key", ""))
    if factor is None and isinstance(width, int) and head_dim:
        factor = width / head_dim
    return Rope("rotary", 1.0 if factor is None else factor, theta)
