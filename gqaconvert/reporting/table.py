"""The table at the head of a report: a row a model, and of every figure where it comes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gqaconvert.reporting import origins
from gqaconvert.reporting.numbers import NOTHING, finite_figure, share, times
from gqaconvert.reporting.saved import Measured
from gqaconvert.reporting.subjects import Subject, baseline_of
from gqaconvert.units import format_count, format_memory


@dataclass(frozen=True, slots=True)
class Cell:
    """One figure, or why there is none.

    Attributes:
        text: as it is read.
        value: the figure itself.
        stderr: its standard error.
        aside: set against the source, such as "÷4".
        origin: how it was made.
        missing: why there is no figure.
        detail: what else is known of it, such as the spread of repeats.
    """

    text: str
    value: float | None = None
    stderr: float | None = None
    aside: str = ""
    origin: str = ""
    missing: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """Figures of one kind.

    Attributes:
        key: header in CSV, with the unit.
        heading: in the table.
        unit: below the heading.
        cells: one a subject.
        has_error: whether standard errors go with it.
    """

    key: str
    heading: str
    unit: str
    cells: tuple[Cell, ...]
    has_error: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Subjects and columns.

    Attributes:
        subjects: a row each.
        columns: those with a figure at least.
        left_out: heading → why no row has it.
    """

    subjects: tuple[Subject, ...]
    columns: tuple[Column, ...]
    left_out: tuple[tuple[str, str], ...]

    def notes(self) -> list[str]:
        """What footnotes say, in the order of first use; their place is their number less one."""
        texts = (cell.origin or cell.missing for column in self.columns for cell in column.cells)
        return list(dict.fromkeys(text for text in texts if text))


Make = Callable[[Subject, Subject | None], Cell]


def main_table(subjects: Sequence[Subject]) -> Table:
    """Set all that is known of models side by side."""
    memory = _memory(subjects)
    asked = _of_tokens([s.estimate["context"] for s in subjects if s.estimate])
    timed = _of_tokens([s.decoding["context"] for s in subjects if s.decoding])
    made = [
        _column("parameters", "Parameters", "", subjects, _parameters),
        _column("kv_bytes_per_token", "KV cache", "a token", subjects, _kv_bytes),
        _column("longest_context_tokens", "Longest context",
                f"tokens{memory}", subjects, _longest),
        _column("requests_that_fit", "Requests",
                f"{asked}{memory}".strip(), subjects, _requests),
        _column("perplexity", "Perplexity", "", subjects, _perplexity, has_error=True),
        _column("kl_from_source_nats", "KL from source", "nats", subjects, _kl, has_error=True),
        _column("top1_agreement", "Top-1 agreement", "with the source", subjects, _top1,
                has_error=True),
        *_task_columns(subjects),
        _column("decode_tokens_per_s", "Decoding",
                f"tokens/s {timed}".strip(), subjects, _decoding),
    ]  # fmt: skip
    kept, left_out = [], []
    for column in made:
        if any(cell.value is not None for cell in column.cells):
            kept.append(column)
        elif column.cells:
            left_out.append((column.heading, column.cells[0].missing))
    return Table(tuple(subjects), tuple(kept), tuple(left_out))


def _column(
    key: str,
    heading: str,
    unit: str,
    subjects: Sequence[Subject],
    make: Make,
    *,
    has_error: bool = False,
) -> Column:
    cells = tuple(make(subject, baseline_of(subjects, subject)) for subject in subjects)
    return Column(key, heading, unit, cells, has_error)


def _missing(reason: str) -> Cell:
    return Cell(NOTHING, missing=reason)


def _parameters(subject: Subject, _: Subject | None) -> Cell:
    count = subject.parameters
    if count is None:
        return _missing("not recorded")
    return Cell(format_count(count), count, origin="Parameters on disk, from the headers.")


def _kv_bytes(subject: Subject, baseline: Subject | None) -> Cell:
    size = subject.kv_bytes_per_token
    if size is None:
        return _missing("neither evaluated nor estimated")
    one = subject.measured("kv_cache")
    origin = (
        origins.of_evaluation(subject.run, one)
        if one is not None
        else "By formula from the config."
    )
    before = None if baseline is None else baseline.kv_bytes_per_token
    return Cell(format_memory(size), size, aside=_against(size, before), origin=origin)


def _longest(subject: Subject, baseline: Subject | None) -> Cell:
    return _fitting(subject, baseline, "longest_context")


def _requests(subject: Subject, baseline: Subject | None) -> Cell:
    return _fitting(subject, baseline, "concurrent_requests")


def _fitting(subject: Subject, baseline: Subject | None, key: str) -> Cell:
    row = subject.estimate
    if row is None:
        return _missing("no estimate was saved for its KV heads")
    if row[key] is None:
        return _missing("the estimate has no memory size, or no limit")
    before = None if baseline is None or baseline.estimate is None else baseline.estimate[key]
    return Cell(
        f"{row[key]:,}",
        row[key],
        aside=_against(row[key], before),
        origin=origins.of_estimate(subject.run, row),
    )


def _perplexity(subject: Subject, baseline: Subject | None) -> Cell:
    one = subject.measured("perplexity")
    if one is None:
        return _missing("not evaluated")
    other = None if baseline is None else baseline.measured("perplexity")
    comparable = other is not None and origins.same_conditions(one, other)
    before = other.value if other is not None and comparable else None
    return _measured(
        subject, one, finite_figure(one.value, one.stderr), _against(one.value, before)
    )


def _kl(subject: Subject, _: Subject | None) -> Cell:
    one = subject.measured("divergence")
    if one is None:
        return _undiverged(subject)
    return _measured(subject, one, finite_figure(one.value, one.stderr))


def _top1(subject: Subject, _: Subject | None) -> Cell:
    one = subject.measured("divergence")
    if one is None or one.detail.get("top1_agreement") is None:
        return _undiverged(subject)
    value, stderr = one.detail["top1_agreement"], one.detail.get("top1_agreement_stderr")
    origin = origins.of_evaluation(subject.run, one)
    return Cell(share(value, stderr), value, stderr, origin=origin)


def _undiverged(subject: Subject) -> Cell:
    return _missing("it is the source itself" if subject.is_baseline else "not compared with it")


def _task_columns(subjects: Sequence[Subject]) -> list[Column]:
    metrics: dict[str, Measured] = {}
    for subject in subjects:
        for metric, one in subject.run.measurements(subject.model).items():
            if metric.startswith("task/") or metric == "needle":
                metrics.setdefault(metric, one)
    return [
        _column(
            metric,
            metric.removeprefix("task/"),
            _chance(one),
            subjects,
            _task(metric),
            has_error=metric != "needle",
        )
        for metric, one in sorted(metrics.items())
    ]


def _chance(one: Measured) -> str:
    if one.metric == "needle":
        return "found exactly"
    chance = one.detail.get("chance")
    score = str(one.detail["score"])
    return score if chance is None else f"{score}, chance {100 * chance:.0f} %"


def _task(metric: str) -> Make:
    def make(subject: Subject, _: Subject | None) -> Cell:
        one = subject.measured(metric)
        if one is None:
            return _missing("not measured")
        score = str(one.detail.get("score", ""))
        percent = metric == "needle" or score.startswith("acc") or score == "exact_match"
        text = share(one.value, one.stderr) if percent else finite_figure(one.value, one.stderr)
        return _measured(subject, one, text)

    return make


def _decoding(subject: Subject, baseline: Subject | None) -> Cell:
    row = subject.decoding
    if row is None:
        return _undecoded(subject)
    other = None if baseline is None else baseline.decoding
    before = None if other is None else other["tokens_per_s"]
    speed, step = row["tokens_per_s"], row["decode"]
    spread = (
        f"{1e3 * step['median_s']:.3g} ms a step,"
        f" {1e3 * step['min_s']:.3g} to {1e3 * step['max_s']:.3g}"
    )
    return Cell(
        f"{speed:,.1f}" if speed < 1000 else f"{speed:,.0f}", speed, aside=_against(speed, before),
        origin=origins.of_bench(subject.run, row), detail=spread,
    )  # fmt: skip


def _undecoded(subject: Subject) -> Cell:
    if subject.run.bench is None:
        return _missing("not timed: no bench.json")
    twin = next(
        (each["name"] for each in subject.run.bench["models"]
         if each["num_kv_heads"] == subject.kv_heads), None,
    )  # fmt: skip
    if twin is None:
        return _missing("not timed")
    return _missing(f"not timed; {twin} has the same shape and takes the same time")


def _measured(subject: Subject, one: Measured, text: str, aside: str = "") -> Cell:
    origin = origins.of_evaluation(subject.run, one)
    return Cell(text, one.value, one.stderr, aside, origin)


def _against(value: float, before: float | None) -> str:
    """A figure over that of the source; nothing for the source itself and its equals."""
    if not before or math.isinf(value) or abs(value / before - 1) < 5e-3:
        return ""
    return times(value / before)


def _of_tokens(contexts: Sequence[int]) -> str:
    """Say with which context; runs that differ in it say so in their notes."""
    if len(set(contexts)) == 1:
        return f"at {contexts[0]:,} tokens"
    return "see notes" if contexts else ""


def _memory(subjects: Sequence[Subject]) -> str:
    sizes = {
        subject.estimate["memory_bytes"] for subject in subjects if subject.estimate is not None
    }
    sizes.discard(None)
    return f" in {format_memory(sizes.pop())}" if len(sizes) == 1 else ""
