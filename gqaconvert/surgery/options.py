"""What a user can ask of a conversion that changes its result (workers do not)."""

from __future__ import annotations

from dataclasses import dataclass

from gqaconvert.errors import UsageError
from gqaconvert.surgery.methods import METHODS

REPEAT = "repeat"
"""The method of `expand`: not pooling at all."""


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Options that determine every byte of the output.

    Attributes:
        num_kv_heads: KV heads wanted, G.
        method: how the heads of a group become one; `REPEAT` when expanding.
        seed: for `random`.
        dtype: safetensors tag of the output's floating tensors, None to keep each as it is.
        max_shard_bytes: largest output file, None to keep the source's division.
        tensor_parallel: degree the result will be served with, checked against the head counts.
    """

    num_kv_heads: int
    method: str = "mean"
    seed: int = 0
    dtype: str | None = None
    max_shard_bytes: int | None = None
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1:
            raise UsageError(
                f"--kv-heads {self.num_kv_heads} is not a number of heads", remedy="1 or more"
            )
        if self.method != REPEAT and self.method not in METHODS:
            raise UsageError(f"unknown method {self.method!r}", remedy=", ".join(METHODS))
        if self.max_shard_bytes is not None and self.max_shard_bytes < 1:
            raise UsageError("--max-shard-size must be positive", remedy="--max-shard-size 5GB")
        if self.tensor_parallel < 1:
            raise UsageError(f"--tp {self.tensor_parallel} is not a degree", remedy="1 or more")
