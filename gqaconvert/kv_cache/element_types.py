"""Element types of a KV cache and of weights, and what quantised ones cost beside their bits.

Quantised types keep a scale and a zero point of 16 bits each for every group of 64 elements, as
transformers' quantised caches do by default. Nothing here knows which engine offers which type.
"""

from __future__ import annotations

from dataclasses import dataclass

from gqaconvert.errors import UsageError

GROUP_ELEMENTS = 64
"""Elements that share a scale and a zero point in a quantised type."""

GROUP_BYTES = 4
"""Bytes of a scale and a zero point."""


@dataclass(frozen=True, slots=True)
class StorageType:
    """How an element is kept.

    Attributes:
        name: as it is printed, such as "int4".
        bits: of one element.
        grouped: whether groups of elements keep a scale and a zero point beside it.
    """

    name: str
    bits: int
    grouped: bool = False

    def size_bytes(self, elements: int) -> int:
        """Return the bytes that a run of elements takes, rounded up to whole groups."""
        groups = -(-elements // GROUP_ELEMENTS) if self.grouped else 0
        return -(-elements * self.bits // 8) + groups * GROUP_BYTES


STORAGE_TYPES = {
    kind.name: kind
    for kind in (
        StorageType("fp32", 32),
        StorageType("fp16", 16),
        StorageType("bf16", 16),
        StorageType("fp8", 8),
        StorageType("int8", 8, grouped=True),
        StorageType("int4", 4, grouped=True),
        StorageType("int2", 2, grouped=True),
    )
}
"""By name. One scale a tensor is usual for fp8, which is too little to count."""

_OTHER_NAMES = {
    "float32": "fp32", "float": "fp32", "f32": "fp32", "float16": "fp16", "half": "fp16",
    "f16": "fp16", "bfloat16": "bf16", "float8": "fp8", "f8": "fp8", "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "q8": "int8", "q4": "int4",
}  # fmt: skip


def storage_type(name: str) -> StorageType:
    """Return the type called `name`: "int4", "fp16", "float16", "torch.bfloat16".

    Raises:
        UsageError: no such type.
    """
    plain = name.strip().removeprefix("torch.").lower()
    found = STORAGE_TYPES.get(_OTHER_NAMES.get(plain, plain))
    if found is None:
        raise UsageError(
            f"{name!r} is no element type of a cache or of weights",
            remedy=", ".join(STORAGE_TYPES),
        )
    return found
