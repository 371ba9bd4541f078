"""Cache bytes and time per token against context, from what `bench` saved.

Two panels, each drawn on axes it is given: `draw_bench` puts both into one file, a report lets them
stand beside one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqaconvert.errors import UsageError
from gqaconvert.figure_style import (
    INK,
    LINES,
    PAPER,
    format_tokens,
    memory_axis,
    new_figure,
    plain_log_axis,
    style,
    token_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Looks = Mapping[str, tuple[str, str]]
"""Label of a row → its colour and marker."""


def draw_bench(content: Mapping[str, Any], path: Path) -> None:
    """Draw cache bytes and time per token against context, with the knee of each model marked.

    Args:
        content: of `bench.json`.
        path: ending in .svg, .png or .pdf.

    Raises:
        UsageError: another ending, or nothing was measured.
    """
    if not timed_rows(content):
        raise UsageError("no decoding was measured; there is nothing to draw")
    looks = {label: style(number) for number, label in enumerate(bench_labels(content))}
    with new_figure(path, (7.0, 6.4)) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True)
        draw_cache_bytes(top, content, looks)
        draw_latency(bottom, content, looks)
        top.set_xlabel("")
        # The panel above names the models.
        handles, names = bottom.get_legend_handles_labels()
        bottom.legend(
            handles[-1:], names[-1:], frameon=False, fontsize=8, loc="upper left"
        )  # fmt: skip
        figure.suptitle(_title(content), fontsize=10)


def timed_rows(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows in which decoding was measured."""
    return [row for row in content["rows"] if row["decode"]]


def bench_labels(content: Mapping[str, Any]) -> list[str]:
    """Models and cache kinds, in the order of rows."""
    return list(dict.fromkeys(row["label"] for row in content["rows"]))


def draw_cache_bytes(
    axes: Axes, content: Mapping[str, Any], looks: Looks, names: Mapping[str, str] | None = None
) -> None:
    """Draw bytes of the cache against context, and the bytes of weights that a step reads.

    Args:
        axes: to draw on.
        content: of `bench.json`.
        looks: of each label.
        names: to write instead of labels.
    """
    contexts = _contexts(content)
    for label, name, batch, line, points in _lines(content, names or {}):
        colour, marker = looks[label]
        x = [row["context"] for row in points]
        y = [row["cache_bytes"] for row in points]
        axes.plot(x, y, label=name, color=colour, marker=marker, linestyle=line)
        knee = _knee(content, label, batch)
        if knee is not None and _is_near(knee, contexts):
            axes.axvline(knee, color=colour, linestyle=(0, (1, 2)), linewidth=1.2)
            number = list(looks).index(label)
            _write_knee(axes, knee, colour, number, at_end=knee > 0.7 * contexts[-1])
    models = {row["label"]: row["model"] for row in content["rows"]}
    widest = 0
    for facts in content["models"]:
        owner = next((each for each, model in models.items() if model == facts["name"]), None)
        if owner is None:
            continue
        widest = max(widest, facts["read_bytes"])
        axes.axhline(facts["read_bytes"], color=looks[owner][0], linewidth=1, alpha=0.5)
    axes.annotate(
        "weights read in a step", (contexts[0], widest), (0, 3), textcoords="offset points",
        fontsize=8, va="bottom",
    )  # fmt: skip
    token_axis(axes, contexts)
    memory_axis(axes)
    axes.set_ylabel("KV cache")
    axes.set_xlabel("context, tokens")
    axes.legend(frameon=False, fontsize=8)


def draw_latency(
    axes: Axes, content: Mapping[str, Any], looks: Looks, names: Mapping[str, str] | None = None
) -> None:
    """Draw milliseconds per token against context, with least and most, and the bound.

    Args:
        axes: to draw on.
        content: of `bench.json`.
        looks: of each label.
        names: to write instead of labels.
    """
    contexts = _contexts(content)
    for label, name, batch, line, points in _lines(content, names or {}):
        colour, marker = looks[label]
        x = [row["context"] for row in points]
        times = [row["decode"] for row in points]
        middle = [1e3 * each["median_s"] for each in times]
        below = [1e3 * (each["median_s"] - each["min_s"]) for each in times]
        above = [1e3 * (each["max_s"] - each["median_s"]) for each in times]
        axes.plot(x, middle, color=colour, marker=marker, linestyle=line, label=name)
        axes.errorbar(x, middle, (below, above), capsize=3, color=colour, linestyle="none")
        bounded = [row for row in points if row["bound_tokens_per_s"]]
        axes.plot(
            [row["context"] for row in bounded],
            [1e3 * row["batch"] / row["bound_tokens_per_s"] for row in bounded],
            color=colour, linestyle=":", linewidth=1,
        )  # fmt: skip
        knee = _knee(content, label, batch)
        if knee is not None and _is_near(knee, contexts):
            axes.axvline(knee, color=colour, linestyle=(0, (1, 2)), linewidth=1.2)
    bandwidth = content["bandwidth"]["bytes_per_s"] / 1e9
    bound = f"bound at {bandwidth:.3g} GB/s, measured in this run"
    axes.plot([], [], color=INK, linestyle=":", linewidth=1, label=bound)
    token_axis(axes, contexts)
    plain_log_axis(axes)
    axes.set_ylabel("time per token, ms")
    axes.set_xlabel("context, tokens")


def bench_conditions(content: Mapping[str, Any]) -> str:
    """Where and how was measured, in one line."""
    machine = content["machine"]
    threads = machine["threads"]
    cpu = f"{threads} CPU thread{'s' * (threads > 1)}"
    where = cpu if content["device"] == "cpu" else machine["gpu"]
    dtypes = ", ".join(dict.fromkeys(facts["dtype"] for facts in content["models"]))
    attn = ", ".join(dict.fromkeys(facts["attn"] for facts in content["models"]))
    return (
        f"Decoding on {where} in {dtypes}, {attn} attention: median of"
        f" {content['settings']['repeats']}, bars min to max"
    )


def _contexts(content: Mapping[str, Any]) -> list[int]:
    return sorted({row["context"] for row in timed_rows(content)})


def _lines(
    content: Mapping[str, Any], names: Mapping[str, str]
) -> list[tuple[str, str, int, str, Sequence[Mapping[str, Any]]]]:
    """Label, name, batch, line style and rows of each line to draw."""
    rows = timed_rows(content)
    batches = sorted({row["batch"] for row in rows})
    lines: list[tuple[str, str, int, str, Sequence[Mapping[str, Any]]]] = []
    for label in bench_labels(content):
        for number, batch in enumerate(batches):
            points = [row for row in rows if row["label"] == label and row["batch"] == batch]
            name = names.get(label, label)
            name = name if len(batches) == 1 else f"{name}, batch {batch}"
            if points:
                lines.append((label, name, batch, LINES[number % len(LINES)], points))
    return lines


def _knee(content: Mapping[str, Any], label: str, batch: int) -> int | None:
    for knee in content["knees"]:
        if knee["label"] == label and knee["batch"] == batch:
            tokens: int | None = knee["tokens"]
            return tokens
    return None


def _is_near(knee: int, contexts: Sequence[int]) -> bool:
    return contexts[0] / 2 <= knee <= 2 * contexts[-1]


def _write_knee(axes: Axes, knee: int, colour: str, number: int, *, at_end: bool) -> None:
    # Low, where the curves are not; labels of several stand above one another.
    axes.annotate(
        f"knee {format_tokens(knee)}",
        (knee, 0.03 + 0.08 * (number % 4)),
        xycoords=("data", "axes fraction"),
        xytext=(-3 if at_end else 3, 0),
        textcoords="offset points",
        ha="right" if at_end else "left",
        color=colour,
        fontsize=8,
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.8},
    )


def _title(content: Mapping[str, Any]) -> str:
    return (
        f"{bench_conditions(content)}\n"
        "knee: reading the cache takes as long as reading the weights, by bytes"
    )
