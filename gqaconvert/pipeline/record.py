"""What is known of the stages of an experiment: done from which inputs, with which outcome.

Saved after every stage, so that a stopped experiment goes on, and read by reports.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from gqaconvert.checkpoint.sidecars import read_json_object, write_json
from gqaconvert.errors import CheckpointError

FORMAT = 1

Outcome = Literal["done", "not needed"]


@dataclass(frozen=True)
class StageRecord:
    """One stage that has come to its end.

    Attributes:
        inputs: SHA-256 of all that its outcome depends on.
        fingerprint: SHA-256 of what it left.
        started: when, in UTC.
        seconds: it took.
        command: the verb that does the same.
        outcome: "not needed" where the recipe or the model leaves nothing to do.
        note: what came of it, or why it was not needed.
    """

    inputs: str
    fingerprint: str
    started: str
    seconds: float
    command: str
    outcome: Outcome
    note: str


@dataclass
class ExperimentRecord:
    """All that `pipeline.json` says.

    Attributes:
        name: of the experiment.
        title: of its report.
        command: that ran it last.
        machine: it ran on.
        versions: of the libraries.
        roles: "source", "converted", "uptrained" → name of the model in results.
        stages: by name.
    """

    name: str
    title: str
    command: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    stages: dict[str, StageRecord] = field(default_factory=dict)


def read_record(path: Path) -> ExperimentRecord | None:
    """Read what is known; None before the first stage.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not path.exists():
        return None
    content = read_json_object(path)
    try:
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}")
        facts = {each.name: content[each.name] for each in fields(ExperimentRecord)}
        stages = {name: StageRecord(**each) for name, each in content["stages"].items()}
        record = ExperimentRecord(**{**facts, "stages": stages})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"not the record of an experiment: {error!r}",
            at=str(path),
            remedy="remove the file; stages are then done again, uptraining excepted",
        ) from error
    return record


def save_record(record: ExperimentRecord, path: Path) -> None:
    """Write the record; it is there whole, or as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.tmp")
    write_json(staged, {"format": FORMAT, **asdict(record)})
    staged.replace(path)


def digest_of(content: Any) -> str:  # noqa: ANN401
    """SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def files_digest(paths: Iterable[Path], root: Path) -> str | None:
    """SHA-256 of files and their places below `root`; None where there is none, or one lacks."""
    digest = hashlib.sha256()
    any_file = False
    for path in paths:
        if not path.is_file():
            return None
        any_file = True
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest() if any_file else None
