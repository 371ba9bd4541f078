"""`gqaconvert calibrate`: the statistics that calibrated conversions need, once a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from gqaconvert.cli.completion import complete_model
from gqaconvert.cli.terminal import say, show_json
from gqaconvert.units import format_bytes


def calibrate_command(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder, Hub id or alias.", autocompletion=complete_model, show_default=False
        ),
    ],
    data: Annotated[
        str,
        typer.Option(
            help="bundled (its training split), a .txt, .md, .jsonl or .parquet file, or"
            " dataset:NAME:CONFIG:SPLIT; not what the model will be evaluated on.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write. Default: the model's name with .calibration.safetensors.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=2, help="To read, in windows spread over the text.")
    ] = 131072,
    context: Annotated[int, typer.Option(min=2, help="Tokens a window.")] = 512,
    statistics: Annotated[
        Literal["plain", "all"],
        typer.Option(help="Of the inputs alone, or of what attention makes of them too."),
    ] = "all",
    merge: Annotated[
        Path | None,
        typer.Option(help="An earlier file of this model to join in.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16.")] = "auto",
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Keep layers on disk, one in memory. Default: where they would not fit.",
            show_default=False,
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run of the same options.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Gather second moments of a model's attention inputs, for every later --kv-heads."""
    from gqaconvert.calibration.calibrate import calibrate
    from gqaconvert.checkpoint.sources import resolve_source

    path = out or Path(f"{resolve_source(model, revision).label}.calibration.safetensors")
    with _layer_progress() as progress:
        calibration = calibrate(
            model,
            data,
            out=path,
            tokens=tokens,
            context=context,
            statistics=statistics,
            merge_with=merge,
            device=device,
            dtype=dtype,
            stream=stream,
            revision=revision,
            resume=resume,
            overwrite=overwrite,
            on_size=lambda size: say(f"statistics will take {format_bytes(size)} on disk"),
            progress=progress,
        )
    for note in calibration.notes:
        say(f"note: {note}")
    if as_json:
        show_json(asdict(calibration))
        return
    identity = calibration.identity
    say(
        f"wrote {calibration.out}: {calibration.layers} layers, {identity.tokens:,} tokens,"
        f" {format_bytes(calibration.size_bytes)} in {calibration.seconds:.1f} s"
    )


@contextmanager
def _layer_progress() -> Iterator[Callable[[int, int], None]]:
    """Show layers done and time left on stderr; a line a layer where that is not a terminal."""
    import sys

    if not sys.stderr.isatty():
        yield lambda done, total: say(f"layer {done} of {total}")
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("layers", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
