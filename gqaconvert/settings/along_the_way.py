"""What a training keeps and measures along the way: saved states, the loss on held-out text."""

from __future__ import annotations

from pydantic import Field

from gqaconvert.settings.base import Settings


class CheckpointSettings(Settings):
    """When the whole state is saved.

    Attributes:
        every_steps: between saves; None to save only at the end and when interrupted.
        keep: newest ones kept.
    """

    every_steps: int | None = Field(default=None, ge=1)
    keep: int = Field(default=2, ge=1)


class HeldOutSettings(Settings):
    """The loss on text that is not trained on, along the way.

    Attributes:
        text: as in `evaluate`: "bundled", a file, or "dataset:NAME:CONFIG:SPLIT".
        every_steps: between measurements; one is made at the start and one at the end in any case.
        windows: how many are read.
        context: tokens a window; that of the data by default.
        target: stop once the loss, in nats a token, is at most this far above the source's.
        patience: stop after this many measurements without a new lowest loss.
    """

    text: str = "bundled"
    every_steps: int = Field(default=100, ge=1)
    windows: int = Field(default=16, ge=1)
    context: int | None = Field(default=None, ge=2)
    target: float | None = Field(default=None, ge=0)
    patience: int | None = Field(default=None, ge=1)
