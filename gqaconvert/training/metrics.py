"""`metrics.jsonl`: one line a step and one a measurement on held-out text.

A run that goes on from a saved state drops what was written after it, so the file reads as if
nothing had happened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gqaconvert.errors import CheckpointError


class MetricsWriter:
    """Appends to `metrics.jsonl`; every line reaches the file at once.

    Args:
        path: the file.
        step: of the state the run starts from; later lines are dropped.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [line for line in read_metrics(path) if line["step"] <= step] if step else []
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.partial")
        staged.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        staged.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line, with at least a `step`."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Read all whole lines of a metrics file; none where there is no file.

    Raises:
        CheckpointError: a line other than the last is damaged.
    """
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            if number >= len(lines) - 1:
                return  # the process died while writing this line
            raise CheckpointError(
                f"metrics cannot be read: {error}", at=f"{path} line {number}"
            ) from error
