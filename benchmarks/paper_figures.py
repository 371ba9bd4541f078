"""The three figures of `paper.py`, drawn from `paper.json` alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paper_protocol import DISTILLATION, FITTED, MHA, NEXT_TOKEN, SOURCE
from paper_results import MAIN, METHODS, Point, Results, heads_name, percent

from gqaconvert.figure_style import COLOURS, LINES, MARKERS, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, PINK, SKY, _, BLACK = COLOURS
_HEADS = {1: (BLUE, MARKERS[0]), 2: (ORANGE, MARKERS[1])}


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw every figure; return their paths."""
    figures = {
        "paper_conversion.svg": draw_conversion,
        "paper_uptraining.svg": draw_uptraining,
        "paper_groups.svg": draw_groups,
    }
    for name, draw in figures.items():
        draw(results, folder / name)
    return [folder / name for name in figures]


def draw_conversion(results: Results, path: Path) -> None:
    """Methods of conversion against perplexity: right away, and after two shares of uptraining."""
    shares = (0.0, 0.01, MAIN)
    with new_figure(path, (8.4, 2.9)) as figure:
        panels = figure.subplots(1, len(shares), sharey=True)
        for share, axes in zip(shares, panels, strict=True):
            for heads, (colour, marker) in _HEADS.items():
                for place, method in enumerate(METHODS):
                    point = results.get(heads, method, share)
                    if point is None:
                        continue
                    # Side by side, as points of both may coincide.
                    height = place + (0.14 if heads == 2 else -0.14)
                    axes.errorbar(
                        results.perplexity(point), height, xerr=2 * results.error(point),
                        fmt=marker, color=colour, markersize=5, capsize=2, linewidth=1,
                    )  # fmt: skip
            axes.set_title(
                "after conversion" if not share else f"after {percent(share)}", fontsize=10
            )
            axes.set_yticks(range(len(METHODS)), METHODS)
            axes.set_ylim(len(METHODS) - 0.5, -0.5)
            axes.margins(x=0.15)
        for heads, (colour, marker) in _HEADS.items():
            panels[0].plot([], [], marker, color=colour, label=heads_name(heads))
        figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
        figure.supxlabel(
            "perplexity of held-out text, lower is better; each panel has its own scale"
            f" (source {results.perplexity(results.source):.1f})",
            fontsize=9,
        )


def draw_uptraining(results: Results, path: Path) -> None:
    """Perplexity against the share of uptraining: the paper's way, and other ways."""
    mean = [(MHA, SOURCE, NEXT_TOKEN), (2, "mean", NEXT_TOKEN), (1, "mean", NEXT_TOKEN)]
    ours = [
        (1, "mean", NEXT_TOKEN), (1, "mean", DISTILLATION), (1, FITTED, NEXT_TOKEN),
        (1, FITTED, DISTILLATION), (2, FITTED, DISTILLATION),
    ]  # fmt: skip
    with new_figure(path, (8.4, 3.9)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        _curves(results, left, mean, (GREEN, ORANGE, BLUE))
        _curves(results, right, ours, (BLUE, SKY, PINK, BLACK, ORANGE))
        left.set_title("as in the paper: mean, next-token loss", fontsize=10)
        right.set_title("calibrated starts, distillation", fontsize=10)
        left.set_ylabel("perplexity of held-out text")
        figure.supxlabel("uptraining, % of the tokens of pretraining", fontsize=9)


def _curves(
    results: Results, axes: Axes, wanted: Sequence[tuple[int, str, str]], colours: Sequence[str]
) -> None:
    for number, (heads, start, loss) in enumerate(wanted):
        curve = results.curve(heads, start, loss)
        if not curve:
            continue
        label = f"{heads_name(heads)}"
        if start not in (SOURCE, "mean") or len(wanted) > 3:
            label += f", {start}"
        if loss == DISTILLATION:
            label += ", distilled"
        label += " trained on" if start == SOURCE else ""
        axes.plot(
            [100 * share for share in curve], [results.perplexity(p) for p in curve.values()],
            LINES[number % len(LINES)], color=colours[number], marker=MARKERS[number],
            markersize=5, label=label,
        )  # fmt: skip
    source = results.perplexity(results.source)
    axes.axhline(source, color="#7f7f7f", linestyle=":", label=f"source ({source:.1f})")
    _plain_log(axes)
    axes.set_xticks([0, 1, 2, 5, 10])
    axes.legend(frameon=False, fontsize=8)


def draw_groups(results: Results, path: Path) -> None:
    """Time of a decoding step, and perplexity, against the number of KV heads."""
    short, long = sorted(results.content["protocol"]["bench_contexts"])
    places = {1: 0, 2: 1, 4: 2, MHA: 3}
    with new_figure(path, (8.4, 3.6)) as figure:
        left, right = figure.subplots(1, 2)
        for number, context in enumerate((long, short)):
            rows = results.timing_rows(context)
            if not rows:
                continue
            middle = [1e3 * row["median_s"] for row in rows]
            spread = [
                [1e3 * (row["median_s"] - row["min_s"]) for row in rows],
                [1e3 * (row["max_s"] - row["median_s"]) for row in rows],
            ]
            left.errorbar(
                [places[row["kv_heads"]] for row in rows], middle, yerr=spread, capsize=3,
                color=COLOURS[number], marker=MARKERS[number], label=f"{context:,} tokens cached",
            )  # fmt: skip
        rows = results.timing_rows(long)
        if rows:
            rate = results.content["timing"]["bandwidth"]
            bound = [1e3 * (row["read_bytes"] + row["cache_bytes"]) / rate for row in rows]
            left.plot(
                [places[row["kv_heads"]] for row in rows], bound, ":", color="#7f7f7f",
                label=f"reading {long:,} tokens at {rate / 1e9:.3g} GB/s",
            )  # fmt: skip
            left.set_title(f"decoding, batch {rows[0]['batch']}", fontsize=10)
            left.legend(frameon=False, fontsize=8, loc="upper left")
        left.set_ylim(0, 1.25 * left.get_ylim()[1])  # room for the legend
        left.set_ylabel("ms a step, median, min to max")
        lines = [("mean", 0.0), ("svd", 0.0), (FITTED, 0.0), ("mean", MAIN)]
        for number, (start, share) in enumerate(lines):
            points = {h: results.get(h, start, share) for h in (1, 2, 4)}
            made: dict[int, Point] = {h: p for h, p in points.items() if p is not None}
            whole = results.get(MHA, SOURCE, share)
            if whole is not None and start == "mean":
                made[MHA] = whole
            label = f"{start}, " + (f"{percent(share)} uptraining" if share else "no uptraining")
            right.plot(
                [places[h] for h in made], [results.perplexity(p) for p in made.values()],
                LINES[number % len(LINES)], color=COLOURS[number], marker=MARKERS[number],
                markersize=5, label=label,
            )  # fmt: skip
        source = results.perplexity(results.source)
        right.axhline(source, color="#7f7f7f", linestyle=":", label=f"source ({source:.1f})")
        _plain_log(right)
        right.set_ylabel("perplexity of held-out text")
        right.set_title("quality", fontsize=10)
        right.set_ylim(top=3 * right.get_ylim()[1])
        right.legend(frameon=False, fontsize=8, loc="upper right")
        for axes in (left, right):
            names = [f"{h}\n{heads_name(h)}" for h in places]
            axes.set_xticks(list(places.values()), names)
        figure.supxlabel("KV heads", fontsize=9)


def _plain_log(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
