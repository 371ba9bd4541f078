"""What all figures share: colours, axes with units, and files that come out the same every time.

Colours are those of Okabe and Ito, which colour-blind readers tell apart; lines also differ by
marker, so that they survive a black-and-white printer. matplotlib is imported when a figure is
drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gqaconvert.errors import UsageError
from gqaconvert.units import format_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")

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

    with mpl.rc_context({"svg.hashsalt": "gqaconvert", "axes.grid": True, "grid.alpha": 0.3}):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"CreationDate": None} if path.suffix.lower() == ".pdf" else {"Date": None}
        figure.savefig(path, dpi=160, metadata=None if path.suffix.lower() == ".png" else metadata)


def format_tokens(tokens: int) -> str:
    """Tokens as they are written on axes: 512, 2k, 12.3k."""
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
