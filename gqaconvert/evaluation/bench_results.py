"""What `bench` is asked and what it finds: plain values, saved in one JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gqaconvert.checkpoint.sidecars import write_json
from gqaconvert.errors import UsageError
from gqaconvert.evaluation.bandwidth import Bandwidth
from gqaconvert.evaluation.bench_bounds import ModelFacts
from gqaconvert.evaluation.latency import Fill

FORMAT = 1
BENCH_FILE = "bench.json"


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What to measure.

    Attributes:
        contexts: tokens in the cache.
        batches: requests at a time.
        new_tokens: steps of decoding in a repeat.
        repeats: over which medians are taken.
        warmup: repeats that do not count.
        fill: how the cache is filled before decoding; "random" makes long contexts cheap.
        prefill_limit_s: longer prefills, as foreseen from shorter ones, are left out.
        threads: of torch, None to leave them.
        seed: of prompts and random content.
    """

    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    new_tokens: int = 16
    repeats: int = 5
    warmup: int = 1
    fill: Fill = "random"
    prefill_limit_s: float = 20.0
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {
            "--context": self.contexts, "--batch": self.batches,
            "--new-tokens": (self.new_tokens,), "--repeats": (self.repeats,),
            "--threads": () if self.threads is None else (self.threads,),
        }  # fmt: skip
        for flag, values in counts.items():
            if any(value < 1 for value in values):
                raise UsageError(f"{flag} must be positive", remedy=f"{flag} 1 or more")
        if not self.contexts or not self.batches:
            raise UsageError("no context or no batch to measure", remedy="--context 512,2k")
        if self.warmup < 0:
            raise UsageError("--warmup is negative", remedy="--warmup 0 or more")


@dataclass(frozen=True, slots=True)
class Timing:
    """A median over repeats and its spread, in seconds."""

    median_s: float
    min_s: float
    max_s: float
    iqr_s: float
    values_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One model and cache kind at one context and batch.

    Attributes:
        label: model and cache kind.
        prefill: time to first token; None where it was left out, and then `no_prefill` says why.
        decode: time of a step, which gives one token to each request; None where `skipped` says
            why.
        fill: how the cache came by its content.
        tokens_per_s: of the whole batch.
        bound_tokens_per_s: of the whole batch, by the bandwidth of the same run.
        share_of_bound: how much of it was reached.
        cache_bytes: measured, before the first step.
        cache_bytes_formula: by the ruler, for an ordinary cache; None where it has no formula.
        prefill_peak_bytes, decode_peak_bytes: most memory in use, all models of the run included.
    """

    label: str
    model: str
    cache_kind: str
    context: int
    batch: int
    prefill: Timing | None = None
    no_prefill: str | None = None
    decode: Timing | None = None
    skipped: str | None = None
    fill: Fill | None = None
    tokens_per_s: float | None = None
    bound_tokens_per_s: float | None = None
    share_of_bound: float | None = None
    cache_bytes: int | None = None
    cache_bytes_formula: int | None = None
    prefill_peak_bytes: int | None = None
    decode_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Knee:
    """The context at which reading the cache takes as long as reading the weights, by bytes.

    Attributes:
        tokens: None where the cache never reaches the weights.
    """

    label: str
    batch: int
    tokens: int | None


@dataclass
class Bench:
    """All that a run measured."""

    settings: BenchSettings
    device: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    bandwidth: Bandwidth
    models: tuple[ModelFacts, ...]
    rows: list[BenchRow] = field(default_factory=list)
    knees: list[Knee] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of plain values."""
        content = {"format": FORMAT, **asdict(self)}
        content["bandwidth"]["bytes_per_s"] = self.bandwidth.bytes_per_s
        return content


def save_bench(bench: Bench, folder: Path) -> Path:
    """Write `bench.json`; it is there whole, or as it was."""
    folder.mkdir(parents=True, exist_ok=True)
    staged = folder / f".{BENCH_FILE}.tmp"
    write_json(staged, bench.to_json())
    return staged.replace(folder / BENCH_FILE)
