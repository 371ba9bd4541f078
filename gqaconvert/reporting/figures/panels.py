"""What the figures of a report are made of: panels a narrow window can show, and words to them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gqaconvert.figure_style import draw_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.6
"""Inches of a panel: letters are still readable when it fills a telephone."""
HEIGHT = 3.5
_LINE = 62
"""Characters that a line of the legend has room for, marks included."""

_ROW = 0.17


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    Attributes:
        name: of its file.
        title: what it is, in few words.
        alt: what it shows, for those who do not see it.
        svg: see `figure_style.draw_svg`.
    """

    name: str
    title: str
    alt: str
    svg: str


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """Panels that belong together.

    Attributes:
        name: of the figure, as a link to it.
        title: above it.
        caption: what to see in it.
        origin: command and settings of what it shows.
        panels: its pictures.
    """

    name: str
    title: str
    caption: str
    origin: str
    panels: tuple[Panel, ...]


def panel(name: str, title: str, alt: str, draw: Callable[[Axes], None]) -> Panel:
    """Draw a panel of one pair of axes, with its legend above.

    Args:
        name: of its file.
        title: what it is.
        alt: what it shows.
        draw: on the axes it is given.
    """

    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        draw(axes)
        legend_above(figure, axes)

    return Panel(name, title, alt, draw_svg(fill, (WIDTH, HEIGHT)))


def legend_above(figure: Figure, axes: Axes) -> None:
    """Put the legend above the axes, where it hides nothing, in as many columns as fit."""
    handles, names = axes.get_legend_handles_labels()
    if legend := axes.get_legend():
        legend.remove()
    if not handles:
        return
    names = [textwrap.fill(name, _LINE) for name in names]
    lines = [line for name in names for line in name.splitlines()]
    columns = max(1, min(len(names), _LINE // (max(map(len, lines)) + 6)))
    rows = -(-len(lines) // columns)
    # A long legend makes the picture higher, not the axes lower.
    figure.set_size_inches(WIDTH, HEIGHT + _ROW * max(0, rows - 2))
    figure.legend(
        handles, names, loc="outside upper left", ncols=columns, handlelength=1.8,
        columnspacing=1.2, borderpad=0.2,
    )  # fmt: skip
