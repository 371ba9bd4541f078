"""`gqaconvert report` as a process: quick, quiet on stdout, clear about what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from saved_runs import write_run


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gqaconvert", "report", *map(str, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "small")


def test_paths_on_stdout_and_notes_on_stderr(folder):
    done = run(folder)
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        str(folder / "report/report.md"), str(folder / "report/report.html"),
    ]  # fmt: skip
    assert "note: Perplexity of converted (small) is 10.2" in done.stderr


def test_json_lists_all_files_and_cards(folder, tmp_path):
    done = run(folder, "--json", "--cards", "--out", tmp_path / "out", "--title", "Mine")
    content = json.loads(done.stdout)
    assert content["folder"] == str(tmp_path / "out")
    assert len(content["paths"]) == 2 + 8 + 5
    assert content["cards"] == [
        str(folder / "converted/README.md"), str(folder / "model/README.md"),
    ]  # fmt: skip
    assert any("10.2" in each for each in content["warnings"])
    assert (tmp_path / "out/report.md").read_text(encoding="utf-8").startswith("# Mine\n")


def test_torch_stays_out(folder, tmp_path):
    probe = (
        "import sys\nfrom gqaconvert.cli.main import app\n"
        f"app(['report', {str(folder)!r}, '--cards', '--out', {str(tmp_path / 'out')!r}],"
        " standalone_mode=False)\n"
        "print('LOADED', *({'torch', 'transformers', 'accelerate', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED"


def test_three_lines_for_what_is_wrong(folder, tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "at", "try"]
    (tmp_path / "bench.json").write_text("[")
    done = run(tmp_path)
    assert done.returncode == 1
    assert f"at: {tmp_path / 'bench.json'}" in done.stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.md").write_text("kept")
    assert run(folder, "--out", tmp_path / "mine").returncode == 4
