"""What config classes of transformers say by default, from a generated file, without an import.

`class_defaults.json` is written by `scripts/class_defaults.py`; a test checks it against
transformers itself. The words its rules use are explained in `class_rules`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_DATA = Path(__file__).with_name("class_defaults.json")


@dataclass(frozen=True, slots=True)
class SubSection:
    """A nested config that a class builds from one of its keys.

    Attributes:
        model_type: class to build when the section names none.
        fixed: the class is built whatever `model_type` the section names.
        defaults: values used in place of an absent section.
        merged: whether `defaults` also fill a section that is there.
        renamed: model types of older files → what they are now.
    """

    model_type: str
    fixed: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    merged: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ClassRecord:
    """One config class.

    Attributes:
        name: class name, such as "LlamaConfig".
        model_type: as config.json names it.
        fields: the class's own fields that matter here → default.
        alias: other names of fields (`attribute_map`), such as num_hidden_layers → n_layer.
        rules: how the class derives what is not written, see `class_rules`.
        sub: nested configs that lead to the language model, in the order they are looked for.
        lifts: the key that a flat file of old is read into, None when the class does no such thing.
        fallback: the rules above do not cover the class, so that transformers has to be asked.
    """

    name: str
    model_type: str
    fields: Mapping[str, Any]
    alias: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    sub: Mapping[str, SubSection] = field(default_factory=dict)
    lifts: str | None = None
    fallback: bool = False

    def field_name(self, key: str) -> str:
        """Return the field that `key` is another name of, or `key`."""
        return self.alias.get(key, key)


def record_for(model_type: str) -> ClassRecord | None:
    """Return what is known about a model type, None when transformers had no class of that name."""
    return _records().get(model_type)


def known_model_types() -> tuple[str, ...]:
    """Return every model type in the data file, sorted."""
    return tuple(sorted(_records()))


@cache
def _records() -> dict[str, ClassRecord]:
    classes = json.loads(_DATA.read_text(encoding="utf-8"))["classes"]
    return {model_type: _record(model_type, entry) for model_type, entry in classes.items()}


def _record(model_type: str, entry: dict[str, Any]) -> ClassRecord:
    sub = {key: SubSection(**section) for key, section in entry.get("sub", {}).items()}
    plain = {key: value for key, value in entry.items() if key not in ("class", "sub")}
    return ClassRecord(name=entry["class"], model_type=model_type, sub=sub, **plain)
