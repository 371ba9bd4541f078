"""What a cache kind is: a name, a sentence, and how to make an empty cache for a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import Cache

from gqaconvert.errors import GqaconvertError
from gqaconvert.modelling.models import LoadedModel


class CacheUnavailable(GqaconvertError):
    """A kind that cannot work with this model or on this machine; `what` says why."""


@dataclass(frozen=True, slots=True)
class CacheKind:
    """One way to keep keys and values.

    Attributes:
        name: as it is asked for, such as "h2o:512".
        describe: one sentence on what is kept.
        make: makes an empty cache for a model and a number of tokens that it must be able to
            hold; raises CacheUnavailable where the kind cannot work.
        by_attention: chooses what to keep by the attention it sees, so that it cannot be filled
            with keys and values alone.
    """

    name: str
    describe: str
    make: Callable[[LoadedModel, int], Cache]
    by_attention: bool = False
