"""`gqaconvert expand`: more KV heads that compute the same."""

from __future__ import annotations

from typing import Annotated

import typer

from gqaconvert.cli.conversion_options import (
    AsJson,
    DryRun,
    Hash,
    Model,
    Out,
    Overwrite,
    Resume,
    Revision,
    Workers,
)
from gqaconvert.cli.convert import report_conversion
from gqaconvert.cli.terminal import byte_progress


def expand_command(
    model: Model,
    out: Out = None,
    kv_heads: Annotated[
        int,
        typer.Option(
            min=1,
            help="KV heads wanted: a multiple of the model's that divides its query heads.",
            show_default=False,
        ),
    ] = ...,  # type: ignore[assignment]
    revision: Revision = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    workers: Workers = None,
    hash_files: Hash = False,
    as_json: AsJson = False,
) -> None:
    """Repeat KV heads: the exact reverse of pooling.

    For tests, and for tensor parallelism beyond the number of KV heads.
    """
    from gqaconvert.surgery.expand import expand

    with byte_progress("expanding") as progress:
        conversion = expand(
            model,
            out,
            num_kv_heads=kv_heads,
            revision=revision,
            dry_run=dry_run,
            resume=resume,
            overwrite=overwrite,
            workers=workers,
            hash_files=hash_files,
            progress=progress,
        )
    report_conversion(conversion, as_json=as_json)
