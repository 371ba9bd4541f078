"""Arguments and options that `convert` and `expand` have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gqaconvert.cli.completion import complete_model

Model = Annotated[
    str,
    typer.Argument(
        help="Folder, Hub id or alias.", autocompletion=complete_model, show_default=False
    ),
]
Out = Annotated[
    Path | None,
    typer.Argument(
        help="Output folder. Default: the model's name with -gqaN, -mqa or -mha.",
        show_default=False,
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with an interrupted run of the same options.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an output that gqaconvert wrote.")
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Threads. Default: four.", show_default=False),
]
Hash = Annotated[
    bool,
    typer.Option("--hash", help="Record SHA-256 of whole files too, which reads them once more."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
