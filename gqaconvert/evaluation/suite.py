"""What an evaluation measures, as a value: `quick`, `standard`, or a YAML file of one's own."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gqaconvert.errors import UsageError

_HERE = Path(__file__).resolve().parent.parent
_PLACES = (_HERE / "bundled" / "eval", _HERE.parent / "configs" / "eval")
"""Where suites are: in an installed package, and in the repository."""


class NeedleSuite(BaseModel):
    """Lengths and depths of the long-context probe, see `needle`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lengths: tuple[int, ...] = (256, 512, 1024)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    repeats: int = Field(default=2, ge=1)


class Suite(BaseModel):
    """What to measure, the same for all models of a comparison.

    Attributes:
        text: see `text.load_text`.
        context: tokens a window.
        stride: tokens from one window to the next; None for `context`.
        windows: how many, the first ones; None for the whole text.
        batch: windows read at once; changes no result.
        top_k: tokens of the source kept on disk to measure divergence; 0 for the exact one, with
            both models in memory.
        kv_contexts: tokens to which caches are filled, to measure their bytes.
        tasks: of lm-eval, or YAML files.
        task_limit: examples of each task; None for all.
        fewshot: examples shown first; None for what the task says.
        cache: kinds of cache.
        cache_windows: windows read through each kind.
        cache_decode: tokens decoded one by one in each, after the rest was read at once.
        needle: None for none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = "bundled"
    context: int = Field(default=512, ge=2)
    stride: int | None = Field(default=None, ge=1)
    windows: int | None = Field(default=16, ge=1)
    batch: int = Field(default=1, ge=1)
    top_k: int = Field(default=0, ge=0)
    kv_contexts: tuple[int, ...] = (512,)
    tasks: tuple[str, ...] = ()
    task_limit: int | None = Field(default=None, ge=1)
    fewshot: int | None = Field(default=None, ge=0)
    cache: tuple[str, ...] = ()
    cache_windows: int = Field(default=2, ge=1)
    cache_decode: int = Field(default=64, ge=1)
    needle: NeedleSuite | None = None


def load_suite(name: str = "quick") -> Suite:
    """Read a suite: by name, or from a YAML file.

    Raises:
        UsageError: no such suite, or faults in it, all at once.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        known = suite_files()
        if name not in known:
            raise UsageError(
                f"no suite {name!r}", remedy=f"{', '.join(sorted(known))}, or a YAML file"
            )
        path = known[name]
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"not YAML: {error}", at=str(path)) from error
    if not isinstance(content, dict):
        raise UsageError("a suite is a list of keys and values", at=str(path))
    return make_suite(content, str(path))


def suite_files() -> dict[str, Path]:
    """Suites that ship with this package, by name."""
    return {path.stem: path for place in _PLACES for path in sorted(place.glob("*.yaml"))}


def make_suite(content: dict[str, Any], at: str) -> Suite:
    """Check the content of a suite.

    Args:
        content: keys and values.
        at: where it is from, for errors.

    Raises:
        UsageError: unknown keys, with the nearest known one, and values that make no sense.
    """
    try:
        return Suite.model_validate(content)
    except ValidationError as error:
        faults = []
        for each in error.errors():
            key = ".".join(str(part) for part in each["loc"])
            fault = f"{key}: {each['msg'].lower()}"
            if each["type"] == "extra_forbidden":
                nearest = difflib.get_close_matches(key, Suite.model_fields, 1)
                fault = f"{key}: no such key" + (f"; {nearest[0]}?" if nearest else "")
            faults.append(fault)
        raise UsageError("; ".join(faults), at=at, remedy=", ".join(Suite.model_fields)) from error
