"""`calibrate` writes what the model reads, once, whatever interrupts it, and mixes nothing up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from typer.testing import CliRunner

from gqaconvert.calibration.calibrate import calibrate, is_of
from gqaconvert.calibration.decoder_layers import find_attention
from gqaconvert.calibration.windows import calibration_text, spread_windows
from gqaconvert.checkpoint.sources import resolve_source
from gqaconvert.cli.main import app
from gqaconvert.corpus.text import load_text, make_text
from gqaconvert.errors import RefusedError, UsageError
from gqaconvert.modelling.models import load_model
from gqaconvert.surgery.statistics import KINDS, StatisticsFile

SMALL = {"tokens": 1024, "context": 64}
KILLED = """
import os, signal
from gqaconvert.calibration.calibrate import calibrate
def progress(done, total):
    if done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
calibrate("tiny", "bundled", out={out!r}, tokens=1024, context=64, progress=progress)
"""


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory):
    out = tmp_path_factory.mktemp("calibration") / "tiny.safetensors"
    calibrate("tiny", "bundled", out=out, **SMALL)
    return out


@pytest.fixture(scope="module")
def neox(tmp_path_factory):
    """A GPT-NeoX checkpoint, which is converted as Phi, with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("neox")
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=2048, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_source("tiny").folder / name, folder)
    return folder


def test_holds_the_moments_of_what_the_forward_reads(tiny_file):
    loaded = load_model("tiny")
    attention = find_attention(loaded.model)
    sums = dict.fromkeys(attention, 0)

    def hook(number):
        def add(_, args):
            x = torch.cat([args[0].double(), torch.ones(*args[0].shape[:2], 1)], -1).flatten(0, 1)
            sums[number] = sums[number] + x.T @ x

        return add

    for number, each in attention.items():
        each.projection.register_forward_pre_hook(hook(number))
    windows = spread_windows(loaded.tokenizer, calibration_text("bundled"), **SMALL)
    assert len(windows) == 16
    with torch.no_grad():
        loaded.model(input_ids=torch.tensor([window.token_ids for window in windows]))
    file = StatisticsFile(tiny_file)
    assert list(file) == sorted(attention)
    for number in file:
        expected = (sums[number] / 1024).numpy()
        scale = np.abs(expected).max()  # the model runs in bfloat16, in batches of another size
        np.testing.assert_allclose(file[number].inputs, expected, rtol=0.02, atol=1e-2 * scale)


def test_says_what_it_is_of(tiny_file):
    file = StatisticsFile(tiny_file)
    text = calibration_text("bundled")
    assert file.identity.texts == (("bundled:train", text.sha256, 1024),)
    assert text.sha256 != load_text("bundled").sha256  # what models are evaluated on
    assert (file.identity.model, file.identity.tokens, file.identity.context) == ("tiny", 1024, 64)
    assert all(set(kinds) == set(KINDS) for kinds in file.widths.values())
    file.check(resolve_source("tiny").folder)


def test_knows_what_a_file_is_of(tiny_file, neox, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(load_text("bundled").text[:9000], encoding="utf-8")
    assert is_of(tiny_file, "tiny", "bundled", **SMALL)
    assert not is_of(tiny_file, "tiny", "bundled", tokens=512, context=64)
    assert not is_of(tiny_file, "tiny", "bundled", tokens=1024, context=32)
    assert not is_of(tiny_file, "tiny", str(other), **SMALL)
    assert not is_of(tiny_file, neox, "bundled", **SMALL)


@pytest.mark.parametrize("characters", [12_000, 10**9])  # tokenised whole, and in pieces
def test_windows_are_spread_over_the_text(characters):
    tokenizer = load_model("tiny").tokenizer
    text = make_text("text", [calibration_text("bundled").text[:characters]])
    windows = spread_windows(tokenizer, text, tokens=1024, context=64)
    assert len(windows) == 16
    places = []
    for window in windows:
        assert len(window.token_ids) == 64
        places.append(text.text.find(tokenizer.decode(window.token_ids)))
    assert -1 not in places
    assert places == sorted(set(places))
    assert places[-1] > 0.8 * len(text.text)
    with pytest.raises(UsageError, match="less than a window"):
        spread_windows(tokenizer, text, tokens=63, context=64)


def test_an_existing_file_is_kept(tiny_file):
    before = tiny_file.read_bytes()
    with pytest.raises(RefusedError, match="exists") as error:
        calibrate("tiny", "bundled", out=tiny_file, **SMALL)
    assert error.value.exit_code == 4
    assert tiny_file.read_bytes() == before


def test_streamed_equals_in_memory(tiny_file, tmp_path):
    out = tmp_path / "streamed"
    calibrate("tiny", "bundled", out=out, stream=True, **SMALL)
    assert out.read_bytes() == tiny_file.read_bytes()
    assert list(tmp_path.iterdir()) == [out]


def test_killed_and_resumed(tiny_file, tmp_path):
    out = tmp_path / "killed"
    code = KILLED.format(out=str(out))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert not out.exists()
    with pytest.raises(RefusedError, match="unfinished"):
        calibrate("tiny", "bundled", out=out, **SMALL)
    with pytest.raises(RefusedError, match="other options"):
        calibrate("tiny", "bundled", out=out, resume=True, tokens=512, context=64)
    seen = []
    calibrate(
        "tiny", "bundled", out=out, resume=True, progress=lambda *each: seen.append(each), **SMALL
    )
    assert seen == [(3, 4), (4, 4)]
    assert out.read_bytes() == tiny_file.read_bytes()
    assert list(tmp_path.iterdir()) == [out]


def test_merging_weighs_by_tokens(tmp_path):
    text = load_text("bundled").text
    parts = []
    for name, piece in (("a", text[:1500]), ("b", text[1500:20000])):
        (tmp_path / f"{name}.txt").write_text(piece, encoding="utf-8")
        calibrate("tiny", str(tmp_path / f"{name}.txt"), out=tmp_path / name, **SMALL)
        parts.append(StatisticsFile(tmp_path / name))
    calibrate(
        "tiny", str(tmp_path / "b.txt"), out=tmp_path / "ab", merge_with=tmp_path / "a", **SMALL
    )
    both = StatisticsFile(tmp_path / "ab")
    counts = [part.identity.tokens for part in parts]
    assert both.identity.tokens == sum(counts)
    assert [name for name, _, _ in both.identity.texts] == ["a.txt", "b.txt"]
    assert counts[0] != counts[1]
    for number in both:
        for kind in KINDS:
            first, second = (getattr(part[number], kind) for part in parts)
            expected = (counts[0] * first + counts[1] * second) / sum(counts)
            np.testing.assert_allclose(getattr(both[number], kind), expected, rtol=1e-4, atol=1e-5)


def test_merging_refuses_another_model(tiny_file, neox, tmp_path):
    with pytest.raises(RefusedError, match="another model"):
        calibrate(neox, "bundled", out=tmp_path / "x", merge_with=tiny_file, **SMALL)
    with pytest.raises(RefusedError, match="do not mix"):
        calibrate(
            "tiny", "bundled", out=tmp_path / "x", merge_with=tiny_file, tokens=1024, context=32
        )
    assert not list(tmp_path.iterdir())


def test_a_class_that_is_converted_as_another(neox, tmp_path):
    """Phi has one norm where GPT-NeoX has two with gains: its attention reads other inputs."""
    calibrate(neox, "bundled", out=tmp_path / "neox", **SMALL)
    file = StatisticsFile(tmp_path / "neox")
    assert file.identity.model_type == "phi"
    assert list(file) == [0, 1]
    file.check(neox)
    from gqaconvert.surgery.convert import convert

    conversion = convert(
        neox, tmp_path / "out", num_kv_heads=2, statistics=tmp_path / "neox", dry_run=True
    )
    assert len(conversion.layers) == 2


def test_command_line(tmp_path):
    out = tmp_path / "tiny.safetensors"
    arguments = ["calibrate", "tiny", "--data", "bundled", "--tokens", "512", "--context", "64"]
    options = ["--out", str(out), "--statistics", "plain", "--json"]
    result = CliRunner().invoke(app, [*arguments, *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["layers"], found["identity"]["tokens"]) == (4, 512)
    assert found["size_bytes"] == 4 * 4 * 257**2
    assert "on disk" in result.stderr
    assert "layer 4 of 4" in result.stderr
    assert set(StatisticsFile(out).widths[0]) == {"inputs"}
