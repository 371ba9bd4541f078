"""What `estimate` can be asked, and how its values are written: 4k, 10 %, 24GiB."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gqaconvert.errors import UsageError
from gqaconvert.kv_cache.element_types import StorageType
from gqaconvert.kv_cache.hardware import Accelerator
from gqaconvert.kv_cache.lengths import Lengths
from gqaconvert.units import parse_bytes

PREFILL_TOKENS = 2048
"""Prompt tokens that engines read at a time; activations are counted for so many."""

_TOKENS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([km]?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory left to the framework: contexts, communication buffers, fragments.

    Attributes:
        size_bytes: fixed; None for a share.
        share: of the GPU's memory.
    """

    size_bytes: int | None = None
    share: float = 0.1

    def of(self, memory_bytes: int | None) -> int:
        """Return the bytes on a GPU, 0 for a share of an unknown one."""
        if self.size_bytes is not None:
            return self.size_bytes
        return 0 if memory_bytes is None else round(self.share * memory_bytes)


@dataclass(frozen=True, slots=True)
class Question:
    """All combinations of the tuples are answered.

    Attributes:
        contexts: tokens, prompt and answer together; () for 4,096 and what the model was made for.
        batches: requests at a time.
        kv_heads: () for the model as it is, with 8 and 1 where it can be pooled to them.
        kv_types: element types of the cache; () for that of the weights.
        degrees: of tensor parallelism.
        gpu: what it should run on.
        bandwidth: bytes a second, in place of the GPU's.
        weights: element type; None as they are.
        activations_bytes: in place of the formula.
        reserve: for the framework.
        page: tokens of a page of a paged cache.
        lengths: of requests, where they are mixed.
        source_tokens: that an encoder reads; None for as many as the context.
    """

    contexts: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    kv_heads: tuple[int, ...] = ()
    kv_types: tuple[StorageType, ...] = ()
    degrees: tuple[int, ...] = (1,)
    gpu: Accelerator | None = None
    bandwidth: float | None = None
    weights: StorageType | None = None
    activations_bytes: int | None = None
    reserve: Reserve = Reserve()
    page: int = 16
    lengths: Lengths | None = None
    source_tokens: int | None = None

    def __post_init__(self) -> None:
        counts = {
            "--context": self.contexts, "--batch": self.batches, "--tp": self.degrees,
            "--page": (self.page,),
        }  # fmt: skip
        for flag, values in counts.items():
            for value in values:
                if value < 1:
                    raise UsageError(f"{flag} {value} is not positive", remedy=f"{flag} 1 or more")


def parse_tokens(text: str) -> int:
    """Read a number of tokens: "4096", "4k" (4,096), "1m" (1,048,576).

    Raises:
        UsageError: not a number of tokens.
    """
    match = _TOKENS.fullmatch(text.strip().replace("_", ""))
    tokens = float(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()] if match else 0
    if tokens < 1 or tokens != int(tokens):
        raise UsageError(f"{text!r} is not a number of tokens", remedy="4096, 4k or 1m")
    return int(tokens)


def parse_reserve(text: str) -> Reserve:
    """Read a size such as "2GiB" or a share such as "10%".

    Raises:
        UsageError: neither.
    """
    share = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    if share is None:
        return Reserve(parse_bytes(text))
    if float(share[1]) >= 100:
        raise UsageError(f"a reserve of {text} leaves nothing", remedy="--reserve 10%")
    return Reserve(None, float(share[1]) / 100)
