"""Bytes of the cache and time per token against context, as measured by `bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gqaconvert.figure_style import style
from gqaconvert.reporting.figures.bench import (
    bench_conditions,
    bench_labels,
    draw_cache_bytes,
    draw_latency,
    timed_rows,
)
from gqaconvert.reporting.figures.panels import Panel, ReportFigure, panel
from gqaconvert.reporting.looks import Look, Looks
from gqaconvert.reporting.numbers import listed
from gqaconvert.reporting.origins import of_bench
from gqaconvert.reporting.saved import SavedRun
from gqaconvert.reporting.subjects import Subject
from gqaconvert.units import format_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def speed_figure(subjects: Sequence[Subject], looks: Looks) -> ReportFigure | None:
    """Draw both curves for every run that was timed; machines differ, so each has its own axes.

    Args:
        subjects: whose runs are drawn.
        looks: of the models.
    """
    runs = {s.run.name: s.run for s in subjects if s.run.bench and timed_rows(s.run.bench)}
    if not runs:
        return None
    panels: list[Panel] = []
    told = []
    for number, run in enumerate(runs.values()):
        bench = run.bench or {}
        shown = _looks(run, subjects, looks)
        colours = {label: (look.colour, look.marker) for label, look in shown.items()}
        names = {label: look.name for label, look in shown.items()}
        suffix = "" if number == 0 else f"-{number + 1}"
        of = f", {run.name}" if looks.are_runs else ""
        rows = [
            f"{names[row['label']]} at {row['context']} tokens:"
            f" {format_memory(row['cache_bytes'] or 0)},"
            f" {1e3 * row['decode']['median_s']:.3g} ms a token"
            for row in timed_rows(bench)
        ]
        alt = f"{listed(rows)}."
        panels += _panels(bench, colours, names, alt, of, suffix)
        told.append(bench_conditions(bench) + of)
    first = next(iter(runs.values()))
    return ReportFigure(
        name="speed",
        title="Cache and speed as measured",
        caption=(
            "Left, bytes that the cache holds, and the weights that a step reads (level lines);"
            " where they cross, at the knee, reading the cache takes as long as reading the"
            " weights. Right, time per token; dotted, what memory bandwidth allows at best. Only"
            " beyond the knee does a smaller cache make a token much faster."
            f" {'. '.join(told)}."
        ),
        origin=of_bench(first, timed_rows(first.bench or {})[-1]),
        panels=tuple(panels),
    )


def _panels(
    bench: Mapping[str, Any],
    colours: Mapping[str, tuple[str, str]],
    names: Mapping[str, str],
    alt: str,
    of: str,
    suffix: str,
) -> list[Panel]:
    def held(axes: Axes) -> None:
        draw_cache_bytes(axes, bench, colours, names)

    def timed(axes: Axes) -> None:
        draw_latency(axes, bench, colours, names)

    return [
        panel(f"cache-bytes{suffix}", f"Measured bytes of the cache{of}", alt, held),
        panel(f"latency{suffix}", f"Time per token{of}", alt, timed),
    ]


def _looks(run: SavedRun, subjects: Sequence[Subject], looks: Looks) -> dict[str, Look]:
    """Return label → look: that of its model where it has one and is the ordinary cache."""
    bench = run.bench or {}
    models = {s.model: looks.of(s) for s in subjects if s.run is run}
    found: dict[str, Look] = {}
    used = len(models)
    for label in bench_labels(bench):
        row = next(each for each in bench["rows"] if each["label"] == label)
        if row["cache_kind"] == "dynamic" and row["model"] in models:
            found[label] = models[row["model"]]
        else:
            found[label] = Look(*style(used), label)
            used += 1
    return found
