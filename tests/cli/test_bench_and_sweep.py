"""bench, sweep and inspect --heads as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from checkpoints import write_llama


def run(*arguments: object, cwd: object = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gqaconvert", *map(str, arguments)],
        capture_output=True, text=True, check=False, env=dict(os.environ), cwd=cwd,
    )  # fmt: skip


def heavy_modules(*arguments: object) -> str:
    words = ["gqaconvert", *map(str, arguments)]
    code = (
        f"import sys; sys.argv = {words!r}\nfrom gqaconvert.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "print('LOADED', *sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("verb", ["bench", "sweep"])
def test_help_imports_nothing_heavy(verb):
    assert heavy_modules(verb, "--help") == "LOADED"


class TestHeads:
    def test_numbers_and_no_torch(self, tmp_path):
        write_llama(tmp_path / "model")
        assert heavy_modules("inspect", tmp_path / "model", "--heads") == "LOADED"
        found = json.loads(run("inspect", tmp_path / "model", "--heads", "--json").stdout)
        assert [layer["layer"] for layer in found["layers"]] == [0, 1]
        assert len(found["layers"][0]["keys"]["aligned"]) == 4

    @pytest.mark.parametrize("ending", ["png", "svg"])
    def test_a_heat_map(self, tmp_path, ending):
        write_llama(tmp_path / "model")
        figure = tmp_path / f"heads.{ending}"
        done = run("inspect", tmp_path / "model", "--heads", "--figure", figure)
        assert done.returncode == 0, done.stderr
        assert figure.stat().st_size > 5000
        assert done.stdout.startswith("layer")

    def test_a_figure_of_nothing_is_refused(self, tmp_path):
        done = run("inspect", "tiny", "--figure", tmp_path / "a.png")
        assert done.returncode == 2
        assert "--heads" in done.stderr


class TestBench:
    def test_table_json_and_figures(self, tmp_path):
        words = ["bench", "tiny", "--context", "16,32", "--new-tokens", 1, "--repeats", 1,
                 "--warmup", 0, "--threads", 1, "--out", tmp_path / "out"]  # fmt: skip
        done = run(*words)
        assert done.returncode == 0, done.stderr
        assert "knee of tiny, batch 1: at 1,801 tokens" in done.stdout
        assert "GB/s, measured here" in done.stdout
        names = sorted(path.name for path in (tmp_path / "out").iterdir())
        assert names == ["bench.json", "bench.png", "bench.svg"]

    def test_mistakes_are_told_before_anything_is_loaded(self, tmp_path):
        done = run("bench", "tiny", "--context", "many", "--out", tmp_path)
        assert done.returncode == 2
        assert "'many' is not a number of tokens" in done.stderr
        done = run("bench", "tiny", "--cache-kind", "quantized:int4", "--out", tmp_path)
        assert done.returncode == 2
        assert "quantised" in done.stderr


def test_sweep_prints_a_table_and_draws(tmp_path):
    done = run("sweep", "tiny", "--kv-heads", 2, "--context", 48, "--windows", 1, "--out", "out",
               cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()
    assert table[0].split()[:2] == ["KV", "heads"]
    assert "(source)" in table[1]
    assert "mean" in table[2]
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["models", "sweep.json", "sweep.png", "sweep.svg"]
    assert run("sweep", "tiny", "--kv-heads", 3, cwd=tmp_path).returncode == 2


def test_a_calibrated_sweep_says_what_it_read(tmp_path):
    done = run("sweep", "tiny", "--kv-heads", 2, "--context", 48, "--windows", 1, "--out", "out",
               "--calibration", "bundled", "--calibration-tokens", 1024, "--fit-steps", 2,
               "--fit-windows", 8, cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    methods = [line.split()[1] for line in done.stdout.splitlines()[2:4]]
    assert methods == ["mean", "svd"]
    assert "svd + fit" in done.stdout
    note = "calibrated on 1,024 tokens of bundled:train and each layer is then fitted for 2 steps"
    assert note in " ".join(done.stderr.split())
    refused = run("sweep", "tiny", "--method", "svd", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--calibration TEXT" in refused.stderr
