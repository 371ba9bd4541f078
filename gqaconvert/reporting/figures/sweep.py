"""Quality kept against bytes of the KV cache, from what `sweep` saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqaconvert.figure_style import memory_axis, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        + (", spread over it" if settings.get("spread") else "")
    )
