# ruff: noqa: ANN401
"""Writes gqaconvert/kv_cache/class_defaults.json from the transformers that is installed.

    python scripts/class_defaults.py            write the file
    python scripts/class_defaults.py --check    exit 1 when the file is not what would be written
    python scripts/class_defaults.py --verbose  say which classes are left to transformers, and why

Every record is then put to the test: its class and our reader get the same variations of a config,
and a class that they read differently is marked as one for which transformers has to be asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from class_tables import (
    ALIAS,
    ATTENTION,
    LAYER_TYPES,
    LIFTED,
    NOISE,
    RENAMED,
    ROTARY_OLD,
    RULES,
)
from class_trial import build, first_difference, source_of
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from gqaconvert.kv_cache import class_records
from gqaconvert.kv_cache.class_objects import text_path

TARGET = Path(class_records.__file__).with_name("class_defaults.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="compare with the file instead of writing it"
    )
    parser.add_argument(
        "--quick", action="store_true", help="keep the marks of the file, try no variations"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="name the classes that need transformers"
    )
    options = parser.parse_args()
    logging.set_verbosity(logging.CRITICAL)
    records = {name: record for name in sorted(CONFIG_MAPPING) if (record := describe(name))}
    use(records)
    faults = (
        marked()
        if options.quick
        else {name: fault for name in records if (fault := first_difference(name))}
    )
    for name in faults:
        records[name]["fallback"] = True
    text = render(records)
    if options.verbose:
        for name, fault in faults.items():
            print(f"{name}: {fault}")
    if options.check:
        same = text == TARGET.read_text(encoding="utf-8")
        print("up to date" if same else f"{TARGET.name} differs: run {Path(__file__).name}")
        return 0 if same else 1
    TARGET.write_text(text, encoding="utf-8")
    print(
        f"{TARGET.name}: {len(records)} classes, {len(faults)} of them left to transformers,"
        f" {len(text)} bytes"
    )
    return 0


def render(records: dict[str, dict[str, Any]]) -> str:
    """One class a line, so that differences read well."""
    lines = [f" {json.dumps(name)}: {json.dumps(record)}" for name, record in records.items()]
    head = f'{{"transformers": {json.dumps(transformers_version)},\n"classes": {{\n'
    return head + ",\n".join(lines) + "\n}}\n"


def marked() -> dict[str, str]:
    """Return the classes that the file marks."""
    entries = json.loads(TARGET.read_text(encoding="utf-8"))["classes"]
    return {name: "marked before" for name, entry in entries.items() if entry.get("fallback")}


def use(records: dict[str, dict[str, Any]]) -> None:
    """Let the reader work with these records instead of the file's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        path.write_text(render(records), encoding="utf-8")
        class_records._records.cache_clear()
        class_records._DATA, kept = path, class_records._DATA
        class_records.known_model_types()
        class_records._DATA = kept


def describe(name: str) -> dict[str, Any] | None:
    """Describe one class; None for a class that cannot be built here."""
    cls = CONFIG_MAPPING[name]
    alias = dict(cls.attribute_map)
    fields = {
        item.name: default_of(item)
        for item in dataclasses.fields(cls)
        if not NOISE.search(item.name)
    }
    fields["is_encoder_decoder"] = default_of(cls.__dataclass_fields__["is_encoder_decoder"])
    if "attn_config" in fields:
        built = vars(cls().attn_config)
        fields["attn_config"] = {
            key: built[key] for key in ("kv_n_heads", "alibi", "clip_qkv", "qk_ln") if key in built
        }
    kept = {key: value for key, value in fields.items() if is_small(value) or key == "attn_config"}
    if not cls.__dataclass_fields__["is_encoder_decoder"].default:
        kept.pop("is_encoder_decoder", None)
    if (
        "tie_word_embeddings" not in kept
        and getattr(build(cls, {}), "tie_word_embeddings", False) is True
    ):
        kept["tie_word_embeddings"] = True
    if not any("vocab" in key for key in kept) and not getattr(cls, "sub_configs_defaults", None):
        kept = {
            key: value
            for key, value in kept.items()
            if ATTENTION.search(key) or key == "is_encoder_decoder"
        }
    alias |= ALIAS.get(name, {})
    record: dict[str, Any] = {"class": cls.__name__, "fields": kept}
    alias = {key: value for key, value in alias.items() if not NOISE.search(key)}
    if alias:
        record["alias"] = alias
    if rules := rules_of(name, cls, kept, alias):
        record["rules"] = rules
    record |= nested(name, cls)
    return record


def default_of(item: dataclasses.Field[Any]) -> Any:
    if item.name == "rope_parameters":
        return None
    value = item.default
    if item.default_factory is not dataclasses.MISSING:
        value = item.default_factory()
    return (
        None if value is dataclasses.MISSING else list(value) if isinstance(value, tuple) else value
    )


def is_small(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 16 and all(isinstance(item, int | float | str) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def rules_of(name: str, cls: Any, fields: dict[str, Any], alias: dict[str, str]) -> dict[str, Any]:
    rules = dict(RULES.get(name, {}))
    source = source_of(cls)
    renames = dict(rules.pop("renames", {}))
    for new, old in re.findall(r"self\.(\w+) = kwargs\.pop\(\s*\"(\w+)\", self\.\1\)", source):
        if not NOISE.search(new):
            renames[old] = new
    if renames:
        rules["renames"] = renames
    list_name = alias.get("layer_types", "layer_types")
    if isinstance(inspect.getattr_static(cls, list_name, None), property):
        rules["layer_types_are_computed"] = True
    if name in LAYER_TYPES:
        rules["layer_types"] = LAYER_TYPES[name]
    elif pattern := found_pattern(cls, alias):
        rules["layer_types"] = {"rule": "pattern", **pattern}
    if "window" not in rules and re.search(
        r"self\.sliding_window if self\.use_sliding_window else", source
    ):
        rules["window"] = {"switch": "use_sliding_window"}
    if "shared" not in rules and hasattr(cls, "kv_sharing_modes"):
        rules["shared"] = "last"
    if "head_dim" not in rules and (rule := head_dim_rule(cls, fields, alias, source)):
        rules["head_dim"] = rule
    if rule := rope_rule(name, cls, rules.pop("rope_keys", {})):
        rules["rope"] = rule
    tied = [
        getattr(build(cls, {"tie_word_embeddings": value}), "tie_word_embeddings", None)
        for value in (True, False)
    ]
    if tied[0] is not None and tied[0] == tied[1]:
        rules["constant"] = {"tie_word_embeddings": tied[0]}
    return rules


def found_pattern(cls: Any, alias: dict[str, str]) -> dict[str, Any] | None:
    """Try several depths and find the beginning, cycle and end that give all of them."""
    key = alias.get("num_hidden_layers", "num_hidden_layers")
    if key not in cls.__dataclass_fields__ or not hasattr(build(cls, {key: 4}), "layer_types"):
        return None
    seen = {n: build(cls, {key: n}) for n in (*range(1, 15), *range(21, 33))}
    seen = {
        n: list(config.layer_types) for n, config in seen.items() if config and config.layer_types
    }
    if len(seen) < 20:
        return None
    for from_end in (False, True):
        lists = {n: types[::-1] if from_end else types for n, types in seen.items()}
        if pattern := fit(lists):
            return {**pattern, "from_end": True} if from_end else pattern
    return None


def fit(lists: dict[int, list[str]]) -> dict[str, Any] | None:
    longest = lists[max(lists)]
    for tail_length in (0, 1):
        body = longest[: len(longest) - tail_length]
        tail = longest[len(longest) - tail_length :]
        for head_length in range(5):
            for width in range(1, 9):
                cycle = body[head_length : head_length + width]
                head = body[:head_length]
                if all(types == laid(head, cycle, tail, n) for n, types in lists.items()):
                    parts = {"head": head, "cycle": cycle, "tail": tail}
                    return {key: value for key, value in parts.items() if value}
    return None


def laid(head: list[str], cycle: list[str], tail: list[str], count: int) -> list[str]:
    types = (head + cycle * (count // len(cycle) + 1))[:count]
    types[max(count - len(tail), 0) :] = tail[max(len(tail) - count, 0) :]
    return types


def head_dim_rule(
    cls: Any, fields: dict[str, Any], alias: dict[str, str], source: str
) -> str | None:
    if "kv_lora_rank" in fields:
        return "mla"
    name = alias.get("head_dim", "head_dim")
    if name in fields:
        forced = re.search(rf"^\s+self\.{name} = self\.\w+ // self\.\w+$", source, re.M)
        guarded = re.search(rf"if self\.{name} is None:\n\s+self\.{name} =", source)
        return "computed" if forced and not guarded else None
    module = Path(inspect.getfile(cls))
    model = module.with_name(module.name.replace("configuration_", "modeling_"))
    text = model.read_text(encoding="utf-8") if model.is_file() else ""
    attention = re.sub(
        r'\bdim = getattr\(config, "head_dim", None\) or .*', "", text
    )  # the rotary embedding only
    return None if re.search(r"config\.head_dim\b|config, \"head_dim\"", attention) else "ignored"


def rope_rule(name: str, cls: Any, keys: dict[str, str]) -> dict[str, Any] | None:
    if name in ROTARY_OLD:
        return {"theta": 10000.0, **keys}
    parameters = getattr(build(cls, {}), "rope_parameters", None)
    if not parameters:
        return None
    if any(isinstance(value, dict) for value in parameters.values()):
        return {"nested": True}
    rule = {"theta": parameters.get("rope_theta")}
    if (factor := parameters.get("partial_rotary_factor")) is not None:
        rule["factor"] = factor
    return {**rule, **keys}


def nested(name: str, cls: Any) -> dict[str, Any]:
    specs = getattr(cls, "sub_configs_defaults", None) or {}
    plain = build(cls, {})
    path = text_path(plain) if plain is not None and specs else ()
    if not path or path[0] not in specs:
        return {}
    key = path[0]
    spec, source = specs[key], source_of(cls)
    section: dict[str, Any] = {"model_type": spec.model_type}
    if hasattr(spec.config_class, "model_type"):
        section["fixed"] = True
    if spec.init_kwargs:
        section["defaults"] = {
            k: v for k, v in spec.init_kwargs.items() if not NOISE.search(k) and k != "model_type"
        }
    if "init_kwargs, **self.text_config" in source.replace("\n", " "):
        section["merged"] = True
    if name in RENAMED:
        section["renamed"] = RENAMED[name]
    record: dict[str, Any] = {"sub": {key: section}}
    probe = build(cls, {"num_hidden_layers": 3})
    if name in LIFTED:
        record["lifts"] = LIFTED[name]
    elif (
        getattr(getattr(probe, key, None), "num_hidden_layers", None)
        == 3
        != getattr(getattr(build(cls, {}), key, None), "num_hidden_layers", None)
    ):
        record["lifts"] = ""
    tied = build(cls, {"tie_word_embeddings": False, key: {"tie_word_embeddings": True}})
    if getattr(tied, "tie_word_embeddings", False):
        record.setdefault("rules", {})["tied_as_text"] = True
    return record


if __name__ == "__main__":
    sys.exit(main())
