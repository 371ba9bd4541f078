"""`sweep`: convert to each number of KV heads and measure each, for the trade-off curve.

Restartable: finished points are kept in `sweep.json`, and a converted folder is used again when its
manifest names the same plan. Cache kinds, which need no conversion, are points of the same curve.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gqaconvert.attention.inspection import inspect
from gqaconvert.checkpoint.staging import MANIFEST
from gqaconvert.corpus.text import load_text
from gqaconvert.evaluation.cache_kinds import CacheKind, cache_kind
from gqaconvert.evaluation.results import library_versions
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
from gqaconvert.surgery.convert import Conversion, convert


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
        out: folder for `sweep.json` and the converted models.
        revision: branch, tag or commit of a Hub model.
        progress: told what is being done.

    Raises:
        UsageError: counts of KV heads that the model cannot be pooled into.
        GqaconvertError: as conversion and loading say.
    """
    found = find_model(model, revision)
    plans = _plan(found.folder, found.name, settings, out)
    text = load_text(settings.text)
    identity = {
        "format": FORMAT,
        "source": found.weights_sha256,
        "text": text.sha256,
        "context": settings.context,
        "windows": settings.windows,
        "dtype": settings.dtype,
        "attn": settings.attn,
        "device": settings.device,
    }
    decoding = {"cache_windows": settings.cache_windows, "cache_prefill": settings.prefill}
    shown = {**identity, "text_name": text.name, **decoding}
    sweep = Sweep(found.name, shown, library_versions())
    measures = SweepMeasures(found.folder, text, settings, identity)
    book = _Book(sweep, out, finished_points(out), progress or (lambda _: None))
    key = point_key(**identity)
    book.add(key, found.name, partial(measures.source_point, key))
    stages: list[tuple[_Planned | None, str, _Once]] = [
        (None, found.name, _Once(lambda: measures.source))
    ]
    for plan in plans:
        load = _Once(partial(_load_converted, measures, found.folder, plan, settings.seed))
        stages.append((plan, plan.folder.name, load))
    for planned, name, load in stages:
        digest, method = (planned.digest, planned.method) if planned else (None, None)
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


@dataclass(frozen=True, slots=True)
class _Planned:
    kv_heads: int
    method: str
    folder: Path
    digest: str


def _plan(folder: Path, name: str, settings: SweepSettings, out: Path) -> list[_Planned]:
    """Plan all conversions before the first is carried out, so that mistakes show at once."""
    inspection = inspect(folder)
    now = inspection.num_kv_heads
    counts = settings.kv_heads or inspection.legal_kv_heads
    planned = []
    for count in dict.fromkeys(counts):
        for method in settings.methods:
            if count == now:
                continue
            target = out / "models" / f"{name}-kv{count}-{method}"
            dry = _convert(folder, target, count, method, settings.seed, dry_run=True)
            if dry.plan is not None:
                planned.append(_Planned(count, method, target, dry.plan.digest()))
    return planned


def _convert(
    folder: Path, target: Path, count: int, method: str, seed: int, *, dry_run: bool = False
) -> Conversion:
    return convert(
        folder, target, num_kv_heads=count, method=method, seed=seed, dry_run=dry_run,
        overwrite=True,
    )  # fmt: skip


def _has_plan(planned: _Planned) -> bool:
    """Whether the folder is the outcome of this plan."""
    manifest = planned.folder / MANIFEST
    if not manifest.is_file():
        return False
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return bool(content.get("plan", {}).get("sha256") == planned.digest)


def _load_converted(
    measures: SweepMeasures, source: Path, planned: _Planned, seed: int
) -> LoadedModel:
    """Load a conversion, converting where its folder is not there yet."""
    if not _has_plan(planned):
        _convert(source, planned.folder, planned.kv_heads, planned.method, seed)
    return measures.load(planned.folder)


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
