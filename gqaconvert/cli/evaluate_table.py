"""How an evaluation is printed: a table of models, one of cache kinds, and what to make of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from gqaconvert.cli.terminal import say, show_table
from gqaconvert.reporting.numbers import NOTHING, figure, share
from gqaconvert.units import format_bytes, format_count, format_memory

if TYPE_CHECKING:
    from gqaconvert.evaluation.evaluate import Evaluation, ModelResults
    from gqaconvert.evaluation.results import Measurement

_COLLAPSE = 2.0
"""Perplexity of a model over that of the baseline, from which on a word is said about it."""


def show_evaluation(evaluation: Evaluation) -> None:
    """Print both tables on stdout, and what could not be measured on stderr."""
    tasks = [
        metric
        for metric in _metrics(evaluation)
        if metric.startswith("task/") or metric == "needle"
    ]
    headers = ["model", "parameters", "disk", "KV a token", "measured", "perplexity", "bits a byte"]
    if evaluation.baseline is not None:
        headers += ["KL", "p99", "top-1"]
    headers += [_task_header(evaluation, metric) for metric in tasks]
    rows = []
    for model in evaluation.models:
        row = [model.name, format_count(model.parameters), format_bytes(model.disk_bytes)]
        row += _cache_cells(model) + _perplexity_cells(model)
        if evaluation.baseline is not None:
            row += _divergence_cells(model, model.name == evaluation.baseline)
        rows.append(row + [_task_cell(model.measurements.get(metric)) for metric in tasks])
    show_table(headers, rows)
    _show_kinds(evaluation)
    for note in _notes(evaluation):
        say(f"note: {note}")


def _cache_cells(model: ModelResults) -> list[str]:
    found = model.measurements.get("kv_cache")
    if found is None:
        return [NOTHING, NOTHING]
    measured = found.detail["measured_bytes_per_token"]
    return [
        format_memory(found.value),
        NOTHING if measured is None else format_memory(measured),
    ]


def _perplexity_cells(model: ModelResults) -> list[str]:
    found = model.measurements.get("perplexity")
    if found is None:
        return [NOTHING, NOTHING]
    bits = found.detail["bits_per_byte"]
    return [
        figure(found.value, found.stderr),
        NOTHING if bits is None else f"{bits:.3f}",
    ]


def _divergence_cells(model: ModelResults, is_baseline: bool) -> list[str]:
    if is_baseline:
        return ["(baseline)", NOTHING, NOTHING]
    found = model.measurements.get("divergence")
    if found is None:
        return [NOTHING] * 3
    detail = found.detail
    return [
        figure(found.value, found.stderr),
        f"{detail['p99']:.2f}",
        share(detail["top1_agreement"], detail["top1_agreement_stderr"]),
    ]


def _task_header(evaluation: Evaluation, metric: str) -> str:
    if metric == "needle":
        return "needle: exact, choice (chance 25 %)"
    found = _first(evaluation, metric)
    name = metric.removeprefix("task/")
    chance = found.detail["chance"] if found else None
    return name if chance is None else f"{name} (chance {100 * chance:.0f} %)"


def _task_cell(found: Measurement | None) -> str:
    if found is None:
        return NOTHING
    if found.metric == "needle":
        detail = found.detail
        choice = share(detail["choice_accuracy"], detail["choice_stderr"])
        return f"{share(found.value)}, {choice}"
    if found.detail["score"].startswith("acc") or found.detail["score"] == "exact_match":
        return share(found.value, found.stderr)
    return figure(found.value, found.stderr)


def _show_kinds(evaluation: Evaluation) -> None:
    rows = []
    for model in evaluation.models:
        plain = model.measurements.get("cache/dynamic")
        for metric, found in model.measurements.items():
            if not metric.startswith("cache/"):
                continue
            detail = found.detail
            rows.append(
                [
                    model.name,
                    detail["kind"],
                    figure(found.value, found.stderr),
                    NOTHING if plain is None else f"{found.value / plain.value:.3f}",
                    format_memory(detail["cache_bytes"]),
                    _ratio(detail["cache_bytes"], plain),
                    f"{detail['decode_tokens_per_s']:.1f}",
                ]
            )
    if not rows:
        return
    seen = max(
        found.detail["tokens_seen"]
        for model in evaluation.models
        for metric, found in model.measurements.items()
        if metric.startswith("cache/")
    )
    typer.echo("")
    headers = [
        "model",
        "cache",
        "perplexity through it",
        "÷ dynamic's",
        f"bytes at {seen:,} tokens",
        "÷ dynamic's",
        "decode tokens/s",
    ]
    show_table(headers, rows, (0, 1))


def _ratio(size_bytes: int, plain: Measurement | None) -> str:
    if plain is None or not plain.detail["cache_bytes"]:
        return NOTHING
    return f"{size_bytes / plain.detail['cache_bytes']:.3f}"


def _notes(evaluation: Evaluation) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for model in evaluation.models:
        for metric, reason in model.unavailable.items():
            reasons.setdefault((metric, reason), []).append(model.name)
    notes = []
    for (metric, reason), names in reasons.items():
        of_all = len(names) == len(evaluation.models)
        where = "" if of_all else f" of {', '.join(names)}"
        notes.append(f"{metric}{where} was not measured: {reason}")
    return [*notes, *_chance_notes(evaluation), *_collapse_notes(evaluation)]


def _chance_notes(evaluation: Evaluation) -> list[str]:
    names = [
        model.name
        for model in evaluation.models
        if "needle" in model.measurements and model.measurements["needle"].detail["at_chance"]
    ]
    if not names:
        return []
    return [f"at chance, so that the needle tells nothing about them: {', '.join(names)}"]


def _collapse_notes(evaluation: Evaluation) -> list[str]:
    base = _baseline_perplexity(evaluation)
    times = [
        f"{model.measurements['perplexity'].value / base:,.1f} ({model.name})"
        for model in evaluation.models
        if base
        and "perplexity" in model.measurements
        and model.measurements["perplexity"].value > _COLLAPSE * base
    ]
    if not times:
        return []
    return [
        f"perplexity is {', '.join(times)} times the baseline's. Pooling without training does"
        " that: an averaged head attends to what none of its heads did. Train such a model further"
        " before it is used"
    ]


def _baseline_perplexity(evaluation: Evaluation) -> float | None:
    for model in evaluation.models:
        if model.name == evaluation.baseline and "perplexity" in model.measurements:
            return model.measurements["perplexity"].value
    return None


def _metrics(evaluation: Evaluation) -> list[str]:
    every: dict[str, Any] = {}
    for model in evaluation.models:
        every |= dict.fromkeys(model.measurements)
        every |= dict.fromkeys(model.unavailable)
    return list(every)


def _first(evaluation: Evaluation, metric: str) -> Measurement | None:
    for model in evaluation.models:
        if metric in model.measurements:
            return model.measurements[metric]
    return None
