"""Finds everything that is wrong with written settings, not only what pydantic meets first.

Pydantic compares keys of a section only once each of them is right. Here wrong ones are replaced
and the rest is checked again, so that one reading tells all.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gqaconvert.settings.yaml_file import Fault, Keys

_PREFIX = "Value error, "
_NOT_A_SECTION = frozenset({"model_type", "model_attributes_type", "dict_type"})
_ROUNDS = 8
"""How often replacing one wrong value may uncover another."""


def find_faults(model: type[BaseModel], content: Any) -> list[Fault]:  # noqa: ANN401
    """Return all faults of the content, without places; none if the model takes it."""
    found: dict[tuple[Keys, str], Fault] = {}
    replaced: set[str] = set()
    content = copy.deepcopy(content)
    for _ in range(_ROUNDS):
        errors = _errors(model, content)
        for fault in (fault for error in errors for fault in _as_faults(model, error)):
            if not any(re.search(rf"\b{name}", fault.what) for name in replaced):
                found.setdefault((fault.keys, fault.what), fault)
        changed = [_replace(model, content, error["loc"], replaced) for error in errors]
        if not any(changed):
            break
    return list(found.values())


def _errors(model: type[BaseModel], content: Any) -> list[ErrorDetails]:  # noqa: ANN401
    try:
        model.model_validate(content)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        # A list whose elements are all wrong counts as empty: that is no fault of its own.
        within = {each["loc"][:-1] for each in errors} | {each["loc"][:-2] for each in errors}
        return [each for each in errors if each["type"] != "too_short" or each["loc"] not in within]
    return []


def _as_faults(model: type[BaseModel], error: ErrorDetails) -> Iterator[Fault]:
    keys = error["loc"]
    section = section_model(model, keys[:-1])
    match error["type"]:
        case "extra_forbidden" if section:
            yield Fault(keys, f"no such key; {_nearest(str(keys[-1]), section)}")
        case "missing":
            yield Fault(keys, "missing")
        case "too_short":
            yield Fault(keys, f"needs at least {error['ctx']['min_length']} of them")
        case kind if kind in _NOT_A_SECTION:
            inner = section_model(model, keys)
            names = f": {', '.join(inner.model_fields)}" if inner else ""
            yield Fault(keys, f"needs keys and values{names}")
        case _:
            for line in error["msg"].removeprefix(_PREFIX).split("\n"):
                yield Fault(keys, line[:1].lower() + line[1:])


def _nearest(name: str, section: type[BaseModel]) -> str:
    near = difflib.get_close_matches(name, section.model_fields, 1)
    return f"{near[0]}?" if near else f"there are {', '.join(section.model_fields)}"


def section_model(model: type[BaseModel], keys: Keys) -> type[BaseModel] | None:
    """Return the model of the section that keys lead to; None if they lead to no section."""
    for key in keys:
        if isinstance(key, int):
            continue  # an element of the list whose type was found already
        if key not in model.model_fields:
            return None
        inner = next(_models(model.model_fields[key].annotation), None)
        if inner is None:
            return None
        model = inner
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401
    """Yield the models in a type such as `LoraSettings | None` or `tuple[StageSettings, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _replace(model: type[BaseModel], content: Any, keys: Keys, replaced: set[str]) -> bool:  # noqa: ANN401
    """Drop a wrong value, or put the example of a required key; False if neither can be done."""
    while keys and isinstance(keys[-1], int):
        keys = keys[:-1]  # the whole list
    if not keys:
        return False
    *above, last = keys
    holder = content
    for key in above:
        try:
            holder = holder[key]
        except (KeyError, IndexError, TypeError):
            return False  # dropped with another fault
    section = section_model(model, tuple(above))
    if not isinstance(holder, dict) or section is None:
        return False
    known = section.model_fields.get(str(last))
    if known is not None:
        replaced.add(str(last))
        if known.is_required() and not known.examples:
            return False
        if known.is_required() and known.examples:
            holder[last] = known.examples[0]
            return True
    return holder.pop(last, None) is not None
