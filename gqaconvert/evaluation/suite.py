"""What an evaluation measures, as a value: `quick`, `standard`, or a YAML file of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from gqaconvert.settings.base import Settings
from gqaconvert.settings.loading import load_settings, make_settings
from gqaconvert.settings.shipped import find_shipped, shipped_files


class NeedleSuite(Settings):
    """Lengths and depths of the long-context probe, see `needle`."""

    lengths: tuple[int, ...] = (256, 512, 1024)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    repeats: int = Field(default=2, ge=1)


class Suite(Settings):
    """What to measure, the same for all models of a comparison.

    Attributes:
        text: see `text.load_text`.
        context: tokens a window.
        stride: tokens from one window to the next; None for `context`.
        windows: how many; None for the whole text.
        spread: take them evenly over the text, not the first ones.
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

    text: str = "bundled"
    context: int = Field(default=512, ge=2)
    stride: int | None = Field(default=None, ge=1)
    windows: int | None = Field(default=16, ge=1)
    spread: bool = False
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


_REMEDY = "keys are " + ", ".join(Suite.model_fields)


def load_suite(name: str = "quick") -> Suite:
    """Read a suite: by name, or from a YAML file.

    Raises:
        UsageError: no such suite, or faults in it, all at once.
    """
    return load_settings(Suite, find_shipped("eval", name, what="suite"), remedy=_REMEDY)


def suite_files() -> dict[str, Path]:
    """Suites that ship with this package, by name."""
    return shipped_files("eval")


def changed_suite(name: str, changes: Mapping[str, Any]) -> Suite:
    """Read a suite and change keys of it.

    Args:
        name: of a suite, or a YAML file.
        changes: key → value.

    Raises:
        UsageError: no such suite, unknown keys, and values that make no sense.
    """
    suite = load_suite(name)
    if not changes:
        return suite
    content = suite.model_dump()
    if "context" in changes:
        # What a suite says of windows was meant for its own context.
        content["stride"] = None
        content["cache_decode"] = min(content["cache_decode"], changes["context"] // 2)
    return make_suite({**content, **changes}, "the options")


def make_suite(content: dict[str, Any], at: str) -> Suite:
    """Check the content of a suite.

    Args:
        content: keys and values.
        at: where it is from, for errors.

    Raises:
        UsageError: unknown keys, with the nearest known one, and values that make no sense.
    """
    return make_settings(Suite, content, at=at, remedy=_REMEDY)
