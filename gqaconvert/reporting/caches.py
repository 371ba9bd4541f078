"""What was measured through each kind of cache: the alternatives that need no surgery."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gqaconvert.reporting.origins import of_evaluation, same_conditions
from gqaconvert.reporting.saved import Measured
from gqaconvert.reporting.subjects import Subject, baseline_of

ORDINARY = "dynamic"
_PREFIX = "cache/"


@dataclass(frozen=True, slots=True)
class CacheRow:
    """A model read through one kind of cache.

    Attributes:
        subject: the model.
        kind: of the cache.
        one: the measurement.
        times_ordinary: its perplexity ÷ that of the same model through its ordinary cache.
        quality: perplexity of the source through its ordinary cache ÷ this one.
        bytes_per_token: of the cache at the end of a window.
        share_of_source: bytes ÷ those of the source's ordinary cache.
    """

    subject: Subject
    kind: str
    one: Measured
    times_ordinary: float | None
    quality: float | None
    bytes_per_token: float
    share_of_source: float | None

    @property
    def origin(self) -> str:
        """Command and settings."""
        return of_evaluation(self.subject.run, self.one)


def cache_rows(subjects: Sequence[Subject]) -> list[CacheRow]:
    """Collect what was measured through caches, model by model, the ordinary cache first."""
    rows = []
    for subject in subjects:
        metrics = subject.run.measurements(subject.model)
        kinds = [metric for metric in metrics if metric.startswith(_PREFIX)]
        baseline = baseline_of(subjects, subject)
        for metric in sorted(kinds, key=lambda each: (each != _PREFIX + ORDINARY, each)):
            one = metrics[metric]
            source = None if baseline is None else baseline.measured(_PREFIX + ORDINARY)
            own = subject.measured(_PREFIX + ORDINARY)
            rows.append(
                CacheRow(
                    subject, str(one.detail["kind"]), one,
                    times_ordinary=_ratio(one, own),
                    quality=_inverse(_ratio(one, source)),
                    bytes_per_token=one.detail["cache_bytes"] / max(1, one.detail["tokens_seen"]),
                    share_of_source=_bytes_ratio(one, source),
                )
            )  # fmt: skip
    return rows


def comparable(one: Measured, other: Measured) -> bool:
    """Whether two measurements through caches read the same in the same way, but for the kind."""
    # The kind is what is compared.
    settings = [{**each.settings, "kind": None} for each in (one, other)]
    return settings[0] == settings[1]


def _ratio(one: Measured, other: Measured | None) -> float | None:
    if other is None or not comparable(one, other) or not other.value:
        return None
    ratio = one.value / other.value
    return ratio if math.isfinite(ratio) else None


def _inverse(ratio: float | None) -> float | None:
    return 1 / ratio if ratio else None


def _bytes_ratio(one: Measured, other: Measured | None) -> float | None:
    if other is None or not comparable(one, other) or not other.detail["cache_bytes"]:
        return None
    return float(one.detail["cache_bytes"] / other.detail["cache_bytes"])


def quality_kept(subject: Subject, baseline: Subject | None) -> float | None:
    """Perplexity of the source ÷ that of a model over the same windows: 1 keeps all."""
    if baseline is None:
        return None
    ours, theirs = subject.measured("perplexity"), baseline.measured("perplexity")
    if ours is None or theirs is None or not same_conditions(ours, theirs):
        return None
    return theirs.value / ours.value if ours.value and math.isfinite(ours.value) else None
