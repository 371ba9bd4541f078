"""What all figures share: colours, axes with units, and files that come out the same every time.

Colours are those of Okabe and Ito, which colour-blind readers tell apart; lines also differ by
marker, so that they survive a black-and-white printer. matplotlib is imported when a figure is
drawn.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqaconvert.errors import UsageError
from gqaconvert.units import format_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")
INK = "#1a1b1c"
"""What is written and drawn in no colour of its own. A page puts the reader's text colour here."""
PAPER = "#fefdfc"
"""What hides lines behind a label. A page puts its ground here."""

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "gqaconvert",
    "axes.grid": True,
    "grid.alpha": 0.3,
    # Names of models are not formulas.
    "text.parse_math": False,
}
_PAGE_STYLE: dict[Any, Any] = {
    **_STYLE,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK
    ),
    "grid.color": INK,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.7,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.labelsize": 9.0,
    "axes.titlesize": 9.0,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 5.5,
    # Letters stay letters: they can be searched, read aloud, and take the page's colour.
    "svg.fonttype": "none",
}

_SUFFIXES = (".svg", ".png", ".pdf")


def style(number: int) -> tuple[str, str]:
    """Return colour and marker of the n-th of several things."""
    return COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]


def check_figure_name(path: Path) -> None:
    """Refuse a name that no figure can be saved under, before anything is measured.

    Raises:
        UsageError: its ending is not .svg, .png or .pdf.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise UsageError(
            f"{path.suffix or 'no ending'} is no kind of figure",
            at=str(path),
            remedy="a name ending in .svg, .png or .pdf",
        )


@contextmanager
def new_figure(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Give a figure to draw on and save it; SVG comes out the same every time."""
    check_figure_name(path)
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"CreationDate": None} if path.suffix.lower() == ".pdf" else {"Date": None}
        figure.savefig(path, dpi=160, metadata=None if path.suffix.lower() == ".png" else metadata)


def draw_svg(draw: Callable[[Figure], None], size: tuple[float, float]) -> str:
    """Draw a figure for a page, and return its SVG: no ground, `INK` for lines and letters.

    Args:
        draw: fills the figure.
        size: width and height in inches.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with mpl.rc_context(_PAGE_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        file = io.StringIO()
        # Metadata would be a date, and addresses of what defines its terms.
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
    return file.getvalue()


def format_tokens(tokens: int) -> str:
    """Tokens as they are written on axes: 512, 2k, 12.3k, 1M."""
    if tokens >= 1024**2:
        return f"{tokens / 1024**2:.3g}M"
    return f"{tokens / 1024:.3g}k" if tokens >= 1024 else str(tokens)


def token_axis(axes: Axes, contexts: Sequence[int]) -> None:
    """Put contexts on a logarithmic x axis, each with a tick."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(contexts), [format_tokens(context) for context in contexts])
    axes.minorticks_off()


def memory_axis(axes: Axes, *, horizontal: bool = False) -> None:
    """Make an axis logarithmic in bytes, with binary units."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    (axes.set_xscale if horizontal else axes.set_yscale)("log", base=2)
    axis = axes.xaxis if horizontal else axes.yaxis
    axis.set_major_locator(LogLocator(base=2, numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_memory(value)))


def plain_log_axis(axes: Axes) -> None:
    """Make the y axis logarithmic, with numbers as they are spoken."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
