"""What a stage of an experiment is, and the names of all of them in their order."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from gqaconvert.pipeline.experiment import Experiment

StageName = Literal[
    "source", "calibrate", "convert", "verify", "evaluate", "uptrain", "evaluate-uptrained",
    "bench", "sweep", "report",
]  # fmt: skip

STAGE_NAMES: tuple[StageName, ...] = get_args(StageName)


@dataclass(frozen=True)
class Finished:
    """How a stage ended.

    Attributes:
        note: what came of it, in words.
        needed: False where there turned out to be nothing to do.
        roles: "source", "converted" or "uptrained" → name of a model that is there now.
    """

    note: str
    needed: bool = True
    roles: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """One step from recipe to report.

    Attributes:
        name: of the stage.
        command: the verb that does the same.
        settings: plain values that its outcome depends on, apart from earlier stages.
        after: earlier stages whose outcome it depends on.
        work: does it; told whether to start anew where it could go on.
        fingerprint: of what it left, read from disk; None where that is not there.
        left_out: why the recipe does without it; None where it does not.
        always: done every time, as it is quick and finds out what may have changed.
    """

    name: StageName
    command: str
    settings: Mapping[str, Any]
    after: tuple[StageName, ...]
    work: Callable[[Experiment, bool], Finished]
    fingerprint: Callable[[], str | None]
    left_out: str | None = None
    always: bool = False


def command_line(verb: str, *words: object, **options: object) -> str:
    """Write a command; options that are None or False are left out, `_` becomes `-`."""
    parts = ["gqaconvert", verb, *map(str, words)]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            parts.append(flag)
        elif value is not None and value is not False:
            parts += [flag, _written(value)]
    return shlex.join(parts)


def _written(value: object) -> str:
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or "none"
    return value.as_posix() if isinstance(value, Path) else str(value)
