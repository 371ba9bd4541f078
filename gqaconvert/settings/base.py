"""The base of all settings: immutable, typed, without unknown keys."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    ValidationInfo,
    field_validator,
)

from gqaconvert.errors import UsageError
from gqaconvert.units import weight_type

KEEP = "keep"
"""The element type of an output that is that of its source."""


class Settings(BaseModel):
    """Values a person writes; unknown keys and other types are faults.

    A required key has an example, which stands in for a bad value while other faults are looked
    for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, field: ValidationInfo) -> Any:  # noqa: ANN401
        """Refuse `kv_heads: true`, which pydantic would take for 1."""
        if isinstance(value, bool):
            annotation = cls.model_fields[str(field.field_name)].annotation
            kinds = (annotation, *get_args(annotation))
            # Numbers are equal to truth values in Python, those of a Literal too.
            if bool not in kinds and any(kind in (int, float, 0, 1) for kind in kinds):
                raise ValueError(f"needs a number, not {str(value).lower()}")
        return value


def _check_dtype(name: str) -> str:
    if name != KEEP:
        try:
            weight_type(name)
        except UsageError as error:
            raise ValueError(f"{error.what}; {KEEP}, {error.remedy}") from error
    return name


OutputDtype = Annotated[str, AfterValidator(_check_dtype)]
"""`KEEP`, or the name of a type in which weights are kept."""


def all_of(faults: list[str]) -> None:
    """Raise a ValueError with one line for each fault, if there are any.

    For validators that compare keys: pydantic would end at the first fault.
    """
    if faults:
        raise ValueError("\n".join(faults))
