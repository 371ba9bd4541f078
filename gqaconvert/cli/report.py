"""`gqaconvert report`: saved results as one page, in HTML and Markdown, with figures and CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gqaconvert.cli.terminal import say, show_json


def report_command(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Run folders, or folders of evaluate, bench or sweep; several are compared.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Default: DIR/report; report for several.", show_default=False),
    ] = None,
    title: Annotated[
        str | None, typer.Option(help="Default: that of the run.", show_default=False)
    ] = None,
    cards: Annotated[
        bool,
        typer.Option(
            "--cards", help="Write the results into the model cards of the checkpoints, too."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a page of tables and figures; the same files give the same page."""
    from gqaconvert.reporting.report import report

    made = report(folders, out, title=title)
    written: list[Path] = []
    if cards:
        from gqaconvert.reporting.cards import write_cards

        written = [path for folder in folders for path in write_cards(folder)]
    if as_json:
        show_json({**made.to_json(), "cards": [str(path) for path in written]})
    else:
        for path in made.paths[:2]:
            typer.echo(str(path))
    for caution in made.warnings:
        say(f"note: {caution}")
    for path in written:
        say(f"wrote {path}")
    if cards and not written:
        say("note: no checkpoint of ours with results in these folders, so no card was written")
