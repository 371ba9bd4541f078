"""Figures from saved results: each a pure function of one JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqaconvert.errors import UsageError
from gqaconvert.figure_style import (
    LINES,
    format_tokens,
    memory_axis,
    new_figure,
    plain_log_axis,
    style,
    token_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NAMED_PAIRS = 6


def draw_bench(content: Mapping[str, Any], path: Path) -> None:
    """Draw cache bytes and time per token against context, with the knee of each model marked.

    Args:
        content: of `bench.json`.
        path: ending in .svg, .png or .pdf.

    Raises:
        UsageError: another ending, or nothing was measured.
    """
    rows = [row for row in content["rows"] if row["decode"]]
    if not rows:
        raise UsageError("no decoding was measured; there is nothing to draw")
    labels = list(dict.fromkeys(row["label"] for row in content["rows"]))
    batches = sorted({row["batch"] for row in rows})
    with new_figure(path, (7.0, 6.4)) as figure:
        top, bottom = figure.subplots(2, 1, sharex=True)
        contexts = sorted({row["context"] for row in rows})
        for number, label in enumerate(labels):
            colour, marker = style(number)
            for batch in batches:
                line = LINES[batches.index(batch) % len(LINES)]
                points = [row for row in rows if row["label"] == label and row["batch"] == batch]
                if not points:
                    continue
                x = [row["context"] for row in points]
                knee = _knee(content, label, batch)
                look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": line}
                name = label if len(batches) == 1 else f"{label}, batch {batch}"
                top.plot(x, [row["cache_bytes"] for row in points], label=name, **look)
                middle = [1e3 * row["decode"]["median_s"] for row in points]
                below = [1e3 * (r["decode"]["median_s"] - r["decode"]["min_s"]) for r in points]
                above = [1e3 * (r["decode"]["max_s"] - r["decode"]["median_s"]) for r in points]
                bottom.errorbar(x, middle, (below, above), capsize=3, label=name, **look)
                bounds = [1e3 * row["batch"] / row["bound_tokens_per_s"] for row in points]
                bottom.plot(x, bounds, color=colour, linestyle=":", linewidth=1)
                if knee is not None and contexts[0] / 2 <= knee <= 2 * contexts[-1]:
                    _mark_knee(top, bottom, knee, colour, number, knee > 0.7 * contexts[-1])
        models = {row["label"]: row["model"] for row in content["rows"]}
        for facts in content["models"]:
            number = [models[label] for label in labels].index(facts["name"])
            colour = style(number)[0]
            top.axhline(facts["read_bytes"], color=colour, linewidth=1, alpha=0.5)
        widest = max(facts["read_bytes"] for facts in content["models"])
        top.annotate(
            "weights read in a step", (contexts[0], widest), (0, 3), textcoords="offset points",
            fontsize=8, va="bottom",
        )  # fmt: skip
        token_axis(bottom, contexts)
        memory_axis(top)
        plain_log_axis(bottom)
        top.set_ylabel("KV cache")
        bottom.set_ylabel("time per token, ms")
        bottom.set_xlabel("context, tokens")
        top.legend(frameon=False, fontsize=8)
        bandwidth = content["bandwidth"]["bytes_per_s"] / 1e9
        (bound,) = bottom.plot([], [], color="black", linestyle=":", linewidth=1)
        bottom.legend(
            [bound], [f"bound at {bandwidth:.3g} GB/s, measured in this run"], frameon=False,
            fontsize=8, loc="upper left",
        )  # fmt: skip
        figure.suptitle(_bench_title(content), fontsize=10)


def draw_sweep(content: Mapping[str, Any], path: Path) -> None:
    """Draw quality kept, and agreement with the source, against bytes of the KV cache.

    Args:
        content: of `sweep.json`.
        path: ending in .svg, .png or .pdf.

    Raises:
        UsageError: another ending.
    """
    points = [point for point in content["points"] if point["quality"] is not None]
    source = next(point for point in points if point["kind"] == "source")
    conversions = [point for point in points if point["kind"] == "conversion"]
    methods = list(dict.fromkeys(point["method"] for point in conversions))
    caches = [p for p in points if p["kind"] == "cache" and p["cache_kind"] != "dynamic"]
    with new_figure(path, (9.6, 4.8)) as figure:
        left, right = figure.subplots(1, 2, sharex=True)
        for number, method in enumerate(methods):
            colour, marker = style(number)
            look: dict[str, Any] = {"color": colour, "marker": marker, "label": f"{method}"}
            line = [source, *(point for point in conversions if point["method"] == method)]
            line.sort(key=lambda point: -point["kv_bytes"])
            x = [point["kv_bytes"] for point in line]
            left.plot(x, [point["quality"] for point in line], **look)
            top1 = [1.0 if point is source else point["top1"] for point in line]
            error = [point["top1_stderr"] or 0.0 for point in line]
            right.errorbar(x, top1, error, capsize=3, **look)
        kinds = list(dict.fromkeys(point["cache_kind"] for point in caches))
        for number, kind in enumerate(kinds):
            colour, marker = style(number + len(methods))
            of_kind = [point for point in caches if point["cache_kind"] == kind]
            for converted in (False, True):
                shown = [point for point in of_kind if (point["method"] is not None) == converted]
                left.scatter(
                    [point["kv_bytes"] for point in shown],
                    [point["quality"] for point in shown],
                    s=55, marker=marker, edgecolors=colour, linewidths=1.4, zorder=3,
                    facecolors="none" if converted else colour,
                    label=kind if not converted else None,
                )  # fmt: skip
        for axes, label in (
            (left, "quality kept: source perplexity ÷ perplexity"),
            (right, "top-1 agreement with the source"),
        ):
            memory_axis(axes, horizontal=True)
            axes.set_ylim(-0.03, 1.08)
            axes.margins(x=0.08)
            axes.axhline(1.0, color="#7f7f7f", linewidth=1, linestyle="--")
            axes.set_ylabel(label)
            axes.set_xlabel(f"KV cache of one text of {source['kv_tokens']} tokens")
        handles, names = left.get_legend_handles_labels()
        figure.legend(
            handles, names, frameon=False, fontsize=8, title_fontsize=8, ncols=6,
            loc="outside lower center",
            title="lines: pooling; marks: cache kinds, filled on the source, hollow on conversions"
            if caches else "pooling",
        )  # fmt: skip
        _name_heads(right, [source, *conversions])
        figure.suptitle(_sweep_title(content), fontsize=10)


def draw_heads(content: Mapping[str, Any], path: Path) -> None:
    """Draw how alike heads are: a row a layer, a column a pair of heads, nearest pairs first.

    Args:
        content: of `inspect --heads --json`.
        path: ending in .svg, .png or .pdf.

    Raises:
        UsageError: another ending.
    """
    layers = content["layers"]
    panels = [
        (f"{role}, {'as they are' if kind == 'raw' else 'aligned'}", role, kind)
        for role in ("keys", "values")
        for kind in ("raw", "aligned")
        if any(layer[role] for layer in layers)
    ]
    pairs = _pairs(max(layer["kv_heads"] for layer in layers))
    grids = [_grid(layers, role, kind, pairs) for _, role, kind in panels]
    finite = [value for grid in grids for row in grid for value in row if not math.isnan(value)]
    low, high = min(0.0, min(finite)), max(0.1, math.ceil(10 * max(finite)) / 10)
    low = 0.0 if low > -0.05 else math.floor(10 * low) / 10
    height = min(9.0, max(2.9, 1.7 + 0.16 * len(layers)))
    with new_figure(path, (9.6, height)) as figure:
        row_of_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        image = None
        for axes, (title, role, kind), grid in zip(row_of_axes, panels, grids, strict=True):
            image = axes.imshow(
                grid, aspect="auto", cmap="viridis", vmin=low, vmax=high, interpolation="nearest"
            )
            chance = [layer[role]["chance"] for layer in layers if layer[role]]
            if kind == "aligned":
                title += f"\n(noise reaches {sum(chance) / len(chance):.2f})"
            axes.set_title(title, fontsize=9)
            _pair_axis(axes, pairs)
        numbers = [str(n if layer["layer"] is None else layer["layer"])
                   for n, layer in enumerate(layers)]  # fmt: skip
        step = max(1, -(-len(numbers) // 16))
        places = list(range(0, len(numbers), step))
        row_of_axes[0].set_yticks(places, [numbers[place] for place in places])
        row_of_axes[0].set_ylabel("layer")
        if image is not None:
            figure.colorbar(image, ax=list(row_of_axes), label="cosine of weights, no unit")
        few = len(pairs) <= _NAMED_PAIRS
        figure.supxlabel(
            "pairs of KV heads" if few else "pairs of KV heads, by how far apart they are",
            fontsize=9,
        )
        figure.suptitle(f"How alike the KV heads of {content['model']} are", fontsize=10)


def _knee(content: Mapping[str, Any], label: str, batch: int) -> int | None:
    for knee in content["knees"]:
        if knee["label"] == label and knee["batch"] == batch:
            tokens: int | None = knee["tokens"]
            return tokens
    return None


def _mark_knee(top: Axes, bottom: Axes, knee: int, colour: str, number: int, at_end: bool) -> None:
    for axes in (top, bottom):
        axes.axvline(knee, color=colour, linestyle=(0, (1, 2)), linewidth=1.2)
    # Low in the upper panel, where the curves are not; labels of several stand above one another.
    top.annotate(
        f"knee {format_tokens(knee)}",
        (knee, 0.03 + 0.08 * (number % 4)),
        xycoords=("data", "axes fraction"),
        xytext=(-3 if at_end else 3, 0),
        textcoords="offset points",
        ha="right" if at_end else "left",
        color=colour,
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )


def _bench_title(content: Mapping[str, Any]) -> str:
    machine, settings = content["machine"], content["settings"]
    threads = machine["threads"]
    cpu = f"{threads} CPU thread{'s' * (threads > 1)}"
    where = cpu if content["device"] == "cpu" else machine["gpu"]
    dtypes = ", ".join(dict.fromkeys(facts["dtype"] for facts in content["models"]))
    attn = ", ".join(dict.fromkeys(facts["attn"] for facts in content["models"]))
    return (
        f"Decoding on {where} in {dtypes}, {attn} attention: median of {settings['repeats']}, bars"
        " min to max\nknee: reading the cache takes as long as reading the weights, by bytes"
    )


def _name_heads(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    """Write the number of KV heads along the top."""
    heads = {point["kv_bytes"]: point["kv_heads"] for point in points}
    for size, count in heads.items():
        axes.annotate(
            f"{count} head{'s' * (count > 1)}", (size, 1.02), ha="center", fontsize=7,
            color="#555555", xycoords=("data", "data"),
        )  # fmt: skip


def _sweep_title(content: Mapping[str, Any]) -> str:
    settings = content["settings"]
    many = "all" if settings["windows"] is None else settings["windows"]
    return (
        f"{content['source']} after pooling, without training: {settings['text_name']},"
        f" {many} windows of {settings['context']} tokens"
    )


def _pairs(heads: int) -> list[tuple[int, int]]:
    return [(i, i + apart) for apart in range(1, heads) for i in range(heads - apart)]


def _grid(
    layers: Sequence[Mapping[str, Any]], role: str, kind: str, pairs: Sequence[tuple[int, int]]
) -> list[list[float]]:
    grid = []
    for layer in layers:
        matrix = layer[role][kind] if layer[role] else []
        grid.append([matrix[i][j] if j < len(matrix) else math.nan for i, j in pairs])
    return grid


def _pair_axis(axes: Axes, pairs: Sequence[tuple[int, int]]) -> None:
    """Name pairs where there are few; else how far apart they are, as often as is readable."""
    axes.grid(visible=False)
    if len(pairs) <= _NAMED_PAIRS:
        axes.set_xticks(range(len(pairs)), [f"{i}–{j}" for i, j in pairs])
        return
    spans: dict[int, list[int]] = {}
    for place, (i, j) in enumerate(pairs):
        spans.setdefault(j - i, []).append(place)
    places, names, reached = [], [], -math.inf
    for apart, span in spans.items():
        middle = (span[0] + span[-1]) / 2
        if span[0]:
            axes.axvline(span[0] - 0.5, color="white", linewidth=0.6)
        if middle - reached >= len(pairs) / 9:
            places.append(middle)
            names.append(str(apart))
            reached = middle
    axes.set_xticks(places, names)
