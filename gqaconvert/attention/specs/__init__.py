"""Attention layouts as data, one YAML file each: names of projections, and order of their rows.

To add an architecture, add its `model_type` to the file of its layout, or a new file, and an entry
to tests/zoo.yaml, which the contract matrix runs over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from gqaconvert.attention.layouts import Layout

_FOLDER = Path(__file__).parent
_NOT_LAYOUTS = frozenset({"freedom", "naming", "refused", "rope"})

LegalCount = Literal["one", "even"]


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """How one family of classes stores attention.

    Attributes:
        name: the YAML file's stem.
        layout: row order of the fused projection, or "split" for separate ones.
        layout_multi_query: row order where it differs with a single KV head.
        fused: names of the fused projection.
        query, key, value, output, key_norm: names of the separate ones.
        model_types: classes that the contract matrix covers.
        legal: restrictions on the number of KV heads beyond divisibility.
        full_width_key_norm: classes whose key norm has a gain of K*D.
        shared_blocks: one block serves several layers, or the config counts other things among its
            layers, so that blocks cannot be matched with layers.
        key_is_value: option under which layers without a value projection take keys for values.
        caches_all_heads: transformers repeats the KV heads of this class before it caches them.
        refused_options: option → why a checkpoint that sets it cannot be converted.
    """

    name: str
    layout: Layout | Literal["split"]
    layout_multi_query: Layout | None = None
    fused: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    value: tuple[str, ...] = ()
    output: tuple[str, ...] = ()
    key_norm: tuple[str, ...] = ()
    model_types: frozenset[str] = frozenset()
    legal: tuple[LegalCount, ...] = ()
    full_width_key_norm: tuple[str, ...] = ()
    shared_blocks: bool = False
    key_is_value: str | None = None
    caches_all_heads: bool = False
    refused_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Naming:
    """What parts of tensor names mean; see naming.yaml."""

    towers: frozenset[str]
    draft_layers: frozenset[str]
    indexers: frozenset[str]
    layer_lists: frozenset[str]
    attention_hints: frozenset[str]


def layout_for(model_type: str) -> LayoutSpec:
    """Return the spec that lists `model_type`, or the ordinary one for classes no spec lists."""
    return _by_model_type().get(model_type) or ordinary_layout()


@cache
def ordinary_layout() -> LayoutSpec:
    """Return the layout of separate projections, as Llama has it."""
    return next(spec for spec in layout_specs() if "llama" in spec.model_types)


def certified_types() -> frozenset[str]:
    """Return the classes that the contract matrix covers."""
    return frozenset(_by_model_type())


def is_certified(model_type: str) -> bool:
    """Whether the contract matrix covers this class."""
    return model_type in _by_model_type()


def refusal(model_type: str) -> str | None:
    """Return why a class is refused by name, or None."""
    return cast(dict[str, str], _load("refused")["refused"]).get(model_type)


def rope_pairing(model_type: str) -> Literal["halves", "adjacent"]:
    """Return which dimensions RoPE turns together: (i, i + D/2), or (2i, 2i + 1)."""
    return "adjacent" if model_type in _load("rope")["adjacent"] else "halves"


@cache
def naming() -> Naming:
    """Return naming.yaml."""
    lists = _load("naming")
    return Naming(**{key: frozenset(values) for key, values in lists.items()})


@dataclass(frozen=True, slots=True)
class FreedomFacts:
    """What the code of a class, and no tensor, says about its heads; see freedom.yaml."""

    keys_fixed: Mapping[str, str]
    values_fixed: Mapping[str, str]
    key_norm_options: Mapping[str, str]
    rope_in_sliding_layers: frozenset[str]
    gates: frozenset[str]
    per_query_head: frozenset[str]
    output_norms: frozenset[str]
    query_norms: frozenset[str]
    not_per_head: frozenset[str]


@cache
def freedom_facts() -> FreedomFacts:
    """Return freedom.yaml."""
    facts: dict[str, Any] = {
        key: frozenset(value) if isinstance(value, list) else value
        for key, value in _load("freedom").items()
    }
    return FreedomFacts(**facts)


@cache
def layout_specs() -> tuple[LayoutSpec, ...]:
    """Return every layout, in file name order."""
    return tuple(
        spec
        for path in sorted(_FOLDER.glob("*.yaml"))
        if path.stem not in _NOT_LAYOUTS
        for spec in _parse(path.stem)
    )


@cache
def _by_model_type() -> dict[str, LayoutSpec]:
    return {name: spec for spec in layout_specs() for name in spec.model_types}


@cache
def _load(stem: str) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return cast(dict[str, Any], yaml.load((_FOLDER / f"{stem}.yaml").read_text(), Loader=loader))


def _parse(stem: str) -> list[LayoutSpec]:
    """One spec for the file, and one more for each class with an exception."""
    fields = dict(_load(stem))
    exceptions: dict[str, dict[str, Any]] = fields.pop("exceptions", {})
    types = frozenset(fields.pop("model_types"))
    plain: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
    }
    specs = [LayoutSpec(stem, model_types=types - set(exceptions), **plain)]
    for model_type, changes in exceptions.items():
        own = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in changes.items()
        }
        specs.append(LayoutSpec(stem, model_types=frozenset({model_type}), **plain | own))
    return specs
