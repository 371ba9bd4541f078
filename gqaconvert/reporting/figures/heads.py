"""How alike the KV heads of each layer are, from what `inspect --heads` saved: heat maps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqaconvert.figure_style import PAPER, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED_PAIRS = 6
_ROLES = ("keys", "values")


def draw_heads(content: Mapping[str, Any], path: Path) -> None:
    """Draw how alike heads are: a row a layer, a column a pair of heads, nearest pairs first.

    Args:
        content: of `inspect --heads --json`.
        path: ending in .svg, .png or .pdf.

    Raises:
        UsageError: another ending.
    """
    with new_figure(path, (9.6, heads_height(content))) as figure:
        fill_heads(figure, content, roles_of(content))
        figure.suptitle(f"How alike the KV heads of {content['model']} are", fontsize=10)


def heads_height(content: Mapping[str, Any]) -> float:
    """Inches that the layers need."""
    return min(9.0, max(2.9, 1.7 + 0.16 * len(content["layers"])))


def roles_of(content: Mapping[str, Any]) -> list[str]:
    """Of "keys" and "values", those that any layer has."""
    return [role for role in _ROLES if any(layer[role] for layer in content["layers"])]


def fill_heads(figure: Figure, content: Mapping[str, Any], roles: Sequence[str]) -> None:
    """Draw two maps for each role: the heads as they are, and turned towards one another.

    Args:
        figure: to draw on.
        content: of `inspect --heads --json`.
        roles: some of `roles_of`; all maps share one scale of colours, whichever are drawn.
    """
    layers = content["layers"]
    pairs = _pairs(max(layer["kv_heads"] for layer in layers))
    low, high = _range(layers, pairs)
    panels = [(role, kind) for role in roles for kind in ("raw", "aligned")]
    row_of_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    image = None
    for axes, (role, kind) in zip(row_of_axes, panels, strict=True):
        grid = _grid(layers, role, kind, pairs)
        image = axes.imshow(
            grid, aspect="auto", cmap="viridis", vmin=low, vmax=high, interpolation="nearest"
        )
        title = f"{role}, {'as they are' if kind == 'raw' else 'aligned'}"
        chance = [layer[role]["chance"] for layer in layers if layer[role]]
        if kind == "aligned":
            title += f"\n(noise reaches {sum(chance) / len(chance):.2f})"
        axes.set_title(title, fontsize=9)
        _pair_axis(axes, pairs)
    numbers = layer_numbers(layers)
    step = max(1, -(-len(numbers) // 16))
    places = list(range(0, len(numbers), step))
    row_of_axes[0].set_yticks(places, [numbers[place] for place in places])
    row_of_axes[0].set_ylabel("layer")
    if image is not None:
        figure.colorbar(image, ax=list(row_of_axes), label="cosine of weights, no unit")
    few = len(pairs) <= _NAMED_PAIRS
    figure.supxlabel(
        "pairs of KV heads" if few else "pairs of KV heads, by how far apart they are", fontsize=9
    )


def layer_numbers(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to call each layer: its number, or its place where it has none."""
    return [
        str(place if layer["layer"] is None else layer["layer"])
        for place, layer in enumerate(layers)
    ]


def _range(
    layers: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[int, int]]
) -> tuple[float, float]:
    finite = [
        value
        for role in _ROLES
        for kind in ("raw", "aligned")
        for row in _grid(layers, role, kind, pairs)
        for value in row
        if not math.isnan(value)
    ]
    low, high = min(0.0, min(finite)), max(0.1, math.ceil(10 * max(finite)) / 10)
    return 0.0 if low > -0.05 else math.floor(10 * low) / 10, high


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
            axes.axvline(span[0] - 0.5, color=PAPER, linewidth=0.6)
        if middle - reached >= len(pairs) / 9:
            places.append(middle)
            names.append(str(apart))
            reached = middle
    axes.set_xticks(places, names)
