"""Measurements and where they are kept: one JSON file a metric, written as soon as it is known.

A stopped evaluation goes on from these files, and reports are made from them; so this module
imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gqaconvert.errors import CheckpointError

_UNSAFE = re.compile(r"[^A-Za-z0-9._+@-]+")
_PLAINLY = str.maketrans("/:", "--")
_LONGEST_NAME = 80


@dataclass(frozen=True)
class Measurement:
    """One figure and everything it depends on.

    Attributes:
        metric: what was measured, such as "perplexity" or "cache/quantised:int4".
        value: the figure.
        stderr: its standard error, None where it has none.
        n: how many windows, examples or repeats it is a mean of.
        unit: such as "" for ratios, "bytes", "nats".
        settings: plain values; a measurement with other settings is another measurement.
        versions: of the libraries that took part.
        weights_sha256: of the model, see `models.fingerprint_model`.
        detail: what else was seen: percentiles, positions, further figures.
    """

    metric: str
    value: float
    stderr: float | None
    n: int
    unit: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    weights_sha256: str
    detail: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of plain values."""
        return asdict(self)


def library_versions(*more: str) -> dict[str, str]:
    """Versions to record with a measurement: ours, Python's, those of torch and transformers.

    Args:
        more: further packages; one that is not installed is left out.
    """
    found = {"python": platform.python_version()}
    for name in ("gqaconvert", "torch", "transformers", *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class ResultStore:
    """Measurements in a folder: `<folder>/<model name>/<metric>.json`.

    Args:
        folder: made when the first measurement is put.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(
        self, model_name: str, metric: str, settings: Mapping[str, Any], weights_sha256: str
    ) -> Measurement | None:
        """Return what was measured before, None where there is none or anything differs."""
        path = self.path(model_name, metric)
        if not path.exists():
            return None
        found = _read(path)
        same = (
            found.metric == metric
            and found.weights_sha256 == weights_sha256
            and _canonical(found.settings) == _canonical(settings)
        )
        return found if same else None

    def put(self, model_name: str, measurement: Measurement) -> Path:
        """Write a measurement; the file is there whole, or not at all."""
        path = self.path(model_name, measurement.metric)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(measurement.to_json(), indent=2, ensure_ascii=False) + "\n"
        descriptor, staged = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            Path(staged).replace(path)
        except BaseException:
            Path(staged).unlink(missing_ok=True)
            raise
        return path

    def all(self) -> dict[str, dict[str, Measurement]]:
        """Return everything kept: model name → metric → measurement."""
        found: dict[str, dict[str, Measurement]] = {}
        for path in sorted(self.folder.glob("*/*.json")):
            measurement = _read(path)
            found.setdefault(path.parent.name, {})[measurement.metric] = measurement
        return found

    def path(self, model_name: str, metric: str) -> Path:
        """Return the file of one metric of one model."""
        return self.folder / _file_name(model_name) / f"{_file_name(metric)}.json"


def _file_name(name: str) -> str:
    """Letters that every file system takes; beyond `/` and `:`, a hash tells names apart."""
    separated = name.translate(_PLAINLY)
    plain = _UNSAFE.sub("-", separated).strip(".") or "-"
    if plain == separated and len(plain) <= _LONGEST_NAME:
        return plain
    return f"{plain[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"


def _canonical(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True)


def _read(path: Path) -> Measurement:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Measurement(**{each.name: content[each.name] for each in fields(Measurement)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"not a measurement: {error!r}", at=str(path), remedy="remove the file; it is remade"
        ) from error
