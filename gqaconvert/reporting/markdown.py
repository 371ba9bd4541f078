"""A report as Markdown, with its figures as files beside it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from gqaconvert.reporting.document import Document, MadeBy
from gqaconvert.reporting.layout import Heading, LaidCell, LaidTable, lay_out, lay_out_caches

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$])")
_SPACES = re.compile(r"\s+")


def markdown_page(document: Document) -> str:
    """Write a report as Markdown.

    Args:
        document: what it says. Names in it are not trusted: all text is escaped.
    """
    parts = [f"# {plain(document.title)}"]
    for name, text in document.summaries:
        parts.append(f"**{plain(name)}.** {plain(text)}" if name else plain(text))
    main, caches = lay_out(document.table), lay_out_caches(document.caches)
    if main.groups:
        parts.append("## What was gained, and what it cost")
        parts.append("× and ÷ set a figure against the source. ± is a standard error.")
        parts += markdown_table(main, "Model")
    for number, figure in enumerate(document.figures, start=1):
        parts.append(f"## {plain(figure.title)}")
        parts += [
            f"![{plain(panel.title)}. {plain(panel.alt)}](figures/{panel.name}.svg)"
            for panel in figure.panels
        ]
        parts.append(f"**Figure {number}.** {plain(figure.caption)}")
        parts.append(f"<sub>{plain(figure.origin)}</sub>")
    if caches.groups:
        parts.append("## Cache kinds")
        parts += markdown_table(caches, "Cache")
    parts.append("## How these figures were made")
    if document.cautions:
        parts += ["### Cautions", _bullets(document.cautions)]
    for made in document.made_by:
        parts += _made(made, named=len(document.made_by) > 1)
    if document.absent:
        parts.append("### Figures that are not here")
        parts.append(_bullets(f"{title}: {reason}" for title, reason in document.absent))
    parts.append("Raw numbers are in `tables/`.")
    return "\n\n".join(parts) + "\n"


def markdown_table(laid: LaidTable, first: str) -> list[str]:
    """Write a laid-out table and its footnotes.

    Args:
        laid: the table.
        first: heading of the first column.
    """
    lines = [
        f"| {first} | " + " | ".join(_heading(heading) for heading in laid.headings) + " |",
        "|---|" + "---:|" * len(laid.headings),
    ]
    for group, rows in laid.groups:
        if group:
            lines.append(f"| **{plain(group)}** |" + " |" * len(laid.headings))
        for row in rows:
            title = plain(row.title) + (f"<br>{plain(row.below)}" if row.below else "")
            lines.append(f"| {title} | " + " | ".join(_cell(cell) for cell in row.cells) + " |")
    notes = "\n".join(f"{number}. {plain(text)}" for number, text in enumerate(laid.notes, 1))
    return ["\n".join(lines), notes] if notes else ["\n".join(lines)]


def plain(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", _SPACES.sub(" ", text).strip().replace("&", "&amp;"))


def _heading(heading: Heading) -> str:
    unit = f"<br>{plain(heading.unit)}" if heading.unit else ""
    return f"{plain(heading.text)}{_note(heading.note)}{unit}"


def _cell(cell: LaidCell) -> str:
    aside = f" ({plain(cell.aside)})" if cell.aside else ""
    return f"{plain(cell.text)}{aside}{_note(cell.note)}"


def _note(number: int | None) -> str:
    return f"<sup>{number}</sup>" if number else ""


def _made(made: MadeBy, *, named: bool) -> list[str]:
    parts = [f"### {plain(made.run)}"] if named else []
    if made.command:
        parts.append(f"All of it: {_code(made.command)}")
    if made.stages:
        lines = ["| Stage | Outcome | Time | Command |", "|---|---|---|---|"]
        lines += [
            f"| {plain(stage.name)} | {plain(stage.outcome)} | {stage.time} |"
            f" {_code(stage.command)} |"
            for stage in made.stages
        ]
        parts.append("\n".join(lines))
    if made.facts:
        parts.append(_bullets(f"{name}: {text}" for name, text in made.facts))
    return parts


def _code(text: str) -> str:
    # A bar would end a cell of a table even inside code.
    fenced = _SPACES.sub(" ", text).replace("|", "\\|")
    return f"``{fenced}``" if "`" in fenced else f"`{fenced}`"


def _bullets(texts: Iterable[str] | Sequence[str]) -> str:
    return "\n".join(f"- {plain(text)}" for text in texts)
