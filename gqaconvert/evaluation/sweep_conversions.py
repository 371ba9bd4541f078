"""The conversions of a sweep: what each will be, known before the first is made, and making them.

Calibrated methods share one set of statistics and one local fit, whose identities are part of each
plan, so that a sweep goes on only with what the same statistics gave.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqaconvert.attention.inspection import inspect
from gqaconvert.calibration.block_fit import FitOptions
from gqaconvert.calibration.calibrate import calibrate, is_of
from gqaconvert.calibration.local_fit import LocalFit
from gqaconvert.calibration.windows import calibration_text
from gqaconvert.checkpoint.staging import MANIFEST
from gqaconvert.errors import RefusedError
from gqaconvert.evaluation.sweep_results import SweepSettings
from gqaconvert.surgery.convert import convert
from gqaconvert.surgery.options import CALIBRATED, ConversionOptions
from gqaconvert.surgery.planning import plan_conversion
from gqaconvert.surgery.source import open_source
from gqaconvert.surgery.statistics import StatisticsFile

STATISTICS = "calibration.safetensors"
"""Where statistics of a text are kept in the folder of the sweep."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """A conversion to make.

    Attributes:
        kv_heads: it will have.
        method: as `convert` calls it.
        label: the method as tables call it, with the local fit where there is one.
        folder: of the converted model.
        digest: of the plan; two of one digest have the same weights.
    """

    kv_heads: int
    method: str
    label: str
    folder: Path
    digest: str

    @property
    def is_made(self) -> bool:
        """Whether the folder is the outcome of this plan."""
        manifest = self.folder / MANIFEST
        if not manifest.is_file():
            return False
        try:
            content = json.loads(manifest.read_text(encoding="utf-8"))
        except ValueError:
            return False
        return bool(content.get("plan", {}).get("sha256") == self.digest)


@dataclass(frozen=True, slots=True)
class _Shared:
    statistics: StatisticsFile | None
    fit: LocalFit | None
    grouping: str


class SweepConversions:
    """Plans the conversions of a sweep and makes them; statistics are gathered or found at once.

    Args:
        folder: of the source.
        name: of the source.
        settings: of the sweep.
        out: its folder.
        tell: told what is being done.

    Attributes:
        planned: all conversions, in the order they are measured.
        calibration: what they were calibrated and fitted on, plain values; None without.
        texts_sha256: of these texts.

    Raises:
        UsageError: counts of KV heads that the model cannot be pooled into, or no such text.
        RefusedError: statistics of something else are in the way.
    """

    def __init__(
        self, folder: Path, name: str, settings: SweepSettings, out: Path, tell: Tell
    ) -> None:
        self._folder, self._settings, self._tell = folder, settings, tell
        inspection = inspect(folder)
        self._models = out / "models"
        counts = [
            count
            for count in dict.fromkeys(settings.kv_heads or inspection.legal_kv_heads)
            if count != inspection.num_kv_heads
        ]
        for count in counts:  # mistakes show before a text is read for minutes
            self._convert(self._models / f"{name}-kv{count}-mean", count, "mean", dry_run=True)
        self._statistics: StatisticsFile | None = None
        self._fit: LocalFit | None = None
        self.calibration: dict[str, Any] | None = None
        self.texts_sha256: frozenset[str] = frozenset()
        if counts and set(settings.chosen_methods) & set(CALIBRATED):
            self._prepare(out)
        self.planned = [
            self._plan(name, count, method)
            for count in counts
            for method in settings.chosen_methods
        ]

    def make(self, planned: Planned) -> Path:
        """Convert, unless the folder is there already; return it."""
        if not planned.is_made:
            self._convert(planned.folder, planned.kv_heads, planned.method)
        return planned.folder

    def _convert(self, target: Path, count: int, method: str, *, dry_run: bool = False) -> None:
        shared = self._shared(method)
        with shared.fit if shared.fit is not None else nullcontext():
            convert(
                self._folder,
                target,
                num_kv_heads=count,
                method=method,
                grouping=shared.grouping,
                statistics=None if shared.statistics is None else shared.statistics.path,
                refine=shared.fit,
                seed=self._settings.seed,
                dry_run=dry_run,
                overwrite=True,
            )

    def _plan(self, name: str, count: int, method: str) -> Planned:
        """Plan without predicting losses, as a dry run would: that takes as long as converting."""
        source, shared = open_source(self._folder), self._shared(method)
        options = ConversionOptions(
            num_kv_heads=count,
            method=method,
            seed=self._settings.seed,
            grouping=shared.grouping,
            metric=None if shared.fit is None else "plain",  # as `convert` chooses before a fit
            statistics_digest=None if shared.statistics is None else shared.statistics.digest,
            refined=None if shared.fit is None else shared.fit.identity,
        )
        plan = plan_conversion(source.index, source.config, source.attention, options)
        label = method if shared.fit is None else f"{method} + fit"
        target = self._models / f"{name}-kv{count}-{label.replace(' + ', '-')}"
        return Planned(count, method, label, target, plan.digest())

    def _shared(self, method: str) -> _Shared:
        """What a method is given beside the source: nothing, unless it is calibrated."""
        if method not in CALIBRATED:
            return _Shared(None, None, "adjacent")
        return _Shared(self._statistics, self._fit, self._settings.grouping)

    def _prepare(self, out: Path) -> None:
        """Get the statistics and the fit that the methods want."""
        settings = self._settings
        facts: dict[str, Any] = {}
        hashes: set[str] = set()
        if settings.calibration is not None:
            self._statistics = StatisticsFile(self._gather(out, settings.calibration))
            self._statistics.check(self._folder)
            identity = self._statistics.identity
            names = [text.name for text in identity.texts]
            facts = {"texts": names, "tokens": identity.tokens}
            hashes.update(text.sha256 for text in identity.texts)
        if settings.fit_steps:
            self._fit = LocalFit(
                self._folder,
                settings.fit_text,
                FitOptions(steps=settings.fit_steps),
                windows=settings.fit_windows,
                device=settings.device,
                progress=lambda number, count, report: self._tell(
                    f"layer {number + 1} of {count}: error {report.error_before:.3f} →"
                    f" {report.error_after:.3f}"
                ),
            )
            text = calibration_text(settings.fit_text)
            facts |= {"fit_text": text.name, "fit_steps": settings.fit_steps}
            hashes.add(text.sha256)
        self.texts_sha256 = frozenset(hashes)
        if facts:
            self.calibration = {**facts, "grouping": settings.grouping}

    def _gather(self, out: Path, spec: str) -> Path:
        """Take the statistics of a text, or find them where an earlier run kept them."""
        if self._settings.calibration_is_file:
            return Path(spec)
        kept, tokens = out / STATISTICS, self._settings.calibration_tokens
        if kept.exists():
            if not is_of(kept, self._folder, spec, tokens=tokens):
                raise RefusedError(
                    "statistics of another model or text are in the way",
                    at=str(kept),
                    remedy=f"--calibration {kept} to use them, another --out, or remove them",
                )
            return kept
        out.mkdir(parents=True, exist_ok=True)
        self._tell(f"gathering statistics on {spec}")
        calibrate(
            self._folder, spec, out=kept, tokens=tokens, device=self._settings.device, resume=True
        )
        return kept
