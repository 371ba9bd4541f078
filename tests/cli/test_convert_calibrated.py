"""`convert` with a text: statistics, fit and distillation in one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from gqaconvert.cli.main import app
from gqaconvert.errors import RefusedError, UsageError
from gqaconvert.surgery.verify_model import verify

run = CliRunner().invoke
FEW = ["--tokens", "1024", "--context", "64"]


def convert(out: Path, *options: str) -> None:
    done = run(app, ["convert", "tiny", str(out), "--kv-heads", "2", *options])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output


def test_one_command_calibrates_fits_and_distils(tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(
        out, "--calibration", "bundled", *FEW, "--fit-steps", "2", "--fit-windows", "8",
        "--distill-steps", "2",
    )  # fmt: skip
    manifest = json.loads((out / "gqaconvert.json").read_text())
    assert manifest["plan"]["options"]["method"] == "svd"
    assert manifest["uptrain"]["steps"] == 2
    assert AutoModelForCausalLM.from_pretrained(out).config.num_key_value_heads == 2
    verify(out)
    with pytest.raises(UsageError, match="trained after the conversion"):
        verify(out, "tiny")
    # Nothing of the stages is left beside it but the statistics, which serve other counts.
    assert {path.name for path in tmp_path.iterdir()} == {"out", "tiny.calibration.safetensors"}


def test_statistics_of_a_text_are_used_again_and_others_refused(tmp_path: Path) -> None:
    convert(tmp_path / "two", "--calibration", "bundled", *FEW)
    kept = tmp_path / "tiny.calibration.safetensors"
    before = kept.stat().st_mtime_ns
    convert(tmp_path / "again", "--calibration", "bundled", *FEW)
    assert kept.stat().st_mtime_ns == before
    with pytest.raises(RefusedError, match="of another model or text"):
        convert(
            tmp_path / "more", "--calibration", "bundled", "--tokens", "2048", "--context", "64"
        )
    convert(tmp_path / "file", "--calibration", str(kept))
    files = [tmp_path / name / "model.safetensors" for name in ("two", "again", "file")]
    assert len({path.read_bytes() for path in files}) == 1


def test_a_fit_without_text_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="none is given"):
        convert(tmp_path / "out", "--method", "mean", "--fit-steps", "2")
    assert not list(tmp_path.iterdir())
