"""Settings from a YAML file and `--set`, with all their faults told at once.

The faults come as one error, a line each: where it is written, which key, what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gqaconvert.errors import UsageError
from gqaconvert.settings.base import Settings
from gqaconvert.settings.faults import find_faults
from gqaconvert.settings.yaml_file import Fault, Keys, dotted, parse_yaml, read_yaml

S = TypeVar("S", bound=Settings)

SET = "--set"


def load_settings(
    model: type[S], path: Path, overrides: Sequence[str] = (), *, remedy: str | None = None
) -> S:
    """Read settings from a YAML file.

    Args:
        model: what the file holds.
        path: the file.
        overrides: `a.b=value` each, the value in YAML; `a.0.b` for an element of a list. They
            replace what the file says, the later ones what the earlier ones say.
        remedy: what to try when something is wrong.

    Raises:
        UsageError: no such file, not YAML, or anything wrong in it or in the overrides.
    """
    at = str(path)
    written = read_yaml(path)
    content = written.value
    if not isinstance(content, dict):
        raise UsageError("there are no keys and values in it", at=at, remedy=remedy)
    places: dict[Keys, str] = {keys: f"line {line}" for keys, line in written.lines.items()}
    faults = [*written.faults]
    for override in overrides:
        faults += _override(content, override, places)
    # A root that lacks a key is no line of the file; all other sections have one.
    places[()] = ""
    unread = {fault.keys for fault in faults}
    faults += [fault for fault in _placed(model, content, places) if fault.keys not in unread]
    return _settings(model, content, faults, at=at, remedy=remedy)


def make_settings(
    model: type[S], content: Mapping[str, Any], *, at: str, remedy: str | None = None
) -> S:
    """Check settings that are no file's.

    Args:
        model: what they are.
        content: keys and values.
        at: where they are from, for errors.
        remedy: what to try when something is wrong.

    Raises:
        UsageError: anything wrong in them.
    """
    return _settings(model, content, _placed(model, content, {}), at=at, remedy=remedy)


def _settings(
    model: type[S], content: Mapping[str, Any], faults: list[Fault], *, at: str, remedy: str | None
) -> S:
    if not faults:
        return model.model_validate(content)
    lines = [str(fault) for fault in sorted(faults, key=_order)]
    what = lines[0] if len(lines) == 1 else "\n".join([f"{len(lines)} faults", *lines])
    raise UsageError(what, at=at, remedy=remedy)


def _placed(
    model: type[Settings], content: Mapping[str, Any], places: Mapping[Keys, str]
) -> list[Fault]:
    """Find faults and say where each is written: its own place or that of the section around it."""
    found = find_faults(model, content)
    return [Fault(fault.keys, fault.what, _place(fault.keys, places)) for fault in found]


def _place(keys: Keys, places: Mapping[Keys, str]) -> str:
    for length in range(len(keys), -1, -1):
        if keys[:length] in places:
            return places[keys[:length]]
    return ""


def _order(fault: Fault) -> tuple[int, int]:
    """What is missing, then line by line, then overrides."""
    place = fault.place
    if place.startswith("line "):
        return (1, int(place.removeprefix("line ")))
    return (2, 0) if place else (0, 0)


def _override(content: dict[str, Any], override: str, places: dict[Keys, str]) -> list[Fault]:
    """Put one override into the content; return what is wrong with it."""
    name, equals, text = override.partition("=")
    name = name.strip()
    keys: Keys = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
    if not equals or "" in keys:
        return [Fault((), f"{override!r} is not KEY=VALUE, such as uptrain.lr=1e-4", SET)]
    try:
        value = parse_yaml(text, at=SET)
    except UsageError as error:
        return [Fault(keys, error.what.removeprefix("line 1: "), SET)]
    if value.faults:
        return [Fault((*keys, *fault.keys), fault.what, SET) for fault in value.faults]
    holder: Any = content
    for depth, key in enumerate(keys[:-1]):
        inner = _step(holder, key)
        if inner is None and isinstance(holder, dict):
            inner = holder[str(key)] = {}
            places[keys[: depth + 1]] = SET
        if not isinstance(inner, dict | list):
            return [Fault(keys, f"there is no section {dotted(keys[: depth + 1])}", SET)]
        holder = inner
    last = keys[-1]
    if isinstance(holder, list):
        if not isinstance(last, int) or last >= len(holder):
            return [Fault(keys, f"a number below {len(holder)} chooses an element", SET)]
        holder[last] = value.value
    else:
        holder[str(last)] = value.value
    for below in [each for each in places if each[: len(keys)] == keys]:
        del places[below]
    places[keys] = SET
    return []


def _step(holder: Any, key: str | int) -> Any:  # noqa: ANN401
    if isinstance(holder, list):
        return holder[key] if isinstance(key, int) and key < len(holder) else None
    return holder.get(str(key))
