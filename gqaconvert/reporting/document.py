"""A report as a value: title, sentences, tables, figures and how they were made.

Both forms, HTML and Markdown, say what is here; nothing here knows of either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gqaconvert.reporting.caches import CacheRow, cache_rows
from gqaconvert.reporting.cautions import cautions_of
from gqaconvert.reporting.figures.layers import layers_figure
from gqaconvert.reporting.figures.memory import memory_figure
from gqaconvert.reporting.figures.panels import ReportFigure
from gqaconvert.reporting.figures.speed import speed_figure
from gqaconvert.reporting.figures.trade_off import trade_off_figure
from gqaconvert.reporting.figures.uptraining import uptraining_figure
from gqaconvert.reporting.looks import Looks
from gqaconvert.reporting.numbers import duration, listed
from gqaconvert.reporting.origins import short_hash
from gqaconvert.reporting.saved import SavedRun
from gqaconvert.reporting.subjects import Subject, subjects_of
from gqaconvert.reporting.table import Table, main_table
from gqaconvert.reporting.words import summary_of

_NO_FIGURE = {
    "Memory of the KV cache": "no bytes a token are known: no results, models.json or estimate",
    "Conversion and uptraining": "no held-out loss was saved (metrics.jsonl)",
    "Quality kept against memory":
        "it needs perplexity and cache bytes of two models, or of a model and a cache kind",
    "Cache and speed as measured": "no decoding was timed (bench.json)",
    "Layer by layer": "neither head similarity (heads.json) nor losses by layer were saved",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage:
    """A step of a run: what it came to, by which command, in which time."""

    name: str
    outcome: str
    time: str
    command: str


@dataclass(frozen=True, slots=True)
class MadeBy:
    """How the figures of one run were made.

    Attributes:
        run: its name.
        command: that made all of it.
        stages: one by one.
        facts: what else there is to know: heading → text.
    """

    run: str
    command: str | None
    stages: tuple[Stage, ...]
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Document:
    """All that a report says.

    Attributes:
        title: its heading.
        summaries: run → what it came to; one without a name where there is one run.
        table: the main one.
        caches: rows of the table of cache kinds.
        figures: in order.
        absent: title of a figure → why it is not there.
        cautions: what to know before trusting the table.
        made_by: how the figures were made, a run at a time.
    """

    title: str
    summaries: tuple[tuple[str, str], ...]
    table: Table
    caches: tuple[CacheRow, ...]
    figures: tuple[ReportFigure, ...]
    absent: tuple[tuple[str, str], ...]
    cautions: tuple[str, ...]
    made_by: tuple[MadeBy, ...]


def make_document(runs: Sequence[SavedRun], title: str | None = None) -> Document:
    """Work out a report.

    Args:
        runs: one, or several to compare, with names of their own.
        title: its heading; that of the run by default.
    """
    subjects = [subject for run in runs for subject in subjects_of(run)]
    table = main_table(subjects)
    looks = Looks(subjects)
    drawn = (
        memory_figure(subjects, looks),
        uptraining_figure(subjects, looks),
        trade_off_figure(subjects, looks),
        speed_figure(subjects, looks),
        layers_figure(subjects),
    )
    several = len(runs) > 1
    return Document(
        title=title or _title(runs),
        summaries=tuple((run.name if several else "", summary_of(run, subjects)) for run in runs),
        table=table,
        caches=tuple(cache_rows(subjects)),
        figures=tuple(figure for figure in drawn if figure is not None),
        absent=tuple(
            missing for figure, missing in zip(drawn, _NO_FIGURE.items(), strict=True)
            if figure is None
        ),
        cautions=tuple(cautions_of(subjects, table)),
        made_by=tuple(_made_by(run, subjects) for run in runs),
    )  # fmt: skip


def _title(runs: Sequence[SavedRun]) -> str:
    if len(runs) > 1:
        return f"Comparison of {listed([run.name for run in runs])}"
    return runs[0].title or runs[0].name


def _made_by(run: SavedRun, subjects: Sequence[Subject]) -> MadeBy:
    stages = tuple(
        Stage(name, _outcome(facts), duration(facts["seconds"]), facts["command"])
        for name, facts in run.stages.items()
        # Made after this page; to tell of it would make the next one another.
        if name != "report"
    )
    facts = [
        ("Machine", plainly(run.machine)),
        ("Versions", plainly(run.versions)),
        ("Source", _source(run)),
        ("Verified", _verified(run)),
        ("Weights", _weights(run, subjects)),
    ]
    return MadeBy(run.name, run.command, stages, tuple(each for each in facts if each[1]))


def _outcome(facts: Mapping[str, Any]) -> str:
    outcome, note = str(facts.get("outcome", "done")), facts.get("note")
    if not note:
        return outcome
    return str(note) if outcome == "done" else f"{outcome}: {note}"


def plainly(values: Mapping[str, Any]) -> str:
    """Write plain values in one line: cores 2, threads 1."""
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)


def _source(run: SavedRun) -> str:
    if run.manifest is None:
        return ""
    source = run.manifest["source"]
    revision = source.get("revision")
    return f"{source['name']}" + (f" at revision {revision}" if revision else "")


def _verified(run: SavedRun) -> str:
    if run.verify is None:
        return ""
    return "; ".join(
        each["name"] + (f" ({each['covered']})" if each.get("covered") else "")
        for each in run.verify["checks"]
    )


def _weights(run: SavedRun, subjects: Sequence[Subject]) -> str:
    parts = []
    for subject in subjects:
        if subject.run is not run:
            continue
        hashes = [one.weights_sha256 for one in run.measurements(subject.model).values()]
        if subject.bench_facts:
            hashes.append(subject.bench_facts["weights_sha256"])
        known = list(dict.fromkeys(short_hash(each) for each in hashes if each))
        if known:
            parts.append(f"{subject.model} sha256 {listed(known)}")
    return "; ".join(parts)
