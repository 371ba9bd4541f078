"""A report as one HTML page that needs nothing else: style and figures are inside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from gqaconvert.reporting.document import Document
from gqaconvert.reporting.layout import lay_out, lay_out_caches
from gqaconvert.reporting.svg import inline

_TEMPLATES = Path(__file__).parent / "templates"


_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|[kMGT]?B|%|m?s|nats)\b|%)")


def tight(text: str) -> str:
    """Keep a number and its unit on one line."""
    return _UNIT.sub("\N{NO-BREAK SPACE}", text)


def html_page(document: Document) -> str:
    """Write a report as HTML.

    Args:
        document: what it says. Names in it are not trusted: all text is escaped.
    """
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["tight"] = tight
    figures = [
        replace(
            figure,
            panels=tuple(
                # Drawn here, with its texts escaped.
                replace(panel, svg=Markup(inline(panel.svg, f"p-{panel.name}", panel.title,
                                                 panel.alt)))
                for panel in figure.panels
            ),
        )
        for figure in document.figures
    ]  # fmt: skip
    return environment.get_template("report.html.j2").render(
        document=document,
        main=lay_out(document.table),
        caches=lay_out_caches(document.caches),
        figures=figures,
        css=Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
    )
