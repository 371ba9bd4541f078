"""The base of all settings: immutable, typed, without unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Values a person writes; unknown keys and other types are faults."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
