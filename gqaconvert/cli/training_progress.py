"""Shows a run as it goes: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gqaconvert.cli.terminal import say
from gqaconvert.units import format_count

_SECONDS_BETWEEN_LINES = 30.0

Line = Mapping[str, Any]


@contextmanager
def training_progress(total_steps: int) -> Iterator[Callable[[Line], None]]:
    """Give what to call with every line of the metrics."""
    if not sys.stderr.isatty():
        yield _Lines(total_steps)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (
        TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[facts]}"),
        TimeLeft(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("uptrain", total=total_steps, facts="")
        held_out = ""

        def show(line: Line) -> None:
            nonlocal held_out
            if line["kind"] == "held_out":
                held_out = f"  held-out {line['held_out_loss']:.3f}{_source(line)}"
                bar.console.print(describe(line))
                return
            bar.update(task, completed=line["step"], facts=_step_facts(line) + held_out)

        yield show


def describe(line: Line) -> str:
    """One line of the metrics in words."""
    tokens = format_count(line["tokens"])
    if line["kind"] == "held_out":
        return (
            f"step {line['step']}, {tokens} tokens: held-out loss"
            f" {line['held_out_loss']:.4f}{_source(line)}"
        )
    skipped = f", skipped: {line['skipped']}" if line["skipped"] else ""
    return f"step {line['step']}, {tokens} tokens: {_step_facts(line)}{skipped}"


def _step_facts(line: Line) -> str:
    parts = [f"loss {line['loss']:.3f}"]
    if line["distill"]:
        parts.append(f"KL {line['distill']:.3f}")
    parts.append(f"{format_count(line['tokens_per_s'])} tokens/s")
    if line["mfu"] is not None:
        parts.append(f"MFU {100 * line['mfu']:.0f} %")
    if line["data_wait_s"] > 0.05:
        parts.append(f"waited {line['data_wait_s']:.1f} s for data")
    return "  ".join(parts)


def _source(line: Line) -> str:
    source = line["source_loss"]
    return f" (source {source:.4f})" if source is not None else ""


class _Lines:
    """For logs: every measurement and skipped step, of the others one in half a minute."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._shown = 0.0

    def __call__(self, line: Line) -> None:
        now = time.monotonic()
        due = now - self._shown > _SECONDS_BETWEEN_LINES or line["step"] == self._total_steps
        if line["kind"] == "held_out" or line["skipped"] or due:
            say(describe(line))
            self._shown = now
