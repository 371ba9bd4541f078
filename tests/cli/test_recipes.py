"""`gqaconvert recipes` as a process: quick, all faults of all files, never overwriting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

VERBS = ["list", "show", "copy", "validate", "schema"]
HEAVY = "{'torch', 'transformers', 'datasets', 'accelerate', 'numpy', 'matplotlib'}"


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gqaconvert", "recipes", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "100"},
    )


@pytest.mark.parametrize(
    "words", [["list"], ["show", "tiny-cpu", "--resolved"], ["validate", "tiny-cpu"], ["schema"]]
)
def test_nothing_heavy_is_imported(words):
    code = (
        f"import sys\nsys.argv = {['gqaconvert', 'recipes', *words]!r}\n"
        "from gqaconvert.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print('LOADED', *sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_help_of_all_names_each():
    said = run("--help").stdout
    assert all(verb in said for verb in VERBS)


def test_list_as_table_and_as_json():
    table = run("list").stdout.splitlines()
    rows = {row["name"]: row for row in json.loads(run("list", "--json").stdout)}
    assert len(table) == len(rows) + 1
    assert rows["llama2-7b-gqa8"]["kv_heads"] == 8
    assert rows["llama2-7b-gqa8"]["tokens"] >= 4e8
    assert rows["tiny-cpu"]["steps"] == 50
    assert all(Path(row["path"]).is_file() and row["summary"] for row in rows.values())


def test_show_prints_the_file_and_resolved_what_runs():
    written = run("show", "tiny-cpu").stdout
    assert written.startswith("# The bundled model")
    resolved = yaml.safe_load(run("show", "tiny-cpu", "--set", "uptrain.lr=0.5").stdout)
    assert resolved["uptrain"]["lr"] == 0.5
    assert resolved["uptrain"]["schedule"]["kind"] == "cosine"


class TestCopy:
    def test_to_here_to_a_folder_and_to_a_file(self, tmp_path):
        (tmp_path / "folder").mkdir()
        for words, place in (
            ([], "tiny-cpu.yaml"),
            (["folder"], "folder/tiny-cpu.yaml"),
            (["mine.yaml"], "mine.yaml"),
        ):
            done = run("copy", "tiny-cpu", *words, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert (tmp_path / place).read_text() == run("show", "tiny-cpu").stdout

    def test_a_file_is_never_overwritten(self, tmp_path):
        (tmp_path / "tiny-cpu.yaml").write_text("mine")
        done = run("copy", "tiny-cpu", cwd=tmp_path)
        assert done.returncode == 4
        assert done.stderr.splitlines()[0] == "error: a file of that name exists"
        assert (tmp_path / "tiny-cpu.yaml").read_text() == "mine"

    def test_a_folder_that_is_not_there(self, tmp_path):
        done = run("copy", "tiny-cpu", tmp_path / "nowhere" / "x.yaml")
        assert done.returncode == 1
        assert "No such file or directory" in done.stderr


class TestValidate:
    def test_valid_ones_tell_their_budget(self):
        done = run("validate", "tiny-cpu", "llama2-7b-gqa8")
        assert done.returncode == 0
        assert done.stdout.splitlines() == [
            "tiny-cpu: valid; 410k tokens in 50 steps",
            "llama2-7b-gqa8: valid; 400M tokens in 763 steps",
        ]

    def test_all_faults_of_all_files_and_exit_2(self, tmp_path):
        (tmp_path / "a.yaml").write_text("version: 1\nsource: {model: tiny}\nconvrt: {}\n")
        (tmp_path / "b.yaml").write_text("a: [")
        done = run("validate", "a.yaml", "tiny-cpu", "b.yaml", "c.yaml", cwd=tmp_path)
        assert done.returncode == 2
        assert "tiny-cpu: valid" in done.stdout
        for fault in (
            "convert: missing",
            "line 3: convrt: no such key; convert?",
            "at: a.yaml",
            "line 1: not YAML",
            "at: b.yaml",
            "no such file",
            "at: c.yaml",
        ):
            assert fault in done.stderr
        assert "Traceback" not in done.stderr

    def test_overrides_are_validated(self):
        done = run("validate", "tiny-cpu", "--set", "uptrain.lr=none")
        assert done.returncode == 2
        assert "--set: uptrain.lr: input should be a valid number" in done.stderr


def test_schema_is_json():
    assert json.loads(run("schema").stdout)["title"] == "gqaconvert recipe"
