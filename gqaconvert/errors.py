"""Every error a user can meet: what happened, where, and what to try.

The command line prints the three as three lines and exits with `exit_code`; nothing else in the
package decides exit codes.
"""

from __future__ import annotations


class GqaconvertError(Exception):
    """Base of all errors raised on purpose.

    Args:
        what: one sentence on what is wrong.
        at: the file, tensor or key concerned.
        remedy: what the reader can do about it.
    """

    exit_code = 1

    def __init__(self, what: str, *, at: str | None = None, remedy: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.at = at
        self.remedy = remedy

    def __str__(self) -> str:
        lines = [self.what]
        if self.at:
            lines.append(f"at: {self.at}")
        if self.remedy:
            lines.append(f"try: {self.remedy}")
        return "\n".join(lines)


class CheckpointError(GqaconvertError):
    """A checkpoint on disk is damaged, incomplete or contradicts itself."""


class VerificationError(GqaconvertError):
    """An output is not what its plan promised."""


class UsageError(GqaconvertError):
    """What was asked for makes no sense for this model: a bad count, flag or recipe."""

    exit_code = 2


class UnsupportedModelError(GqaconvertError):
    """The model is sound but cannot be converted; `what` says exactly why."""

    exit_code = 3


class RefusedError(GqaconvertError):
    """Going on would lose something: the output exists, space is short, options differ."""

    exit_code = 4
