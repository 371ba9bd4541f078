"""Reads options that take several values, such as --context 512,2k."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gqaconvert.errors import UsageError

_T = TypeVar("_T")


def listed(text: str | None, read: Callable[[str], _T]) -> tuple[_T, ...]:
    """Read values parted by commas; none for None."""
    if text is None:
        return ()
    return tuple(read(part.strip()) for part in text.split(",") if part.strip())


def whole(flag: str) -> Callable[[str], int]:
    """Return a reader of whole numbers that names the flag in its error."""

    def read(text: str) -> int:
        if text.isdecimal():
            return int(text)
        raise UsageError(f"{flag} {text!r} is no whole number", remedy=f"{flag} 1,8")

    return read
