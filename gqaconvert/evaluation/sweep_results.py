"""What `sweep` is asked and what it finds: one point a conversion or cache kind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from gqaconvert.checkpoint.header import looks_like_safetensors
from gqaconvert.checkpoint.sidecars import write_json
from gqaconvert.errors import CheckpointError, UsageError
from gqaconvert.evaluation.cache_kinds import cache_kind
from gqaconvert.surgery.methods import METHODS
from gqaconvert.surgery.options import CALIBRATED, GROUPINGS

FORMAT = 1
SWEEP_FILE = "sweep.json"

Kind = Literal["source", "conversion", "cache"]


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What to convert to and how to measure it.

    Attributes:
        kv_heads: counts; all legal ones by default.
        methods: of pooling; none for `chosen_methods` to say.
        caches: cache kinds to measure on the source.
        caches_of_all: measure them on every conversion, too.
        text: see `text.load_text`.
        context: tokens a window.
        windows: how many, None for the whole text.
        spread: take them evenly over the text, not the first ones.
        batch: windows read at once; changes no result.
        cache_windows: windows decoded through each cache kind.
        cache_prefill: tokens of these that are read at once; half of them by default.
        dtype, attn, device: as `models.load_model`.
        keep: leave the converted folders.
        seed: for `random`.
        calibration: statistics of this model, or a text to gather them on, for "svd" and
            "procrustes"; never the text that is measured on.
        calibration_tokens: to read of a text.
        grouping: which heads share, under these methods.
        fit_steps: of the local fit after these methods, a layer; 0 for none.
        fit_windows: of 512 tokens that it reads.
        fit_data: text of the fit; None for that of the calibration.
    """

    kv_heads: tuple[int, ...] = ()
    methods: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    caches_of_all: bool = False
    text: str = "bundled"
    context: int = 512
    windows: int | None = 16
    spread: bool = False
    batch: int = 1
    cache_windows: int = 2
    cache_prefill: int | None = None
    dtype: str = "auto"
    attn: str = "sdpa"
    device: str = "cpu"
    keep: bool = False
    seed: int = 0
    calibration: str | None = None
    calibration_tokens: int = 131072
    grouping: str = "adjacent"
    fit_steps: int = 0
    fit_windows: int = 128
    fit_data: str | None = None

    def __post_init__(self) -> None:
        known = (*METHODS, *CALIBRATED)
        for method in self.methods:
            if method not in known:
                raise UsageError(f"unknown method {method!r}", remedy=", ".join(known))
        for spec in self.caches:
            cache_kind(spec)
        if self.grouping not in GROUPINGS:
            raise UsageError(f"unknown grouping {self.grouping!r}", remedy=", ".join(GROUPINGS))
        if "svd" in self.methods and self.calibration is None:
            raise UsageError(
                "svd needs a calibration",
                at="--method",
                remedy="--calibration TEXT; not the text that is measured on",
            )
        if not set(self.chosen_methods) & set(CALIBRATED):
            unused = {
                "--calibration": self.calibration, "--fit-steps": self.fit_steps,
                "--grouping": self.grouping != "adjacent",
            }  # fmt: skip
            for flag, value in unused.items():
                if value:
                    raise UsageError(
                        f"{', '.join(self.chosen_methods)}: no method that {flag} is for",
                        at=flag,
                        remedy="--method mean,svd",
                    )
        if self.fit_steps:
            _ = self.fit_text

    @property
    def chosen_methods(self) -> tuple[str, ...]:
        """The methods asked for; by default the mean, and "svd" where there is a calibration."""
        return self.methods or (("mean",) if self.calibration is None else ("mean", "svd"))

    @property
    def calibration_is_file(self) -> bool:
        """Whether the calibration is a file of statistics, not a text."""
        path = Path(self.calibration or "")
        return path.suffix == ".safetensors" or looks_like_safetensors(path)

    @property
    def fit_text(self) -> str:
        """The text of the local fit.

        Raises:
            UsageError: there is none.
        """
        text = self.fit_data
        if text is None and not self.calibration_is_file:
            text = self.calibration
        if text is None:
            raise UsageError(
                "the local fit reads text, and none is given",
                at="--fit-steps",
                remedy="--data TEXT; not the text that is measured on",
            )
        return text

    @property
    def prefill(self) -> int:
        """Tokens read at once before decoding through a cache kind."""
        return self.cache_prefill or max(1, self.context // 2)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One way to spend memory, and the quality it leaves.

    Attributes:
        key: hash of everything the figures depend on.
        kind: the source, a conversion, or one of these read through a cache kind.
        model: name of the model.
        kv_heads: it has.
        method: of the conversion, None for the source; "svd + fit" after a local fit.
        cache_kind: "dynamic" unless `kind` is "cache".
        kv_bytes: of the cache after `kv_tokens` tokens of one text.
        kv_tokens: tokens.
        perplexity: over whole windows; through the cache, of the tokens decoded.
        perplexity_stderr: its standard error over windows.
        quality: perplexity of the source, measured in the same way, ÷ this one: 1 keeps all.
        bits_per_byte, kl, kl_stderr, kl_p99, top1, top1_stderr: over whole windows, against the
            source.
        decode_tokens_per_s: through the cache.
        unavailable: why a cache kind does not work with this model.
    """

    key: str
    kind: Kind
    model: str
    kv_heads: int
    method: str | None
    cache_kind: str
    kv_bytes: int | None = None
    kv_tokens: int | None = None
    perplexity: float | None = None
    perplexity_stderr: float | None = None
    quality: float | None = None
    bits_per_byte: float | None = None
    kl: float | None = None
    kl_stderr: float | None = None
    kl_p99: float | None = None
    top1: float | None = None
    top1_stderr: float | None = None
    decode_tokens_per_s: float | None = None
    unavailable: str | None = None


@dataclass
class Sweep:
    """All points of a sweep.

    Attributes:
        source: name of the model.
        settings: text, windows, dtype and so on, plain values.
        versions: of the libraries.
        points: in the order asked for.
    """

    source: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    points: list[SweepPoint] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of plain values."""
        return {"format": FORMAT, **asdict(self)}


def point_key(**parts: Any) -> str:  # noqa: ANN401
    """SHA-256 of plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def save_sweep(sweep: Sweep, folder: Path) -> Path:
    """Write `sweep.json`; it is there whole, or as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    staged = folder / f".{SWEEP_FILE}.tmp"
    write_json(staged, sweep.to_json())
    return staged.replace(folder / SWEEP_FILE)


def finished_points(folder: Path) -> dict[str, SweepPoint]:
    """Return the points of an earlier run by key, none without one.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / SWEEP_FILE
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        names = [each.name for each in fields(SweepPoint)]
        points = [SweepPoint(**{name: row[name] for name in names}) for row in content["points"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"not the results of a sweep: {error!r}",
            at=str(path),
            remedy="remove the file; the sweep then starts again",
        ) from error
    return {point.key: point for point in points}
