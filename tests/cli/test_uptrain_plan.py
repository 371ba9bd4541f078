"""`uptrain --dry-run`: what a run takes, without loading or writing anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gqaconvert.cli.main import app
from gqaconvert.errors import RefusedError

run = CliRunner().invoke


def test_memory_is_printed_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["uptrain", "tiny-cpu", "--gpu", "h100-80gb", "--dry-run"]
    plain = run(app, command)
    assert plain.exit_code == 0, plain.output
    for part in ("weights", "gradients", "optimiser", "teacher", "activations", "logits", "disk"):
        assert part in plain.output
    alone = json.loads(run(app, [*command, "--json"]).stdout)
    assert alone["steps"] == 50
    assert alone["fits"] is True
    divided = json.loads(run(app, [*command, "--json", "--accelerate-config", "fsdp2"]).stdout)
    assert divided["memory_bytes"] < alone["memory_bytes"]
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    command = ["uptrain", "tiny-cpu", "--dry-run", "--gpu", "2GiB"]
    big = ["--set", "uptrain.batch_tokens=131072", "--set", "uptrain.micro_batch=128"]
    refused = run(app, [*command, *big])
    assert isinstance(refused.exception, RefusedError)
    assert "micro_batch" in str(refused.exception.remedy)
