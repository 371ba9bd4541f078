"""Asks transformers about a config class that the data file does not cover.

The only module here that imports it: its config classes cost seconds, so this happens for rare
classes only. Code that a checkpoint brings along is never run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from gqaconvert.errors import CheckpointError
from gqaconvert.kv_cache.class_records import ClassRecord
from gqaconvert.kv_cache.class_rules import Section


def build(
    raw: Mapping[str, Any], at: str
) -> tuple[Section, tuple[Section, tuple[str, ...]]] | None:
    """Build the real config object and read it off.

    Returns:
        The whole config, and its language model with the keys that lead to it; None when
        transformers has no such class.

    Raises:
        CheckpointError: transformers refuses the config.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = raw["model_type"]
    if model_type not in CONFIG_MAPPING:
        return None
    try:
        config = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(raw)))
    except Exception as error:  # its validators raise what they like
        raise CheckpointError(
            f"transformers refuses this config: {error}",
            at=at,
            remedy="compare it with the config.json the model was published with",
        ) from error
    path = text_path(config)
    text = config
    for key in path:
        text = getattr(text, key)
    return read_object(config), (read_object(text), path)


def read_object(config: Any) -> Section:  # noqa: ANN401
    """Read a config object off into plain values."""
    record = describe(type(config))
    peek = config._getattr_without_heterogeneous_validation
    names = {
        *record.fields,
        *record.alias,
        *vars(config),
        "head_dim",
        "layer_types",
        "sliding_window",
    }
    names |= {"num_hidden_layers", "num_key_value_heads", "kv_sharing_modes"}
    values = {
        record.field_name(name): _plain(peek(name, None)) for name in names if name[:1] != "_"
    }
    layer_types = values.get(record.field_name("layer_types"))
    spec = getattr(config, "_heterogeneity_spec", None)
    overrides = {} if spec is None else copy.deepcopy(spec.per_layer_overrides)
    return Section(record, values, None if layer_types is None else tuple(layer_types), overrides)


def describe(config_class: Any) -> ClassRecord:  # noqa: ANN401
    """Return a record of a config class with its fields and their other names, without rules."""
    defaults = {}
    for item in fields(config_class):
        value = item.default
        if item.default_factory is not MISSING:
            value = item.default_factory()
        defaults[item.name] = None if value is MISSING else _plain(value)
    rules = {"shared": "modes"} if hasattr(config_class, "kv_sharing_modes") else {}
    alias = dict(config_class.attribute_map)
    return ClassRecord(config_class.__name__, config_class.model_type, defaults, alias, rules)


def text_path(config: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Return the keys that lead from a config object to the language model's."""
    return _leading_to(config, config.get_text_config(decoder=True))


def _leading_to(config: Any, text: Any) -> tuple[str, ...]:  # noqa: ANN401
    parts = {key: part for key, part in vars(config).items() if hasattr(part, "get_text_config")}
    for key, part in parts.items():
        if part is text:
            return (key, *text_path(part))
    for key, part in parts.items():
        if deeper := _leading_to(part, text):
            return (key, *deeper)
    return ()


def _plain(value: Any) -> Any:  # noqa: ANN401
    return value.to_dict() if hasattr(value, "to_dict") else value
