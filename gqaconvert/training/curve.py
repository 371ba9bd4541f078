"""The picture of a run: loss against tokens, with the source's loss as the line to reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gqaconvert.figure_style import COLOURS, new_figure
from gqaconvert.units import format_count

_SMOOTHED_STEPS = 50


def draw_curve(lines: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Draw the losses of a run.

    Args:
        lines: of its metrics.
        path: .png, .svg or .pdf.
    """
    from matplotlib.ticker import FuncFormatter

    steps: list[Mapping[str, Any]] = []
    held_out: list[Mapping[str, Any]] = []
    for line in lines:
        (held_out if line["kind"] == "held_out" else steps).append(line)
    with new_figure(path, (7.0, 4.2)) as figure:
        axes = figure.add_subplot()
        taken = [line for line in steps if not line["skipped"]]
        tokens = [line["tokens"] for line in taken]
        losses = [line["next_token"] for line in taken]
        axes.plot(tokens, losses, color=COLOURS[4], linewidth=0.6, alpha=0.45)
        axes.plot(tokens, _smoothed(losses), color=COLOURS[4], linewidth=1.4, label="training text")
        if held_out:
            axes.plot(
                [line["tokens"] for line in held_out],
                [line["held_out_loss"] for line in held_out],
                color=COLOURS[0],
                marker="o",
                markersize=4,
                label="held-out text",
            )
            source = held_out[0].get("source_loss")
            if source is not None:
                axes.axhline(source, color=COLOURS[6], linestyle="--", label="source, held-out")
        skipped = [line["tokens"] for line in steps if line["skipped"]]
        if skipped:
            bottom = axes.get_ylim()[0]
            axes.plot(
                skipped, [bottom] * len(skipped), "x", color=COLOURS[1], label="skipped steps"
            )
        axes.set_xlabel("tokens trained on")
        axes.set_ylabel("loss (nats a token)")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
        axes.legend(frameon=False)


def _smoothed(values: list[float]) -> list[float]:
    """Running mean over the last steps."""
    result, total = [], 0.0
    window = max(1, min(_SMOOTHED_STEPS, len(values) // 10))
    for number, value in enumerate(values):
        total += value
        if number >= window:
            total -= values[number - window]
        result.append(total / min(number + 1, window))
    return result
