"""`sweep`: convert to each number of KV heads and measure each, for the trade-off curve.

Restartable: finished points are kept in `sweep.json`, and a converted folder is used again when its
manifest names the same plan. Cache kinds, which need no conversion, are points of the same curve.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gqaconvert.corpus.text import load_text
from gqaconvert.evaluation.cache_kinds import CacheKind, cache_kind
from gqaconvert.evaluation.results import library_versions
from gqaconvert.evaluation.sweep_conversions import Planned, SweepConversions
from gqaconvert.evaluation.sweep_measures import SweepMeasures
from gqaconvert.evaluation.sweep_results import (
    FORMAT,
    Sweep,
    SweepPoint,
    SweepSettings,
    finished_points,
    point_key,
    save_sweep,
)
from gqaconvert.modelling.models import LoadedModel, find_model


def run_sweep(
    model: str | Path,
    settings: SweepSettings,
    out: Path,
    *,
    revision: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Sweep:
    """Measure a model, its conversions and its cache kinds, and save each as soon as it is known.

    Args:
        model: folder, alias or Hub id.
        settings: what to measure.
        out: folder for `sweep.json`, the statistics and the converted models.
        revision: branch, tag or commit of a Hub model.
        progress: told what is being done.

    Raises:
        UsageError: counts of KV heads that the model cannot be pooled into.
        RefusedError: statistics of another model or text lie in the folder.
        GqaconvertError: as conversion and loading say.
    """
    found = find_model(model, revision)
    text = load_text(settings.text)
    tell = progress or (lambda _: None)
    conversions = SweepConversions(found.folder, found.name, settings, out, tell)
    if text.sha256 in conversions.texts_sha256:
        tell(f"warning: {text.name} is measured on and calibrated on: quality will look too good")
    identity: dict[str, Any] = {
        "format": FORMAT,
        "source": found.weights_sha256,
        "text": text.sha256,
        "context": settings.context,
        "windows": settings.windows,
        **({"spread": True} if settings.spread else {}),
        "dtype": settings.dtype,
        "attn": settings.attn,
        "device": settings.device,
    }
    decoding = {"cache_windows": settings.cache_windows, "cache_prefill": settings.prefill}
    shown = {**identity, "text_name": text.name, **decoding}
    if conversions.calibration is not None:
        shown["calibration"] = conversions.calibration
    sweep = Sweep(found.name, shown, library_versions())
    measures = SweepMeasures(found.folder, text, settings, identity)
    book = _Book(sweep, out, finished_points(out), tell)
    key = point_key(**identity)
    book.add(key, found.name, partial(measures.source_point, key))
    stages: list[tuple[Planned | None, str, _Once]] = [
        (None, found.name, _Once(lambda: measures.source))
    ]
    for plan in conversions.planned:
        load = _Once(partial(_load_converted, measures, conversions, plan))
        stages.append((plan, plan.folder.name, load))
    for planned, name, load in stages:
        digest, method = (planned.digest, planned.label) if planned else (None, None)
        if planned:
            key = point_key(**identity, plan=digest)
            measure = partial(measures.conversion, key, load, method, book.reference("source"))
            book.add(key, name, measure)
        for kind in _caches(settings, of_source=planned is None):
            key = point_key(**identity, **decoding, plan=digest, cache=kind.name)
            reference = book.reference("cache")
            measure = partial(measures.through, key, load, method, kind, reference)
            book.add(key, f"{name} through {kind.name}", measure)
        load.forget()
        if planned and not settings.keep:
            shutil.rmtree(planned.folder, ignore_errors=True)
    return sweep


def _load_converted(
    measures: SweepMeasures, conversions: SweepConversions, planned: Planned
) -> LoadedModel:
    """Load a conversion, converting where its folder is not there yet."""
    return measures.load(conversions.make(planned))


def _caches(settings: SweepSettings, *, of_source: bool) -> list[CacheKind]:
    """Kinds to measure; the ordinary one first, as the others are held to it."""
    if not settings.caches or not (of_source or settings.caches_of_all):
        return []
    return [cache_kind(spec) for spec in dict.fromkeys(("dynamic", *settings.caches))]


@dataclass
class _Book:
    """Takes over finished points, measures the others, and saves after each."""

    sweep: Sweep
    out: Path
    finished: Mapping[str, SweepPoint]
    tell: Callable[[str], None]

    def add(self, key: str, what: str, measure: Callable[[], SweepPoint]) -> None:
        if key in self.finished:
            point = self.finished[key]
        else:
            self.tell(f"measuring {what}")
            point = measure()
        self.sweep.points.append(point)
        save_sweep(self.sweep, self.out)

    def reference(self, kind: str) -> float | None:
        """Perplexity of the source with an ordinary cache, measured as points of this kind are."""
        for point in self.sweep.points:
            if point.kind == kind and point.method is None and point.cache_kind == "dynamic":
                return point.perplexity
        return None


class _Once:
    """Calls a function when its result is first wanted, and keeps it."""

    def __init__(self, make: Callable[[], LoadedModel]) -> None:
        self._make = make
        self._made: LoadedModel | None = None

    def __call__(self) -> LoadedModel:
        if self._made is None:
            self._made = self._make()
        return self._made

    def forget(self) -> None:
        """Let the result go, so that two conversions are never in memory together."""
        self._made = None
