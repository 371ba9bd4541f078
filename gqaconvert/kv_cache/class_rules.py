"""How config classes fill in what config.json leaves out: layer types, windows, counts, widths.

Works on one section of a config and the record of its class; nothing here knows about files. A
class that these rules do not reproduce is marked by the generator of the records, which compares
them with the real class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gqaconvert.kv_cache.class_records import ClassRecord

LAYER_TYPE_NAMES = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
"""Layer types of older files → their present name (transformers, `_LEGACY_LAYER_TYPE_REMAP`)."""

_PATTERN_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


@dataclass(frozen=True)
class Section:
    """A section with everything filled in that its class fills in.

    Attributes:
        record: the class.
        fields: field → value, class defaults included.
        layer_types: the class's name for each layer's kind, None when the class has no such list.
        overrides: layer → fields in which it differs from the others (`per_layer_config`).
    """

    record: ClassRecord
    fields: Mapping[str, Any]
    layer_types: tuple[str, ...] | None = None
    overrides: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401
        """Return a field by its own or another name."""
        return self.fields.get(self.record.field_name(key), default)


def fill_in(section: Mapping[str, Any], record: ClassRecord) -> Section:
    """Read a section as its class would.

    Keys that are fields of the class are set first, then what they imply is derived, then all other
    keys are set: the order in which transformers' `PreTrainedConfig` works, and the reason why an
    alias in a file can come too late.
    """
    fields = {record.field_name(name): default for name, default in record.fields.items()}
    late: dict[str, Any] = {}
    renames = record.rules.get("renames", {})
    for key, value in section.items():
        if key in record.fields:
            fields[record.field_name(key)] = _merged(record.fields[key], value)
        elif key in renames:
            if value is not None:
                fields[renames[key]] = value
        elif key != "model_type":
            late[record.field_name(key)] = value
    _derive(fields, section, record)
    own_layer_types = record.rules.get("layer_types_are_computed", False)
    list_name = record.field_name("layer_types")
    if record.rules.get("head_dim") in ("mla", "ignored"):
        late.pop("head_dim", None)
    if own_layer_types:
        late.pop(list_name, None)
    fields |= late
    for name, value in record.rules.get("constant", {}).items():
        fields[record.field_name(name)] = value
    layer_types = _layer_types(fields, section, record)
    return Section(record, fields, layer_types, _overrides(fields, layer_types, section, record))


def _merged(default: object, value: object) -> object:
    # Only attn_config has a dict of fields as its default; what the file leaves out of it keeps the
    # default.
    if isinstance(default, dict) and default and isinstance(value, dict):
        return {**default, **value}
    return default if isinstance(default, dict) and default and value is None else value


def _derive(fields: dict[str, Any], section: Mapping[str, Any], record: ClassRecord) -> None:
    rules = record.rules
    if window := rules.get("window"):
        fields["sliding_window"] = _window(window, fields, section)
    if "attention_heads_product" in rules:
        fields["num_attention_heads"] = _product(fields, rules["attention_heads_product"])
    kv_name = record.field_name("num_key_value_heads")
    if fields.get(kv_name, 0) is None or rules.get("kv_heads") == "as_heads":
        fields[kv_name] = fields.get(record.field_name("num_attention_heads"))
    if fields.get("num_decoder_layers", 0) is None:
        fields["num_decoder_layers"] = fields.get(record.field_name("num_hidden_layers"))
    if "layers_from_list" in rules:
        fields["num_hidden_layers"] = len(fields[rules["layers_from_list"]] or ())
    if "layers_times_two" in rules:
        fields["num_hidden_layers"] = 2 * fields[rules["layers_times_two"]]


def _product(fields: Mapping[str, Any], names: Sequence[str]) -> int:
    result = 1
    for name in names:
        result *= fields[name]
    return result


def _window(rule: Mapping[str, Any], fields: Mapping[str, Any], section: Mapping[str, Any]) -> Any:  # noqa: ANN401
    window = fields.get("sliding_window")
    if "switch" in rule:  # Qwen: the width is written in every file, and off in nearly all
        return window if fields.get(rule["switch"]) else None
    if rule.get("never"):
        return None
    if "both_ways_if" in rule:  # Gemma: half of a bidirectional window lies behind
        value = fields.get(rule["both_ways_if"])
        both = value == rule["value"] if "value" in rule else bool(value)
        return window // 2 + 1 if both and window else window
    if "half_of" in rule:
        width = fields.get(rule["half_of"])
        return width // 2 if width else None
    if "one_less" in rule and section.get(rule["one_less"]) is not None:
        return section[rule["one_less"]] + 1
    return window


def _layer_types(
    fields: dict[str, Any], section: Mapping[str, Any], record: ClassRecord
) -> tuple[str, ...] | None:
    rules = record.rules
    name = record.field_name("layer_types")
    written: Any = None if rules.get("layer_types_are_computed") else fields.get(name)
    if written is None and "layer_types" in rules:
        count = fields.get(record.field_name("num_hidden_layers"))
        if rules.get("layers_from_types"):
            count = 0
        if type(count) is not int or count < 0:
            return None
        reader = _Reader(fields, section, record)
        written = _RULES[rules["layer_types"]["rule"]](rules["layer_types"], count, reader.get)
    if not isinstance(written, list):
        return None
    types = [str(kind) for kind in written]
    types = [LAYER_TYPE_NAMES.get(kind, kind) for kind in types]
    types = [rules.get("layer_type_names", {}).get(kind, kind) for kind in types]
    if types and "last_layer" in rules:
        types[-1] = rules["last_layer"]
    if rules.get("layers_from_types"):
        fields["num_hidden_layers"] = len(types)
    fields[name] = types
    return tuple(types)


@dataclass(frozen=True)
class _Reader:
    """Fields of the class first, then keys that the class takes without having them as fields."""

    fields: Mapping[str, Any]
    section: Mapping[str, Any]
    record: ClassRecord

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401
        name = self.record.field_name(key)
        if name in self.fields:
            return self.fields[name]
        return self.section.get(key, default)


_Get = Callable[..., Any]


def _by_pattern(rule: Mapping[str, Any], count: int, get: _Get) -> list[str]:
    """A beginning, a cycle and an end, counted from the first or from the last layer."""
    head, cycle, tail = rule.get("head", []), rule["cycle"], rule.get("tail", [])
    types: list[str] = (head + cycle * (count // len(cycle) + 1))[:count]
    types[max(count - len(tail), 0) :] = tail[max(len(tail) - count, 0) :]
    return types[::-1] if rule.get("from_end") else types


def _by_period(rule: Mapping[str, Any], count: int, get: _Get) -> list[str]:
    """One layer in every `period` is a `hit`: the last of them, or the one at `offset`."""
    period = get(rule["period"], rule.get("default"))
    if not period:
        return [rule["miss"]] * count
    offset = get(rule["offset"]) if isinstance(rule.get("offset"), str) else rule.get("offset")
    place = period - 1 if offset is None else offset
    return [rule["hit"] if layer % period == place else rule["miss"] for layer in range(count)]


def _by_window_start(rule: Mapping[str, Any], count: int, get: _Get) -> list[str]:
    """Layers from max_window_layers on slide, when there is a window."""
    slides = get("sliding_window") is not None
    first = get("max_window_layers") or 0
    return [
        "sliding_attention" if slides and i >= first else "full_attention" for i in range(count)
    ]


def _by_window_end(rule: Mapping[str, Any], count: int, get: _Get) -> list[str]:
    """Every other layer below max_window_layers slides, when the switch is on."""
    end = get("max_window_layers") if get("use_sliding_window") else 0
    return [
        "sliding_attention" if i % 2 == 0 and i < end else "full_attention" for i in range(count)
    ]


def _by_window(rule: Mapping[str, Any], count: int, get: _Get) -> list[str]:
    """All layers slide, or none."""
    return [rule["hit"] if get("sliding_window") is not None else "full_attention"] * count


def _by_rope(rule: Mapping[str, Any], count: int, get: _Get) -> list[str]:
    """Layers with (or without) rotary positions look at a window or a chunk, when there is one."""
    interval = get("no_rope_layer_interval")
    rotary = get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    on = get(rule["width"]) is not None and (get(rule["switch"]) if "switch" in rule else True)
    wanted = bool(rule["rotary"])
    return [rule["hit"] if on and bool(has) == wanted else "full_attention" for has in rotary]


def _by_index(rule: Mapping[str, Any], count: int, get: _Get) -> list[str]:
    """The layers listed under a key are a `hit`; without the list, another rule or no layer is."""
    listed = get(rule["indices"])
    if listed is None and "otherwise" in rule:
        return _by_pattern(rule["otherwise"], count, get)
    return [rule["hit"] if i in (listed or ()) else rule["miss"] for i in range(count)]


def _by_blocks(rule: Mapping[str, Any], count: int, get: _Get) -> list[str]:
    """A cycle of block names that the file itself gives."""
    blocks = list(get(rule["blocks"])) * 100
    return [rule["names"].get(block, rule["other"]) for block in blocks[:count]]


def _by_letters(rule: Mapping[str, Any], count: int, get: _Get) -> list[str]:
    """A word with a letter for each layer (Nemotron-H)."""
    letters = get(rule["letters"])
    if isinstance(letters, str):
        return [_PATTERN_LETTERS.get(letter, letter) for letter in letters]
    return list(rule["otherwise"])


def _at_least_one(rule: Mapping[str, Any], count: int, get: _Get) -> list[str]:
    """A cycle, but the last layer has attention when the cycle gave it to none."""
    types = _by_pattern(rule, count, get)
    if types and rule["needed"] not in types:
        types[-1] = rule["needed"]
    return types


_RULES: Mapping[str, Callable[[Mapping[str, Any], int, _Get], list[str]]] = {
    "pattern": _by_pattern,
    "period": _by_period,
    "window_start": _by_window_start,
    "window_end": _by_window_end,
    "window": _by_window,
    "rope": _by_rope,
    "index": _by_index,
    "blocks": _by_blocks,
    "letters": _by_letters,
    "at_least_one": _at_least_one,
}


def _overrides(
    fields: Mapping[str, Any],
    layer_types: tuple[str, ...] | None,
    section: Mapping[str, Any],
    record: ClassRecord,
) -> dict[int, dict[str, Any]]:
    written = section.get("per_layer_config")
    if isinstance(written, dict):
        return {int(layer): dict(values) for layer, values in written.items()}
    if record.rules.get("per_layer") != "global_heads" or layer_types is None:
        return {}
    # Gemma 4: layers with full attention have heads of their own size, and may have fewer.
    values: dict[str, Any] = {"head_dim": section.get("global_head_dim", 512)}
    kv_heads = section.get("num_global_key_value_heads", record.rules.get("global_kv_heads"))
    if kv_heads is not None and fields.get("attention_k_eq_v", True):
        values["num_key_value_heads"] = kv_heads
    return {i: values for i, kind in enumerate(layer_types) if kind == "full_attention"}
