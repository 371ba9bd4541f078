"""What a report needs of each saved file, and the reading that makes sure of it.

Files are read as plain values: whoever wrote them is not imported. A file that is damaged, or lacks
what is needed, is named in one error; what it holds beyond that is left alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gqaconvert.errors import CheckpointError

NUMBER = (int, float)
OR_NONE = type(None)
MAYBE_NUMBER = (int, float, OR_NONE)
MAYBE_TEXT = (str, OR_NONE)

MEASUREMENT = {
    "metric": str, "value": NUMBER, "stderr": MAYBE_NUMBER, "n": int, "unit": str,
    "settings": dict, "versions": dict, "weights_sha256": str, "detail": dict,
}  # fmt: skip
DETAILS: Mapping[str, Any] = {
    "divergence": {"top1_agreement": NUMBER, "source": str},
    "cache": {
        "kind": str, "cache_bytes": NUMBER, "tokens_seen": int, "decode_tokens_per_s": NUMBER
    },
    "task": {"score": str},
    "needle": {"choice_accuracy": NUMBER, "at_chance": bool},
}  # fmt: skip
"""Of `detail`, by the metric's name up to its first slash."""

PIPELINE = {
    "name": str, "roles": {"*": str}, "stages": {"*": {"command": str, "seconds": NUMBER}},
}  # fmt: skip
MODELS = {"*": {"name": str}}
ESTIMATE = [{
    "kv_heads": int, "context": int, "batch": int, "kv_bytes": NUMBER,
    "kv_bytes_per_token": NUMBER, "memory_bytes": MAYBE_NUMBER,
    "left_for_kv_bytes": MAYBE_NUMBER, "concurrent_requests": MAYBE_NUMBER,
    "longest_context": MAYBE_NUMBER,
}]  # fmt: skip
_POOLED = {"kv_heads": int, "raw": NUMBER, "aligned": NUMBER}
_LIKENESS = {"raw": list, "aligned": list, "chance": NUMBER, "pooled": [_POOLED]}
HEADS = {
    "model": str,
    "layers": [{
        "layer": (int, OR_NONE), "kv_heads": int, "keys": (_LIKENESS, OR_NONE),
        "values": (_LIKENESS, OR_NONE),
    }],
}  # fmt: skip
MANIFEST = {
    "source": {"name": str},
    "plan": {
        "options": {"num_kv_heads": int, "method": str}, "num_heads": int,
        "kv_heads": {"before": int, "after": int},
    },
}  # fmt: skip
VERIFY = {"checks": [{"name": str}]}
SUMMARY = {"steps": int, "tokens": NUMBER, "seconds": NUMBER}
BENCH = {
    "settings": {"contexts": list, "batches": list, "repeats": int}, "device": str,
    "machine": {"threads": int},
    "bandwidth": {"bytes_per_s": NUMBER}, "notes": list,
    "models": [{
        "name": str, "num_heads": int, "num_kv_heads": int, "read_bytes": NUMBER, "dtype": str,
        "attn": str, "weights_sha256": str, "parameters": int,
    }],
    "knees": [{"label": str, "batch": int, "tokens": MAYBE_NUMBER}],
    "rows": [{
        "label": str, "model": str, "cache_kind": str, "context": int, "batch": int,
        "decode": ({"median_s": NUMBER, "min_s": NUMBER, "max_s": NUMBER}, OR_NONE),
        "cache_bytes": MAYBE_NUMBER, "bound_tokens_per_s": MAYBE_NUMBER,
        "tokens_per_s": MAYBE_NUMBER, "skipped": MAYBE_TEXT,
    }],
}  # fmt: skip
SWEEP = {
    "source": str,
    "settings": dict,
    "points": [{
        "kind": str, "model": str, "kv_heads": int, "method": MAYBE_TEXT, "cache_kind": str,
        "kv_bytes": MAYBE_NUMBER, "kv_tokens": MAYBE_NUMBER, "quality": MAYBE_NUMBER,
    }],
}  # fmt: skip


def read_document(path: Path, shape: Any) -> Any:  # noqa: ANN401
    """Read a JSON file that a report needs.

    Args:
        path: the file.
        shape: what it must hold: see this module's constants. A mapping lists keys, "*" standing
            for all; a list holds the shape of its items; a tuple lists types or shapes.

    Raises:
        CheckpointError: the file is damaged or holds something else.
    """
    content = parse(path)
    fault = _fault(content, shape, "")
    if fault:
        raise damaged(path, fault)
    return content


def parse(path: Path) -> Any:  # noqa: ANN401
    """Read a JSON file of any content.

    Raises:
        CheckpointError: it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error


def damaged(path: Path, fault: str) -> CheckpointError:
    """The error for a file that cannot be used."""
    return CheckpointError(
        f"no report can be made of it: {fault}",
        at=str(path),
        remedy="repeat the command that wrote it, or remove it: the report does without",
    )


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of one JSON object a line; a torn last line is left out.

    Raises:
        CheckpointError: another line is damaged.
    """
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line]
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            content = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break  # the process died while writing it
            raise damaged(path, f"line {number}: {error}") from error
        if not isinstance(content, dict) or not {"kind", "tokens"} <= content.keys():
            raise damaged(path, f"line {number} has no kind or no tokens")
        found.append(content)
    return found


def _fault(content: Any, shape: Any, at: str) -> str | None:  # noqa: ANN401
    """Say what of a shape is not there, None where all is."""
    if isinstance(shape, tuple):
        faults = [_fault(content, each, at) for each in shape]
        return None if None in faults else faults[0]
    if isinstance(shape, type):
        # JSON tells true from 1; Python does not.
        is_bool = isinstance(content, bool)
        right = is_bool if shape is bool else isinstance(content, shape) and not is_bool
        return None if right else f"{at or 'it'} is {_kind(content)}, not {_NAMES[shape]}"
    if isinstance(shape, list):
        if not isinstance(content, list):
            return f"{at or 'it'} is {_kind(content)}, not a list"
        items = [(content[place], shape[0], f"{at}[{place}]") for place in range(len(content))]
    else:
        if not isinstance(content, dict):
            return f"{at or 'it'} is {_kind(content)}, not an object"
        missing = [key for key in shape if key != "*" and key not in content]
        if missing:
            return f"{at or 'it'} has no {missing[0]!r}"
        wanted = dict.fromkeys(content, shape["*"]) if "*" in shape else shape
        items = [(content[key], each, f"{at}.{key}".lstrip(".")) for key, each in wanted.items()]
    return next((fault for item in items if (fault := _fault(*item))), None)


_NAMES = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "an object",
    list: "a list", OR_NONE: "null",
}  # fmt: skip


def _kind(content: Any) -> str:  # noqa: ANN401
    return _NAMES.get(type(content), type(content).__name__)
