"""Turns a drawn figure into one for a page and one for a file of its own.

A page lends it the reader's colours and must not meet the same id twice; a file needs a white
ground and a title.
"""

from __future__ import annotations

import re
from html import escape

from gqaconvert.figure_style import COLOURS, INK, PAPER

_FONT = "'DejaVu Sans', Verdana, sans-serif"
_HEAD = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_TAG = re.compile(r"<svg\b[^>]*>", re.DOTALL)
_VIEW = re.compile(r'viewBox="([^"]*)"')
_ID = re.compile(r'\bid="([^"]+)"')
_USED = re.compile(r'(?:url\(#|href="#)([^")]+)')
_BLACK = COLOURS[-1]


def inline(svg: str, name: str, title: str, alt: str) -> str:
    """Return SVG to put into HTML: in the colours of the page, with ids of its own.

    Args:
        svg: as drawn, see `figure_style.draw_svg`.
        name: of the figure, unlike that of any other on the page.
        title: its name for those who do not see it.
        alt: what it shows.
    """
    drawn = _own_ids(_bare(svg), name)
    for colour in (INK, _BLACK):
        drawn = drawn.replace(colour, "currentColor")
    drawn = drawn.replace(PAPER, "var(--ground)")
    opening = (
        f'<svg viewBox="{_view(svg)}" role="img" aria-labelledby="{name}-title {name}-alt">'
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-alt">{escape(alt)}</desc>'
    )
    # HTML knows these names without being told.
    return _TAG.sub(lambda _: opening, drawn, count=1).replace("xlink:href", "href")


def standalone(svg: str, title: str, alt: str) -> str:
    """Return SVG for a file: on white, with a title.

    Args:
        svg: as drawn, see `figure_style.draw_svg`.
        title: its name.
        alt: what it shows.
    """
    view = _view(svg)
    width, height = view.split()[2:]
    opening = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        f' width="{width}pt" height="{height}pt" viewBox="{view}" role="img">\n'
        f"<title>{escape(title)}</title>\n<desc>{escape(alt)}</desc>\n"
        '<rect width="100%" height="100%" fill="#ffffff"/>'
    )
    drawn = _TAG.sub(lambda _: opening, _bare(svg), count=1)
    return drawn.replace(PAPER, "#ffffff").strip() + "\n"


def _bare(svg: str) -> str:
    return _HEAD.sub("", svg, count=1).replace("'DejaVu Sans'", _FONT)


def _view(svg: str) -> str:
    found = _VIEW.search(svg)
    return found[1] if found else "0 0 360 270"


def _own_ids(svg: str, name: str) -> str:
    used = set(_USED.findall(svg))
    svg = _ID.sub(lambda m: f'id="{name}-{m[1]}"' if m[1] in used else "", svg)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
