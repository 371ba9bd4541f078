"""Runs the commands and the Python of a page, in its order, and compares what they print.

In this process, since importing torch and transformers anew for every command would take longer
than the commands do.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from documentation_blocks import Block, Command, output_matches, read_blocks, read_commands
from documentation_rules import PROGRAMS, reason_not_run, rule_for
from documentation_standins import furnish, place_models

from gqaconvert.cli.main import main

_READS_NO_WEIGHTS = re.compile(r"^gqaconvert (estimate|inspect)\b|--dry-run")


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, slow: bool) -> None:
    """Run the commands and the Python of a page in its order, and compare what is printed."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")
    furnished = False
    names: dict[str, Any] = {}
    for block in read_blocks(page):
        if block.language == "python" and not block.title:
            place = f"{page.name}:{block.line}"
            run_python(block, place, names)
        for command in read_commands(block, PROGRAMS) or ():
            place = f"{page.name}:{command.line}: {command.text}"
            if command.words[0] != "gqaconvert" and reason_not_run(command.text):
                continue
            if not furnished:
                furnish(folder)
                furnished = True
            run_command(command, place, folder, slow=slow)


def run_command(command: Command, place: str, folder: Path, *, slow: bool) -> None:
    """Run one command as its rule says."""
    assert command.words[0] == "gqaconvert", f"{place}: in no list of documentation_rules.py"
    rule = rule_for(command.text)
    if rule and rule.slow and not slow:
        return
    extra = shlex.split(rule.append) if rule else []
    words = [*command.words[1:], *extra]
    place_models(folder, real=bool(_READS_NO_WEIGHTS.search(" ".join(["gqaconvert", *words]))))
    began = time.process_time()
    code, out, both = call(words)
    print(f"{time.process_time() - began:.1f} s of CPU  {place}")  # noqa: T201 (shown by pytest -s)
    torch = sys.modules.get("torch")
    assert torch is None or torch.is_grad_enabled(), f"{place}: leaves torch without gradients"
    shown = command.shown
    refused = shown is not None and any(line.startswith("error:") for line in shown)
    assert (code != 0) == refused, f"{place}: exit code {code}\n{both}"
    if shown:
        assert not extra, f"{place}: a command whose output is shown must run as written"
        matches = output_matches(shown, out) or output_matches(shown, both)
        assert matches, f"{place} prints\n{both}"


def call(words: list[str]) -> tuple[int, str, str]:
    """Run gqaconvert in this process: exit code, stdout, and stdout with stderr as on a screen."""
    out, screen = io.StringIO(), io.StringIO()

    class Both(io.StringIO):
        def write(self, text: str) -> int:
            screen.write(text)
            return out.write(text)

    with contextlib.redirect_stdout(Both()), contextlib.redirect_stderr(screen):
        try:
            main(words)
        except SystemExit as stop:
            return int(stop.code or 0), out.getvalue(), screen.getvalue()
    return 0, out.getvalue(), screen.getvalue()


def run_python(block: Block, place: str, names: dict[str, Any]) -> None:
    """Run a block of Python; `model`, where it is not made, is a loaded tiny model."""
    if "model" not in names and re.search(r"\bmodel\b", block.text):
        from gqaconvert.modelling.models import load_model

        names["model"] = load_model("tiny").model
    exec(compile("\n" * (block.line - 1) + block.text, place, "exec"), names)


def commands_of(page: Path) -> list[Command]:
    """Return all commands of a page."""
    blocks = read_blocks(page)
    return [command for block in blocks for command in read_commands(block, PROGRAMS) or ()]
