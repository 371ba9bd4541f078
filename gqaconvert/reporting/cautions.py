"""What a reader should know before trusting a table: collapse, mixed settings, stale files."""

from __future__ import annotations

from collections.abc import Sequence

from gqaconvert.reporting.caches import cache_rows
from gqaconvert.reporting.numbers import finite_figure, listed
from gqaconvert.reporting.origins import differing_settings, short_hash
from gqaconvert.reporting.saved import CONVERTED, SavedRun
from gqaconvert.reporting.subjects import Subject, baseline_of
from gqaconvert.reporting.table import Table

_COLLAPSE = 2.0
"""Perplexity over that of the source from which on a model is hardly of use."""


def cautions_of(subjects: Sequence[Subject], table: Table) -> list[str]:
    """Collect all cautions, the gravest first.

    Args:
        subjects: all models of a report.
        table: the main one.
    """
    runs = list({id(s.run): s.run for s in subjects}.values())
    found = [*_collapse(subjects), *_settings(subjects), *_weights(subjects)]
    for run in runs:
        found += _of_run(run, several=len(runs) > 1)
    found += _unplaced(subjects)
    found += [f"{heading}: {reason}." for heading, reason in table.left_out if reason]
    return list(dict.fromkeys(found))


def _collapse(subjects: Sequence[Subject]) -> list[str]:
    found = []
    for subject in subjects:
        one, baseline = subject.measured("perplexity"), baseline_of(subjects, subject)
        start = None if baseline is None else baseline.value("perplexity")
        if one is None or not start or one.value <= _COLLAPSE * start:
            continue
        advice = (
            "pooling without training does that: train it before it is used"
            if subject.role in (CONVERTED, None)
            else "it needs more tokens before it is used"
        )
        found.append(
            f"Perplexity of {_named(subject)} is {finite_figure(one.value / start)} times the"
            f" source's; {advice}."
        )
    return found


def _settings(subjects: Sequence[Subject]) -> list[str]:
    """Metrics whose figures stand in one column and were not measured in the same way."""
    found = []
    metrics = dict.fromkeys(
        metric for s in subjects for metric in s.run.measurements(s.model)
        if not metric.startswith("cache/") and metric != "kv_cache"
    )  # fmt: skip
    for metric in metrics:
        having = [(s, one) for s in subjects if (one := s.measured(metric)) is not None]
        first, reference = having[0]
        others: dict[str, list[str]] = {}
        for subject, one in having[1:]:
            differing = ", ".join(differing_settings(reference, one))
            if differing:
                others.setdefault(differing, []).append(_named(subject))
        for differing, names in others.items():
            found.append(
                f"{metric} of {_named(first)} and of {listed(names)} were measured with different"
                f" settings ({differing}); do not compare them."
            )
    return found


def _weights(subjects: Sequence[Subject]) -> list[str]:
    """Measurements of one name that belong to different weights: some are of an earlier model."""
    found = []
    for subject in subjects:
        hashes: dict[str, list[str]] = {}
        for metric, one in subject.run.measurements(subject.model).items():
            if one.weights_sha256:
                hashes.setdefault(one.weights_sha256, []).append(metric)
        if subject.bench_facts:
            hashes.setdefault(subject.bench_facts["weights_sha256"], []).append("bench")
        if subject.role == CONVERTED and subject.run.summary:
            trained = subject.run.summary.get("start_sha256")
            if trained and subject.run.summary.get("start") == subject.model:
                hashes.setdefault(trained, []).append("the training that started from it")
        if len(hashes) > 1:
            parts = [f"{short_hash(key)} ({listed(each)})" for key, each in hashes.items()]
            found.append(
                f"Figures of {_named(subject)} are of different weights: {'; '.join(parts)}. Some"
                " are of an earlier model; measure again."
            )
    return found


def _of_run(run: SavedRun, *, several: bool) -> list[str]:
    name = f"{run.name}: " if several else ""
    found = [f"{name}bench: {note}" for note in (run.bench or {"notes": []})["notes"]]
    found += [f"{name}bench: {row['label']} at {row['context']} tokens, batch {row['batch']}:"
              f" {row['skipped']}"
              for row in (run.bench or {"rows": []})["rows"] if row["skipped"]]  # fmt: skip
    for point in (run.sweep or {"points": []})["points"]:
        if point.get("unavailable"):
            found.append(
                f"{name}sweep: {point['cache_kind']} with {point['kv_heads']} KV heads:"
                f" {point['unavailable']}"
            )
    ending = (run.summary or {}).get("ending", "finished")
    if ending != "finished":
        found.append(f"{name}The training did not run to its end: {ending}.")
    if (run.summary or {}).get("skipped_steps"):
        found.append(f"{name}{(run.summary or {})['skipped_steps']} training steps were skipped.")
    found += [f"{name}{note}" for note in (run.heads or {}).get("notes", [])]
    return found


def _unplaced(subjects: Sequence[Subject]) -> list[str]:
    rows = [row for row in cache_rows(subjects) if row.quality is None]
    if not rows:
        return []
    names = listed(list(dict.fromkeys(_named(row.subject) for row in rows)))
    return [
        f"Cache kinds of {names} cannot be set against the source: it was not read through its"
        " ordinary cache with the same settings (evaluate with --cache dynamic as well)."
    ]


def _named(subject: Subject) -> str:
    return f"{subject.model} ({subject.run.name})" if subject.role else subject.model
