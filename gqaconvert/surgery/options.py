"""What a user can ask of a conversion that changes its result (workers do not)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from gqaconvert.errors import UsageError
from gqaconvert.surgery.methods import METHODS

REPEAT = "repeat"
"""The method of `expand`: not pooling at all."""

CALIBRATED = ("procrustes", "svd")
"""Methods that fold a change of basis into q and o, one layer at a time."""

GROUPINGS = ("adjacent", "similarity")


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
        grouping: which KV heads share: neighbours, or (calibrated methods) those that lose least.
        metric: which second moments a calibrated method weighs errors by; None for its default.
        statistics_digest: identity of the calibration file, None without one.
        refined: identity of what is done to each layer after it is pooled, such as a local fit.
    """

    num_kv_heads: int
    method: str = "mean"
    seed: int = 0
    dtype: str | None = None
    max_shard_bytes: int | None = None
    tensor_parallel: int = 1
    grouping: str = "adjacent"
    metric: str | None = None
    statistics_digest: str | None = None
    refined: str | None = None

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1:
            raise UsageError(
                f"--kv-heads {self.num_kv_heads} is not a number of heads", remedy="1 or more"
            )
        if self.method not in (REPEAT, *METHODS, *CALIBRATED):
            known = (*METHODS, *CALIBRATED)
            raise UsageError(f"unknown method {self.method!r}", remedy=", ".join(known))
        if self.max_shard_bytes is not None and self.max_shard_bytes < 1:
            raise UsageError("--max-shard-size must be positive", remedy="--max-shard-size 5GB")
        if self.tensor_parallel < 1:
            raise UsageError(f"--tp {self.tensor_parallel} is not a degree", remedy="1 or more")
        if self.grouping not in GROUPINGS:
            raise UsageError(f"unknown grouping {self.grouping!r}", remedy=", ".join(GROUPINGS))
        if self.method == "svd" and self.statistics_digest is None:
            raise UsageError(
                "svd needs a calibration: without knowing what goes into the attention it does"
                " worse than averaging",
                remedy="gqaconvert calibrate MODEL --data TEXT --out FILE, then --calibration FILE",
            )
        if self.grouping != "adjacent" and not self.is_calibrated:
            raise UsageError(
                f"--grouping {self.grouping} moves heads, which {self.method} does not",
                remedy="--method svd or --method procrustes",
            )
        if not self.is_calibrated and (self.statistics_digest or self.metric or self.refined):
            raise UsageError(
                f"{self.method} takes no calibration", remedy="--method svd, or no --calibration"
            )

    @property
    def is_calibrated(self) -> bool:
        """Whether layers are pooled as a whole, q and o with k and v."""
        return self.method in CALIBRATED

    @property
    def averaging(self) -> str:
        """Method of what is pooled tensor by tensor, also where a calibrated one cannot apply."""
        return "mean" if self.is_calibrated else self.method

    def record(self) -> dict[str, Any]:
        """Return the options as manifests and digests hold them.

        What calibrated methods alone have is left out where it is not set, so that plans without
        it keep the digests they had before there were such methods.
        """
        later = {field.name: field.default for field in fields(self)[-4:]}
        return {
            key: value
            for key, value in asdict(self).items()
            if key not in later or value != later[key]
        }
