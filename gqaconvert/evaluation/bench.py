"""`bench`: prefill and decode latency of models, side by side, over context and batch.

Every figure is a median over repeats with its spread; within a repeat the models take turns, so
that a machine that slows down slows them all. Everything is saved in one JSON file, from which
the table and the figure are made.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import torch

from gqaconvert.errors import GqaconvertError
from gqaconvert.evaluation.bandwidth import Bandwidth, measure_bandwidth
from gqaconvert.evaluation.bench_bounds import (
    ModelFacts,
    knee_tokens,
    model_facts,
    ordinary_cache_bytes,
)
from gqaconvert.evaluation.bench_results import (
    Bench,
    BenchRow,
    BenchSettings,
    Knee,
    Timing,
    save_bench,
)
from gqaconvert.evaluation.cache_kinds import CacheKind, CacheUnavailable
from gqaconvert.evaluation.latency import Decode, Prefill, TimedModel, check_context
from gqaconvert.evaluation.machine import describe_machine, free_bytes, torch_threads
from gqaconvert.evaluation.results import library_versions
from gqaconvert.kv_cache.roofline import decode_tokens_per_s
from gqaconvert.modelling.models import LoadedModel
from gqaconvert.units import format_memory


@dataclass
class _Subject:
    """What one row is about, and what has been seen of it so far."""

    label: str
    timed: TimedModel
    facts: ModelFacts
    prefill_s: list[tuple[int, float]] = field(default_factory=list)  # tokens × batch, seconds


def run_bench(
    models: Sequence[LoadedModel],
    kinds: Sequence[CacheKind],
    settings: BenchSettings,
    *,
    out: Path | None = None,
    bandwidth: Bandwidth | None = None,
    progress: Callable[[str], None] | None = None,
) -> Bench:
    """Measure every model under every cache kind, at every context and batch.

    Args:
        models: on one device.
        kinds: of cache; one that does not work with a model gives a row that says why.
        settings: what to measure.
        out: folder for `bench.json`, written again after each context and batch.
        bandwidth: measured elsewhere; by default measured now.
        progress: told what has been done.

    Raises:
        UsageError: more tokens than a model has positions for.
    """
    longest = max(settings.contexts) + settings.new_tokens
    notes = [note for loaded in models if (note := check_context(loaded, longest))]
    with torch_threads(settings.threads):
        device = models[0].device
        bench = Bench(
            settings=settings,
            device=device,
            machine=describe_machine(),
            versions=library_versions(),
            bandwidth=bandwidth or measure_bandwidth(device),
            models=tuple(map(model_facts, models, _names(models))),
            notes=notes,
        )
        subjects = list(_subjects(models, kinds, settings, bench.models))
        for context, batch in product(settings.contexts, settings.batches):
            bench.rows += _measure(subjects, context, batch, settings, bench.bandwidth)
            bench.knees = _knees(bench, subjects)
            if out is not None:
                save_bench(bench, out)
            if progress:
                progress(f"{context} tokens, batch {batch}")
    bench.notes += _notes(bench)
    if out is not None:
        save_bench(bench, out)
    return bench


def _names(models: Sequence[LoadedModel]) -> list[str]:
    """Names of the models, numbered where two folders are called the same."""
    names: list[str] = []
    for loaded in models:
        same = sum(other.name == loaded.name for other in models[: len(names)])
        names.append(f"{loaded.name} ({same + 1})" if same else loaded.name)
    return names


def _subjects(
    models: Sequence[LoadedModel],
    kinds: Sequence[CacheKind],
    settings: BenchSettings,
    facts: Sequence[ModelFacts],
) -> Iterator[_Subject]:
    for (loaded, fact), kind in product(zip(models, facts, strict=True), kinds):
        label = fact.name if len(kinds) == 1 else f"{fact.name}, {kind.name}"
        timed = TimedModel(loaded, kind, settings.new_tokens, settings.seed)
        yield _Subject(label, timed, fact)


def _measure(
    subjects: Sequence[_Subject],
    context: int,
    batch: int,
    settings: BenchSettings,
    bandwidth: Bandwidth,
) -> list[BenchRow]:
    """Measure all subjects at one context and batch, taking turns."""
    prefills: dict[str, list[Prefill]] = {subject.label: [] for subject in subjects}
    decodes: dict[str, list[Decode]] = {subject.label: [] for subject in subjects}
    skipped: dict[str, str] = {}
    no_prefill: dict[str, str] = {}
    for subject in subjects:
        if reason := _no_room(subject, context, batch):
            skipped[subject.label] = reason
        elif reason := _too_long(subject, context, batch, settings):
            no_prefill[subject.label] = reason
            if subject.timed.reads_prompt(settings.fill):
                skipped[subject.label] = f"reading its prompt {reason}"
    for repeat in range(-settings.warmup, settings.repeats):
        # The order turns, so that none always runs after the same other.
        turn = repeat % len(subjects)
        for subject in [*subjects[turn:], *subjects[:turn]]:
            label = subject.label
            if label in skipped:
                continue
            try:
                if label not in no_prefill:
                    prefill = subject.timed.prefill(context, batch)
                    subject.prefill_s.append((context * batch, prefill.seconds))
                    prefills[label] += [prefill] if repeat >= 0 else []
                decode = subject.timed.decode(context, batch, settings.fill)
                decodes[label] += [decode] if repeat >= 0 else []
            except (CacheUnavailable, torch.OutOfMemoryError) as error:
                skipped[label] = error.what if isinstance(error, GqaconvertError) else str(error)
    rows = []
    for subject in subjects:
        label, kind = subject.label, subject.timed.kind.name
        row = BenchRow(label, subject.facts.name, kind, context, batch)
        if label in skipped:
            rows.append(replace(row, skipped=skipped[label]))
            continue
        row = replace(row, no_prefill=no_prefill.get(label))
        row = replace(
            row, cache_bytes_formula=ordinary_cache_bytes(subject.timed.loaded, context, batch)
        )
        rows.append(_filled_row(row, subject.facts, prefills[label], decodes[label], bandwidth))
    return rows


def _filled_row(
    row: BenchRow,
    facts: ModelFacts,
    prefills: Sequence[Prefill],
    decodes: Sequence[Decode],
    bandwidth: Bandwidth,
) -> BenchRow:
    decode = _timing([each.seconds_per_token for each in decodes])
    held = decodes[0].cache_bytes
    bound = decode_tokens_per_s(bandwidth.bytes_per_s, facts.read_bytes, held)
    reached = row.batch / decode.median_s
    return replace(
        row,
        prefill=_timing([each.seconds for each in prefills]) if prefills else None,
        decode=decode,
        fill=decodes[0].fill,
        tokens_per_s=reached,
        bound_tokens_per_s=None if bound is None else bound * row.batch,
        share_of_bound=None if bound is None else reached / (bound * row.batch),
        cache_bytes=held,
        prefill_peak_bytes=_most([each.peak_bytes for each in prefills]),
        decode_peak_bytes=_most([each.peak_bytes for each in decodes]),
    )


def _timing(seconds: Sequence[float]) -> Timing:
    low = high = seconds[0]
    if len(seconds) > 1:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(
        statistics.median(seconds), min(seconds), max(seconds), high - low, tuple(seconds)
    )


def _most(peaks: Sequence[int | None]) -> int | None:
    return max((peak for peak in peaks if peak is not None), default=None)


def _no_room(subject: _Subject, context: int, batch: int) -> str | None:
    needed = ordinary_cache_bytes(subject.timed.loaded, context + subject.timed.new_tokens, batch)
    free = free_bytes(subject.timed.loaded.device)
    if needed is None or free is None or needed < free:
        return None
    return f"its cache takes {format_memory(needed)}, {format_memory(free)} are free"


def _too_long(subject: _Subject, context: int, batch: int, settings: BenchSettings) -> str | None:
    """Foresee the time of a prefill from shorter ones; attention makes it grow faster than that."""
    if not subject.prefill_s:
        return None
    tokens, seconds = max(subject.prefill_s)
    foreseen = seconds * context * batch / tokens
    if foreseen <= settings.prefill_limit_s:
        return None
    return f"would take {foreseen:.0f} s or more, over the limit of {settings.prefill_limit_s:g} s"


def _knees(bench: Bench, subjects: Sequence[_Subject]) -> list[Knee]:
    knees = []
    for subject, batch in product(subjects, bench.settings.batches):
        points = [
            (row.context, row.cache_bytes)
            for row in bench.rows
            if row.label == subject.label and row.batch == batch and row.cache_bytes is not None
        ]
        if points:
            tokens = knee_tokens(points, subject.facts.read_bytes)
            knees.append(Knee(subject.label, batch, tokens))
    return knees


def _notes(bench: Bench) -> list[str]:
    notes = []
    if any(row.fill == "random" for row in bench.rows):
        notes.append(
            "for decoding, caches were filled with random keys and values of the right shape, not"
            " by reading a prompt; prefill was timed by itself, on random tokens"
        )
    cache = bench.bandwidth.cache_bytes
    small = [facts.name for facts in bench.models if cache and facts.read_bytes < cache]
    if cache and small:
        notes.append(
            f"the weights of {', '.join(small)} fit in the processor's cache of"
            f" {format_memory(cache)}, so the bound by memory bandwidth does not hold for them"
        )
    if any(row.no_prefill for row in bench.rows):
        notes.append("some prefills were left out as too long; --prefill-limit raises the limit")
    return notes
