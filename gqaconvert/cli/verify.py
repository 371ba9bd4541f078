"""`gqaconvert verify`: proof that an output is what its conversion promised."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gqaconvert.cli.terminal import byte_progress, say, show_json


def verify_command(
    out: Annotated[
        Path, typer.Argument(help="A folder that convert or expand wrote.", show_default=False)
    ],
    source: Annotated[
        str | None,
        typer.Option(help="What it was made from: folder, Hub id or alias.", show_default=False),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a Hub source.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Compare every untouched byte and file with the source.")
    ] = False,
    forward: Annotated[
        bool,
        typer.Option(
            "--forward",
            help="Load the model: finite logits, cached = uncached, shape of the cache.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Prove that an output is what its conversion promised.

    Headers, shapes, hashes, copied and pooled tensors, and that the model class takes them all.
    """
    from gqaconvert.surgery.verify_model import verify

    with byte_progress("comparing") as progress:
        verification = verify(
            out, source, revision=revision, deep=deep, forward=forward, progress=progress
        )
    if as_json:
        checks = {check.name: check.covered for check in verification.checks}
        show_json({"out": str(out), "verified": True, "checks": checks})
        return
    for check in verification.checks:
        typer.echo(f"ok  {check.name}: {check.covered}")
    if source is None:
        say("note: without --source, only the output and its manifest were checked")
