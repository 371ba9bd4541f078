"""Quality kept against bytes of the KV cache: conversions, cache kinds, and both together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gqaconvert.figure_style import COLOURS, INK, MARKERS, memory_axis
from gqaconvert.reporting.caches import ORDINARY, CacheRow, cache_rows, quality_kept
from gqaconvert.reporting.figures.panels import ReportFigure, panel
from gqaconvert.reporting.looks import Looks
from gqaconvert.reporting.numbers import listed
from gqaconvert.reporting.origins import of_evaluation, of_sweep
from gqaconvert.reporting.saved import SavedRun
from gqaconvert.reporting.subjects import Subject, baseline_of
from gqaconvert.units import format_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[Subject, float, float]
"""A model, its bytes a token, and the quality it keeps."""


def trade_off_figure(subjects: Sequence[Subject], looks: Looks) -> ReportFigure | None:
    """Draw models and cache kinds where they lie between memory and quality.

    Args:
        subjects: models; those without perplexity or bytes are left out.
        looks: of the models.
    """
    models = model_points(subjects)
    caches = [
        row for row in cache_rows(subjects) if row.quality is not None and row.kind != ORDINARY
    ]
    sweeps = {s.run.name: s.run for s in subjects if s.run.sweep and _sweep_lines(s.run)}
    if len(models) + len(caches) < 2 and not sweeps:
        return None
    kinds = list(dict.fromkeys(row.kind for row in caches))

    def draw(axes: Axes) -> None:
        for number, run in enumerate(sweeps.values()):
            _draw_sweep(axes, run, number, named=looks.are_runs)
        for subject, size, quality in models:
            look = looks.of(subject)
            axes.plot(size, quality, look.marker, color=look.colour, markersize=8, label=look.name)
        for row in caches:
            _draw_cache(axes, row, looks, kinds)
        for number, kind in enumerate(kinds):
            axes.plot(
                [], [], _cache_marker(number), color=INK, markerfacecolor="none",
                label=f"cache: {kind}", linestyle="none",
            )  # fmt: skip
        axes.axhline(1.0, color=INK, linewidth=1, linestyle="--", alpha=0.6)
        memory_axis(axes, horizontal=True)
        axes.margins(x=0.09)
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        axes.set_xlabel("KV cache, a token")
        axes.set_ylabel("source perplexity ÷ perplexity")

    told = [f"{looks.of(s).name} keeps {q:.2f} with {format_memory(x)}" for s, x, q in models]
    told += [
        f"{row.kind} on {looks.of(row.subject).name} keeps {row.quality:.2f}"
        f" with {format_memory(row.bytes_per_token)}"
        for row in caches
    ]
    return ReportFigure(
        name="trade-off",
        title="Quality kept against memory",
        caption=_caption(bool(caches), bool(sweeps)),
        origin=_origin(subjects, caches, list(sweeps.values())),
        panels=(
            panel(
                "trade-off",
                "Quality kept against bytes of the cache a token",
                f"{listed(told)}." if told else "Quality and bytes of each point of a sweep.",
                draw,
            ),
        ),
    )


def model_points(subjects: Sequence[Subject]) -> list[Point]:
    """Models whose bytes and quality are known; the source has quality 1."""
    found = []
    for subject in subjects:
        quality = quality_kept(subject, baseline_of(subjects, subject))
        size = subject.kv_bytes_per_token
        swept = subject.run.sweep is not None and not subject.run.models and not subject.role
        # The line of a sweep shows them already.
        if quality is not None and size and not swept:
            found.append((subject, size, quality))
    return found


def _draw_cache(axes: Axes, row: CacheRow, looks: Looks, kinds: Sequence[str]) -> None:
    look = looks.of(row.subject)
    axes.plot(
        row.bytes_per_token, row.quality or 0.0, _cache_marker(kinds.index(row.kind)),
        color=look.colour,
        # Filled on the source, hollow together with surgery.
        markerfacecolor=look.colour if row.subject.is_baseline else "none", markersize=6.5,
        markeredgewidth=1.4,
    )  # fmt: skip


def _cache_marker(number: int) -> str:
    # The first three stand for models.
    marks = [*MARKERS[3:], "*", "h", "p"]
    return marks[number % len(marks)]


def _draw_sweep(axes: Axes, run: SavedRun, number: int, *, named: bool) -> None:
    for place, (method, points) in enumerate(_sweep_lines(run).items()):
        colour = COLOURS[(3 + place + 2 * number) % len(COLOURS)]
        axes.plot(
            [x for x, _ in points], [y for _, y in points], color=colour, marker=".",
            linestyle="-.", linewidth=1.2,
            label=f"sweep: {method}" + (f", {run.name}" if named else ""),
        )  # fmt: skip


def _sweep_lines(run: SavedRun) -> dict[str, list[tuple[float, float]]]:
    """Return for each method its points, and those of the source, by bytes a token."""
    points: list[Mapping[str, Any]] = [
        point for point in (run.sweep or {"points": []})["points"]
        if point["quality"] is not None and point["kv_bytes"] and point["kv_tokens"]
        and point["cache_kind"] == ORDINARY
    ]  # fmt: skip
    sources = [point for point in points if point["kind"] == "source"]
    methods = dict.fromkeys(p["method"] for p in points if p["kind"] == "conversion")
    return {
        method: sorted(
            (p["kv_bytes"] / p["kv_tokens"], p["quality"])
            for p in [*sources, *points]
            if p["kind"] == "source" or (p["kind"] == "conversion" and p["method"] == method)
        )
        for method in methods
    }


def _caption(caches: bool, sweeps: bool) -> str:
    text = (
        "Further left is less memory, further up is more of the source's quality; 1 keeps all."
        " A point is worth having where none lies to its upper left."
    )
    if caches:
        text += (
            " Other marks are cache kinds, which need no surgery: filled on the source, hollow"
            " together with it. They are held to the source's own cache, read in the same way, and"
            " their bytes are those at the end of a window: a window of fixed size looks the better"
            " the longer the text."
        )
    if sweeps:
        text += " The broken line joins conversions of a sweep, none of them trained."
    return text


def _origin(
    subjects: Sequence[Subject], caches: Sequence[CacheRow], sweeps: Sequence[SavedRun]
) -> str:
    parts = []
    for subject in subjects:
        one = subject.measured("perplexity")
        if one is not None:
            parts.append(f"Models: {of_evaluation(subject.run, one)}")
            break
    if caches:
        parts.append(f"Caches: {caches[0].origin}")
    parts += [f"Conversions that only the sweep made. {of_sweep(run)}" for run in sweeps]
    return " ".join(parts)
