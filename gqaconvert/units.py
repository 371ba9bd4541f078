"""Bytes, counts and element types: how they are written, read and named.

GB means 10^9 and is used for files; GiB means 2^30 and is used for memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gqaconvert.errors import UsageError

_BYTE_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type under its three names.

    Attributes:
        tag: name in a safetensors header, such as "BF16".
        config_name: name in config.json, such as "bfloat16".
        size_bytes: bytes an element takes.
        is_weight: a real floating type in which unquantised weights are kept.
    """

    tag: str
    config_name: str
    size_bytes: int
    is_weight: bool = False


ELEMENT_TYPES = {
    kind.tag: kind
    for kind in (
        ElementType("F64", "float64", 8, True),
        ElementType("F32", "float32", 4, True),
        ElementType("F16", "float16", 2, True),
        ElementType("BF16", "bfloat16", 2, True),
        ElementType("F8_E4M3", "float8_e4m3fn", 1),
        ElementType("F8_E5M2", "float8_e5m2", 1),
        ElementType("F8_E8M0", "float8_e8m0fnu", 1),
        ElementType("F8_E4M3FNUZ", "float8_e4m3fnuz", 1),
        ElementType("F8_E5M2FNUZ", "float8_e5m2fnuz", 1),
        ElementType("C64", "complex64", 8),
        ElementType("I64", "int64", 8),
        ElementType("I32", "int32", 4),
        ElementType("I16", "int16", 2),
        ElementType("I8", "int8", 1),
        ElementType("U64", "uint64", 8),
        ElementType("U32", "uint32", 4),
        ElementType("U16", "uint16", 2),
        ElementType("U8", "uint8", 1),
        ElementType("BOOL", "bool", 1),
    )
}
"""Element types by safetensors tag; its sub-byte types are left out."""

_ALIASES = {"fp32": "F32", "fp16": "F16", "half": "F16", "bf16": "BF16", "fp64": "F64"}


def weight_type(name: str) -> ElementType:
    """Return the floating type called `name`: "bfloat16", "bf16", "BF16" or "torch.bfloat16".

    Raises:
        UsageError: no floating type in which weights are kept has that name.
    """
    plain = name.removeprefix("torch.").lower()
    for kind in ELEMENT_TYPES.values():
        if kind.is_weight and plain in (kind.config_name, kind.tag.lower()):
            return kind
    if plain in _ALIASES:
        return ELEMENT_TYPES[_ALIASES[plain]]
    raise UsageError(f"{name!r} is not a type for weights", remedy="float32, bfloat16 or float16")


def parse_bytes(text: str) -> int:
    """Read a size such as "5GB", "24GiB" or "1048576".

    Raises:
        UsageError: not a number with a known unit.
    """
    match = _NUMBER.fullmatch(text)
    if match and match[2].upper() in _BYTE_UNITS:
        return int(float(match[1]) * _BYTE_UNITS[match[2].upper()])
    raise UsageError(
        f"{text!r} is not a size", remedy="a number with B, KB, MB, GB, KiB, MiB or GiB"
    )


def format_bytes(size_bytes: float) -> str:
    """Decimal units, for files: 13.5 GB."""
    return _format(size_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def format_memory(size_bytes: float) -> str:
    """Binary units, for memory: 16.0 GiB."""
    return _format(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_count(count: float) -> str:
    """Counts of parameters and tokens: 6.74B, 135M."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g}{suffix}"
    return f"{count:g}"


def format_duration(seconds: float) -> str:
    """Write a time with the unit a person would use: 12 s, 3 min, 2.5 h, 4.1 days."""
    for limit, size, unit in ((90, 1, "s"), (5400, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            value = seconds / size
            return f"{value:.1f} {unit}" if unit == "h" and value < 10 else f"{value:.0f} {unit}"
    return f"{seconds / 86400:.1f} days"


def _format(value: float, base: int, names: tuple[str, ...]) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value /= base
        power += 1
    # Three digits, but never 1e+03.
    whole = power == 0 or abs(value) >= 999.5
    return f"{value:.0f} {names[power]}" if whole else f"{value:.3g} {names[power]}"
