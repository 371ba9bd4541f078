"""Finds what describes the language model in a config, and fills it in.

By the records of classes, by asking transformers, or by the names of keys, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gqaconvert.kv_cache.class_records import ClassRecord, SubSection, record_for
from gqaconvert.kv_cache.class_rules import Section, fill_in
from gqaconvert.kv_cache.plain_keys import plain_record


@dataclass(frozen=True, slots=True)
class FoundSection:
    """Where the language model is described.

    Attributes:
        whole: the whole config, filled in.
        text: the language model's part of it; the same object where they are one.
        path: keys that lead to that part in the file.
    """

    whole: Section
    text: Section
    path: tuple[str, ...]


def find_text(raw: Mapping[str, Any], model_type: str, at: str) -> FoundSection:
    """Find the language model.

    Raises:
        CheckpointError: transformers had to be asked, and refuses the config.
    """
    found = _from_records(raw, model_type) or _from_transformers(raw, model_type, at)
    if found is not None:
        return found
    record = plain_record(model_type, raw)
    path = tuple(record.sub)
    text = fill_in(section_at(raw, path), record)
    return FoundSection(fill_in(raw, record) if path else text, text, path)


def section_at(raw: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the object that keys lead to, empty when it is not there."""
    for key in path:
        inner = raw.get(key)
        raw = inner if isinstance(inner, dict) else {}
    return raw


def _from_records(raw: Mapping[str, Any], model_type: str) -> FoundSection | None:
    """Follow the records to the language model; None when one on the way is not covered."""
    record = record_for(model_type)
    if record is None or record.fallback:
        return None
    top = fill_in(raw, record)
    section, path = raw, tuple[str, ...]()
    while record.sub:
        key, spec = next(iter(record.sub.items()))
        inner = section.get(key)
        if inner is None and record.lifts is not None:
            key, inner = record.lifts, section.get(record.lifts) if record.lifts else section
        if isinstance(inner, dict):
            section = {**spec.defaults, **inner} if spec.merged else inner
        elif inner is None:
            section = spec.defaults
        else:
            return None
        lifted = inner is not None and not key
        path = (*path, key) if key else path
        following = record_for(_type_of(section if not lifted else {}, spec))
        if following is None or following.fallback:
            return None
        record = following
        if lifted:
            section = {key: value for key, value in section.items() if key in record.fields}
            break
    text = top if section is raw else fill_in(section, record)
    return FoundSection(top, text, path)


def _type_of(section: Mapping[str, Any], spec: SubSection) -> str:
    written = section.get("model_type", spec.model_type)
    if spec.fixed or not isinstance(written, str):
        return spec.model_type
    return spec.renamed.get(written, written)


def _from_transformers(raw: Mapping[str, Any], model_type: str, at: str) -> FoundSection | None:
    from gqaconvert.kv_cache.class_objects import build  # imports transformers: seconds

    built = build({**raw, "model_type": model_type}, at)
    if built is None:
        return None
    whole, (text, path) = built
    record, outer = record_for(text.record.model_type), record_for(model_type)
    if record is not None:
        rules = {**text.record.rules, **_of_the_code(record)}
        text = replace(text, record=replace(text.record, rules=rules))
    if path and outer is not None and outer.lifts is not None and raw.get(path[0]) is None:
        path = (outer.lifts,) if outer.lifts else ()
    return FoundSection(whole, text, path)


def _of_the_code(record: ClassRecord) -> dict[str, Any]:
    # Of the rules, those that speak of the model's code, not of what its config class computes.
    keep = ("kv_heads", "head_dim", "per_layer_code", "alibi", "rope")
    return {name: rule for name, rule in record.rules.items() if name in keep}
