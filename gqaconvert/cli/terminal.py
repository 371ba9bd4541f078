"""What all verbs print with: prose and bars on stderr, results on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer


@dataclass
class Settings:
    """What the command line was told for all verbs."""

    verbosity: int = 0


settings = Settings()


def say(text: str) -> None:
    """Print prose, on stderr."""
    typer.echo(text, err=True)


def show_table(headers: list[str], rows: list[list[str]], left: tuple[int, ...] = (0,)) -> None:
    """Print a plain table on stdout: columns in `left` to the left, others to the right."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    for row in [headers, *rows]:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        typer.echo("  ".join(cells).rstrip())


def show_json(content: Mapping[str, Any] | list[dict[str, Any]]) -> None:
    """Print JSON on stdout."""
    typer.echo(json.dumps(content, indent=2, ensure_ascii=False, default=str))


@contextmanager
def byte_progress(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show bytes, rate and time left on stderr; gives None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
