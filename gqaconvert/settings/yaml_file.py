"""YAML as people write it: values, the line of every key, and faults instead of surprises.

It reads the core of YAML 1.2, so that `2e12` is a number, and `no` or `12:30` are words. A key
given twice is a fault, not the last one winning; anchors, aliases and tags are not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gqaconvert.errors import UsageError

Keys = tuple[str | int, ...]
"""Where a value is: keys of sections and numbers in lists, from the outside in."""

_TAG = "tag:yaml.org,2002:"
_NUMBERS = (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
        "-+.0123456789",
    ),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong at one place.

    Attributes:
        keys: which value.
        what: in words.
        place: where it is written, such as "line 12"; empty if it is nowhere.
    """

    keys: Keys
    what: str
    place: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, dotted(self.keys), self.what) if part)


@dataclass
class YamlContent:
    """What a file says.

    Attributes:
        value: plain Python values.
        lines: the line of each key and list element, counted from 1.
        faults: duplicate keys and other things that cannot be read.
    """

    value: Any = None
    lines: dict[Keys, int] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    """Makes nodes only; values are made from them by `_Reading`."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own way

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.composer.ComposerError(
                None, None, "anchors and aliases are not read", event.start_mark
            )
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either version of YAML would not read as text."""


for _kind in (_Loader, _Dumper):
    for _name, _pattern, _first in _NUMBERS:
        _kind.add_implicit_resolver(
            _TAG + _name, re.compile(f"(?:{_pattern})\\Z"), [*_first, *([""] * (_name == "null"))]
        )


def dotted(keys: Keys) -> str:
    """Write keys as people do: `uptrain.data.datasets.0.path`."""
    return ".".join(map(str, keys))


def read_yaml(path: Path) -> YamlContent:
    """Read a file of one document.

    Raises:
        UsageError: there is no such file, or it is not YAML at all; says the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", at=str(path)) from error
    return parse_yaml(content, at=str(path))


def parse_yaml(content: str | bytes, *, at: str) -> YamlContent:
    """Read one document.

    Args:
        content: its text.
        at: where it is from, for errors.

    Raises:
        UsageError: not YAML.
    """
    try:
        node = yaml.compose(content, Loader=_Loader)
        reading = _Reading()
        if node is not None:
            reading.value = reading.read(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise UsageError(f"{line}not YAML: {error.problem or error.context}", at=at) from error
    except yaml.YAMLError as error:
        raise UsageError(f"not YAML: {' '.join(str(error).split())}", at=at) from error
    except RecursionError as error:
        raise UsageError("not YAML that can be read: nested too deeply", at=at) from error
    return reading


def write_yaml(value: Mapping[str, Any]) -> str:
    """Write plain values as YAML that `parse_yaml` reads back as the same values."""
    text: str = yaml.dump(
        dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    return text


class _Reading(YamlContent):
    """Makes values of nodes, and notes lines and faults on the way."""

    def read(self, node: yaml.Node, keys: Keys) -> Any:  # noqa: ANN401
        self.lines.setdefault(keys, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, keys)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.read(each, (*keys, number)) for number, each in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, keys)
        self._fault(keys, f"the tag {node.tag} is not read", node)
        return None

    def _mapping(self, node: yaml.MappingNode, keys: Keys) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._fault(keys, "a key is one word", key_node)
                continue
            name = str(key_node.value)
            place = (*keys, name)
            if name in found:
                first = self.lines[place]
                self._fault(place, f"given twice, first on line {first}", key_node)
                continue
            self.lines[place] = key_node.start_mark.line + 1
            found[name] = self.read(value_node, place)
        return found

    def _scalar(self, node: yaml.ScalarNode, keys: Keys) -> Any:  # noqa: ANN401
        text = str(node.value)
        try:
            match node.tag.removeprefix(_TAG):
                case "str":
                    return text
                case "null":
                    return None
                case "bool":
                    return text.lower() == "true"
                case "int":
                    return int(text)
                case "float":
                    return float(text)
        except ValueError:
            pass  # only with an explicit tag, or with thousands of digits
        self._fault(keys, f"{text[:40]!r} with the tag {node.tag} is not read", node)
        return None

    def _fault(self, keys: Keys, what: str, node: yaml.Node) -> None:
        self.faults.append(Fault(keys, what, f"line {node.start_mark.line + 1}"))
