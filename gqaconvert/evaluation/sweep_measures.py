"""Measures one point of a sweep; the source stays in memory once it is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gqaconvert.attention.inspection import inspect
from gqaconvert.corpus.text import Text
from gqaconvert.corpus.windows import Window, chosen_windows
from gqaconvert.evaluation.bench_bounds import ordinary_cache_bytes
from gqaconvert.evaluation.cache_kinds import CacheKind, CacheUnavailable
from gqaconvert.evaluation.divergence import LiveSource, measure_divergence
from gqaconvert.evaluation.perplexity import measure_perplexity
from gqaconvert.evaluation.results import Measurement
from gqaconvert.evaluation.scoring import Reader
from gqaconvert.evaluation.sweep_results import Kind, SweepPoint, SweepSettings
from gqaconvert.evaluation.through_cache import perplexity_through_cache
from gqaconvert.modelling.models import LoadedModel, load_model


class SweepMeasures:
    """Measures the source, conversions of it, and both through cache kinds.

    Args:
        folder: of the source.
        text: what all models read.
        settings: of the sweep.
        identity: recorded with each measurement.
    """

    def __init__(
        self,
        folder: Path,
        text: Text,
        settings: SweepSettings,
        identity: Mapping[str, Any],
    ) -> None:
        self._folder, self._text = folder, text
        self._settings, self._identity = settings, identity
        self._source: LoadedModel | None = None
        self._reader: Reader | None = None
        self._windows: list[Window] = []

    @property
    def source(self) -> LoadedModel:
        """The source, loaded when it is first needed."""
        if self._source is None:
            self._source = self.load(self._folder)
        return self._source

    def load(self, folder: Path) -> LoadedModel:
        """Load a model as the settings say."""
        settings = self._settings
        return load_model(folder, dtype=settings.dtype, device=settings.device, attn=settings.attn)

    def source_point(self, key: str) -> SweepPoint:
        """Measure the source over whole windows."""
        measured = self._perplexity(self.source, self._source_reader())
        point = self._point(key, "source", self.source, None)
        return _with_perplexity(point, measured, measured.value)

    def conversion(
        self,
        key: str,
        load: Callable[[], LoadedModel],
        method: str | None,
        reference: float | None,
    ) -> SweepPoint:
        """Measure a conversion over whole windows, and its divergence from the source.

        Args:
            key: of the point.
            load: gives the converted model.
            method: it was converted with.
            reference: perplexity of the source.
        """
        loaded = load()
        reader = Reader(loaded)
        point = _with_perplexity(
            self._point(key, "conversion", loaded, method),
            self._perplexity(loaded, reader),
            reference,
        )
        divergence = measure_divergence(
            loaded,
            self._texts(),
            LiveSource(self.source, self._source_reader()),
            settings=self._identity,
            batch_size=self._settings.batch,
            reader=reader,
        )
        return replace(
            point,
            kl=divergence.value,
            kl_stderr=divergence.stderr,
            kl_p99=divergence.detail["p99"],
            top1=divergence.detail["top1_agreement"],
            top1_stderr=divergence.detail["top1_agreement_stderr"],
        )

    def through(
        self,
        key: str,
        load: Callable[[], LoadedModel],
        method: str | None,
        kind: CacheKind,
        reference: float | None,
    ) -> SweepPoint:
        """Measure a model through a cache kind.

        Args:
            key: of the point.
            load: gives the model.
            method: it was converted with, None for the source.
            kind: of the cache.
            reference: perplexity of the source through an ordinary cache; None when this is it.
        """
        loaded = load()
        point = replace(self._point(key, "cache", loaded, method), cache_kind=kind.name)
        windows = self._texts()[: self._settings.cache_windows]
        try:
            measured = perplexity_through_cache(
                loaded, windows, kind, prefill=self._settings.prefill
            )
        except CacheUnavailable as error:
            return replace(point, kv_bytes=None, kv_tokens=None, unavailable=error.what)
        return replace(
            _with_perplexity(point, measured, reference or measured.value),
            kv_bytes=measured.detail["cache_bytes"],
            kv_tokens=measured.detail["tokens_seen"],
            decode_tokens_per_s=measured.detail["decode_tokens_per_s"],
        )

    def _source_reader(self) -> Reader:
        if self._reader is None:
            self._reader = Reader(self.source)
        return self._reader

    def _texts(self) -> list[Window]:
        if not self._windows:
            self._windows = chosen_windows(
                self.source.tokenizer,
                self._text,
                length=self._settings.context,
                count=self._settings.windows,
                spread_out=self._settings.spread,
            )
        return self._windows

    def _perplexity(self, loaded: LoadedModel, reader: Reader) -> Measurement:
        return measure_perplexity(
            loaded,
            self._texts(),
            settings=self._identity,
            batch_size=self._settings.batch,
            reader=reader,
        )

    def _point(self, key: str, kind: Kind, loaded: LoadedModel, method: str | None) -> SweepPoint:
        # As many tokens as a cache kind has seen when the last one of a window is predicted.
        tokens = self._settings.context - 1
        heads = inspect(loaded.folder).num_kv_heads
        held = ordinary_cache_bytes(loaded, tokens, 1)
        return SweepPoint(key, kind, loaded.name, heads, method, "dynamic", held, tokens)


def _with_perplexity(
    point: SweepPoint, measured: Measurement, reference: float | None
) -> SweepPoint:
    return replace(
        point,
        perplexity=measured.value,
        perplexity_stderr=measured.stderr,
        bits_per_byte=measured.detail.get("bits_per_byte"),
        quality=None if reference is None else reference / measured.value,
    )
