"""Makes a report of saved files: Markdown, HTML, figures and tables, whole or not at all.

The same files give the same bytes: there is no clock, no machine and no model in here.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gqaconvert.errors import RefusedError, UsageError
from gqaconvert.reporting.document import make_document
from gqaconvert.reporting.html import html_page
from gqaconvert.reporting.markdown import markdown_page
from gqaconvert.reporting.saved import SavedRun, read_run
from gqaconvert.reporting.spreadsheets import spreadsheets
from gqaconvert.reporting.svg import standalone

PAGE = "report.html"
_MARK = '<meta name="generator" content="gqaconvert">'


@dataclass(frozen=True, slots=True)
class Report:
    """What was written.

    Attributes:
        folder: of the report.
        paths: of its files, the pages first.
        warnings: what a reader should know before trusting its figures.
    """

    folder: Path
    paths: tuple[Path, ...]
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of plain values."""
        return {
            "folder": str(self.folder),
            "paths": [str(path) for path in self.paths],
            "warnings": list(self.warnings),
        }


def report(
    dirs: Sequence[str | Path], out: str | Path | None = None, *, title: str | None = None
) -> Report:
    """Make a report on one run, or a comparison of several.

    Args:
        dirs: run folders, or folders of `evaluate`, `bench` or `sweep`.
        out: where to; an earlier report there is replaced. `DIR/report` by default, `report` where
            there are several.
        title: heading; that of the run by default.

    Raises:
        UsageError: a folder that does not exist, or holds nothing to report on.
        CheckpointError: a file in it is damaged.
        RefusedError: `out` holds something that is not a report.
    """
    folders = [Path(folder) for folder in dirs]
    if not folders:
        raise UsageError("no folder to report on", remedy="gqaconvert report runs/NAME")
    if out is None:
        out = folders[0] / "report" if len(folders) == 1 else Path("report")
    target = Path(out)
    check_target(target)
    runs = _named_apart([read_run(folder) for folder in folders], folders)
    document = make_document(runs, title)
    files = {"report.md": markdown_page(document), PAGE: html_page(document)}
    for figure in document.figures:
        for panel in figure.panels:
            svg = standalone(panel.svg, panel.title, panel.alt)
            files[f"figures/{panel.name}.svg"] = svg
    for name, text in spreadsheets(document, runs).items():
        files[f"tables/{name}"] = text
    write_whole(target, files)
    return Report(target, tuple(target / name for name in files), document.cautions)


def check_target(target: Path) -> None:
    """Refuse to put a report where something else is.

    Raises:
        RefusedError: a file, or a folder that holds something else than a report.
    """
    if not target.exists() and not target.is_symlink():
        return
    if target.is_dir() and (not any(target.iterdir()) or _is_report(target)):
        return
    raise RefusedError(
        "this holds something that is not a report; it is kept",
        at=str(target),
        remedy="another --out",
    )


def write_whole(target: Path, files: dict[str, str]) -> None:
    """Write a folder that appears complete; an earlier one stands until then.

    Args:
        target: the folder.
        files: path inside it → text.
    """
    staged = target.parent / f".{target.name}.partial"
    replaced = target.parent / f".{target.name}.replaced"
    if replaced.exists() and not target.exists():
        replaced.rename(target)  # an earlier process died between two renames
    shutil.rmtree(staged, ignore_errors=True)
    for name, text in files.items():
        path = staged / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        target.rename(replaced)
    staged.rename(target)
    shutil.rmtree(replaced, ignore_errors=True)


def _is_report(folder: Path) -> bool:
    page = folder / PAGE
    return page.is_file() and _MARK in page.read_text(encoding="utf-8", errors="replace")


def _named_apart(runs: Sequence[SavedRun], folders: Sequence[Path]) -> list[SavedRun]:
    """Call runs of one recipe by their folders, and number those that this does not tell apart."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [folder.resolve().name for folder in folders]
    found: list[SavedRun] = []
    for run, plain in zip(runs, names, strict=True):
        number, name = 1, plain
        while name in {each.name for each in found}:
            number += 1
            name = f"{plain} ({number})"
        found.append(replace(run, name=name))
    return found
