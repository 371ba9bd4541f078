"""Perplexity along conversion and uptraining, with that of the source as the line to reach."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gqaconvert.figure_style import INK, plain_log_axis
from gqaconvert.reporting.figures.panels import ReportFigure, panel
from gqaconvert.reporting.looks import Looks
from gqaconvert.reporting.numbers import duration, figure, listed, plural
from gqaconvert.reporting.origins import made_by
from gqaconvert.reporting.saved import UPTRAINED, SavedRun
from gqaconvert.reporting.subjects import Subject
from gqaconvert.units import format_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDE = 4.0
"""Highest over lowest perplexity from which on the axis is logarithmic."""

_LARGEST_LOSS = 20.0
"""Nats; a perplexity beyond is that of a run that has broken, and would flatten all others."""


def held_out_points(run: SavedRun) -> list[tuple[float, float]]:
    """Tokens trained on and loss on held-out text, in nats a token."""
    return [
        (line["tokens"], line["held_out_loss"])
        for line in run.metrics
        if line["kind"] == "held_out" and _is_loss(line.get("held_out_loss"))
    ]


def source_loss(run: SavedRun) -> float | None:
    """Loss of the source on the same text, in nats a token."""
    for line in run.metrics:
        if line["kind"] == "held_out" and _is_loss(line.get("source_loss")):
            return float(line["source_loss"])
    return None


def uptraining_figure(subjects: Sequence[Subject], looks: Looks) -> ReportFigure | None:
    """Draw perplexity against tokens trained on, a line a run.

    Args:
        subjects: whose runs are drawn, where they trained at all.
        looks: of the models.
    """
    runs = {subject.run.name: subject.run for subject in subjects}
    trained = [run for run in runs.values() if held_out_points(run)]
    if not trained:
        return None

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        for run in trained:
            _draw_run(axes, run, _colour(run, subjects, looks), named=looks.are_runs)
        axes.set_xlabel("tokens trained on")
        axes.set_ylabel("perplexity")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
        low, high = axes.get_ylim()
        if low <= 0 or high / low > _WIDE:
            plain_log_axis(axes)

    said = listed([_told(run, named=looks.are_runs) for run in trained])
    return ReportFigure(
        name="uptraining",
        title="Conversion and uptraining",
        caption=(
            "Perplexity on held-out text: the first point is the model as converted, before any"
            f" training; the dashed line is the source. {said}. How close the curve comes to the"
            " line is what training has won back; one that still falls would gain from more tokens."
        ),
        origin=" ".join(dict.fromkeys(_origin(run) for run in trained)),
        panels=(panel("uptraining", "Perplexity against tokens trained on", f"{said}.", draw),),
    )


def _draw_run(axes: Axes, run: SavedRun, colour: str, *, named: bool) -> None:
    suffix = f", {run.name}" if named else ""
    points = held_out_points(run)
    axes.plot(
        [tokens for tokens, _ in points], [math.exp(loss) for _, loss in points], color=colour,
        marker="o", label=f"held-out text{suffix}",
    )  # fmt: skip
    start = points[0]
    if start[0] == 0:
        axes.annotate(
            "converted", (0, math.exp(start[1])), (7, 3), textcoords="offset points", fontsize=8
        )
    source = source_loss(run)
    if source is not None:
        axes.axhline(
            math.exp(source), color=colour if named else INK, linestyle="--", linewidth=1.2,
            label=f"source, held-out text{suffix}",
        )  # fmt: skip


def _colour(run: SavedRun, subjects: Sequence[Subject], looks: Looks) -> str:
    if looks.are_runs:
        return looks.of_run(run.name)
    ours = [subject for subject in subjects if subject.run is run]
    trained = [subject for subject in ours if subject.role == UPTRAINED]
    return looks.of((trained or ours)[-1]).colour


def _told(run: SavedRun, *, named: bool) -> str:
    points, source = held_out_points(run), source_loss(run)
    first, last = math.exp(points[0][1]), math.exp(points[-1][1])
    start = f"{run.name}: from" if named else "From"
    against = "" if source is None else f"; the source has {figure(math.exp(source))}"
    return (
        f"{start} {figure(first)} to {figure(last)} over {format_count(points[-1][0])}"
        f" tokens{against}"
    )


def _origin(run: SavedRun) -> str:
    summary: Mapping[str, Any] = run.summary or {}
    parts = []
    if summary:
        parts.append(
            f"{plural(summary['steps'], 'step')} in {duration(summary['seconds'])} on"
            f" {summary.get('devices', 'one device')}"
        )
        if summary.get("held_out_tokens"):
            text = f"held-out text {summary.get('held_out_text')}"
            parts.append(f"{text}, {summary['held_out_tokens']:,} tokens")
    command = made_by(run, "uptrain", str(summary.get("recipe", "RECIPE")))
    return f"{'; '.join(parts) or 'Saved with the run'}. {command}"


def _is_loss(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, int | float) and math.isfinite(value) and value < _LARGEST_LOSS
