"""Accelerators: memory, bandwidth and speed, from a table that a user's own file can add to.

The figures, with where they come from, are in `hardware.yaml`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gqaconvert.errors import UsageError
from gqaconvert.units import parse_bytes

_DATA = Path(__file__).with_name("hardware.yaml")
_KEYS = {"name", "memory_gib", "bandwidth_gb_s", "bf16_tflops", "source"}


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator.

    Attributes:
        key: what to call it on the command line.
        name: its full name.
        memory_bytes: memory.
        bandwidth: bytes a second between memory and chip; None where unknown.
        flops: bf16 operations a second without sparsity, or fp16 where it has no bf16; None where
            unknown.
        source: where the figures come from.
    """

    key: str
    name: str
    memory_bytes: int
    bandwidth: float | None = None
    flops: float | None = None
    source: str = ""


def find_accelerator(text: str, own: Path | None = None) -> Accelerator:
    """Return the accelerator that `text` names, or one of the size it gives, such as "24GiB".

    Args:
        text: a name in the table or a size.
        own: a file of the user's, as `read_accelerators`.

    Raises:
        UsageError: neither a name nor a size; or as `read_accelerators`.
    """
    table = accelerators(own)
    key = text.strip().lower().replace(" ", "-").replace("_", "-")
    key = key.removeprefix("nvidia-").removeprefix("amd-").removeprefix("geforce-")
    if key in table:
        return table[key]
    try:
        size = parse_bytes(text)
    except UsageError:
        near = difflib.get_close_matches(key, table, n=3, cutoff=0.4)
        near += [name for name in table if name.startswith(key) and name not in near]
        raise UsageError(
            f"no GPU called {text!r} in the table, and no size either",
            remedy=" or ".join(near[:4]) + ", a size such as 24GiB, or --gpus for the list"
            if near
            else "a size such as 24GiB, --gpus for the list, or a file of your own: --hardware",
        ) from None
    return Accelerator(text, f"a GPU of {text}", size)


def accelerator_of_device(name: str) -> Accelerator | None:
    """Return the accelerator a driver calls `name`, None for one that is not in the table.

    Args:
        name: such as "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB" or "Tesla T4".
    """
    words = set(re.split(r"[^a-z0-9.]+", name.lower()))
    if words & _OTHER_CHIPS:
        return None
    memory = {word for word in words if _MEMORY.fullmatch(word)}
    found = [
        (len(own & words & _FORMS) - len((own ^ words) & _FORMS), own)
        for own in (set(key.split("-")) for key in accelerators() if key not in _TWO_DEVICES)
        if own - _FORMS - {word for word in own if _MEMORY.fullmatch(word)} <= words
        and (not memory or {word for word in own if _MEMORY.fullmatch(word)} <= memory)
    ]
    if not found:
        return None
    best = max(found, key=lambda each: each[0])[1]
    return next(gpu for key, gpu in accelerators().items() if set(key.split("-")) == best)


_OTHER_CHIPS = frozenset({"ti", "super", "laptop", "mobile", "max", "mig", "d", "pro"})
"""Words after which a name means another chip than the one without them, or a part of it."""
_FORMS = frozenset({"pcie", "nvl"})
_MEMORY = re.compile(r"[0-9]+gb")
_TWO_DEVICES = frozenset({"mi250x"})
"""Drivers show its two dies as two devices."""


def accelerators(own: Path | None = None) -> Mapping[str, Accelerator]:
    """Return all accelerators by key: ours, then those of the user's file, which win."""
    table = dict(read_accelerators(_DATA))
    if own is not None:
        table |= read_accelerators(own)
    return table


def read_accelerators(path: Path) -> Mapping[str, Accelerator]:
    """Read a table: key → name, memory_gib, bandwidth_gb_s, bf16_tflops, source.

    Only memory_gib is required.

    Raises:
        UsageError: the file cannot be read, or an entry is not understood.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(
            f"the table of GPUs cannot be read: {error}", at=str(path), remedy=_EXAMPLE
        ) from error
    if not isinstance(content, dict):
        raise UsageError("the table of GPUs holds no entries", at=str(path), remedy=_EXAMPLE)
    return {
        str(key).lower(): _accelerator(str(key).lower(), entry, path)
        for key, entry in content.items()
    }


_EXAMPLE = "an entry such as: my-gpu: {memory_gib: 24, bandwidth_gb_s: 600, bf16_tflops: 125}"


def _accelerator(key: str, entry: Any, path: Path) -> Accelerator:  # noqa: ANN401
    at = f"{path} {key}"
    if not isinstance(entry, dict) or set(entry) - _KEYS or "memory_gib" not in entry:
        raise UsageError("not an entry of the table of GPUs", at=at, remedy=_EXAMPLE)
    figures = {name: entry.get(name) for name in ("memory_gib", "bandwidth_gb_s", "bf16_tflops")}
    for name, value in figures.items():
        if value is not None and (type(value) not in (int, float) or value <= 0):
            raise UsageError(f"{name} is {value!r}, not a positive number", at=at, remedy=_EXAMPLE)
    bandwidth, tflops = figures["bandwidth_gb_s"], figures["bf16_tflops"]
    return Accelerator(
        key=key,
        name=str(entry.get("name", key)),
        memory_bytes=int(entry["memory_gib"] * 2**30),
        bandwidth=None if bandwidth is None else bandwidth * 1e9,
        flops=None if tflops is None else tflops * 1e12,
        source=str(entry.get("source", path.name)),
    )
