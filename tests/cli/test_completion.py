"""Shell completion, asked for as the scripts of the shells do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-m", "gqaconvert"]
METHODS = ["mean", "first", "random", "procrustes", "svd"]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a model, another folder, a recipe and a text."""
    (tmp_path / "sm-model").mkdir()
    (tmp_path / "sm-model" / "config.json").write_text("{}")
    (tmp_path / "smaller").mkdir()
    (tmp_path / "mine.yaml").write_text("version: 1\n")
    (tmp_path / "notes.txt").write_text("text")
    return tmp_path


def complete(folder: Path, line: str) -> list[str]:
    """What bash would be offered for the last word of a line."""
    words = line.split(" ")
    environment = {
        "_GQACONVERT_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        PROGRAM, env=os.environ | environment, cwd=folder, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


def test_verbs_and_options_are_completed(here):
    assert complete(here, "gqaconvert up") == ["uptrain"]
    assert complete(here, "gqaconvert convert tiny --push") == ["--push-to-hub"]
    assert complete(here, "gqaconvert convert tiny --method ") == METHODS


@pytest.mark.parametrize("verb", ["inspect", "estimate", "convert", "calibrate", "sweep", "bench"])
def test_models_are_aliases_and_folders(here, verb):
    found = complete(here, f"gqaconvert {verb} sm")
    assert found == ["smollm2-135m", "smollm2-360m", "smollm2-1.7b", "sm-model", "smaller/"]


def test_a_model_is_found_by_its_path(here):
    line = f"gqaconvert inspect {here}/sm"
    assert complete(here, line) == [f"{here}/sm-model", f"{here}/smaller/"]
    (here / "sm-model" / "config.json").unlink()
    assert complete(here, line) == []  # then the shell's own completion goes on


def test_the_bundled_model_comes_first(here):
    assert complete(here, "gqaconvert inspect ")[0] == "tiny"


@pytest.mark.parametrize("verb", ["uptrain", "run", "recipes show", "recipes validate"])
def test_recipes_are_those_that_ship_and_files(here, verb):
    assert complete(here, f"gqaconvert {verb} tiny") == ["tiny-cpu"]
    assert complete(here, f"gqaconvert {verb} mi") == ["mine.yaml"]
    assert {"tiny-cpu", "llama2-7b-gqa8", "mine.yaml"} <= set(complete(here, f"gqaconvert {verb} "))


def test_other_names_are_completed(here):
    assert complete(here, "gqaconvert uptrain x --accelerate-config fs") == ["fsdp2"]
    assert complete(here, "gqaconvert run x --accelerate-config fs") == ["fsdp2"]
    assert "h100-80gb" in complete(here, "gqaconvert estimate tiny --gpu h1")


def test_completion_imports_nothing_heavy(here):
    code = (
        "import sys\nfrom gqaconvert.cli import completion as c\n"
        "for f in (c.complete_model, c.complete_recipe, c.complete_gpu):\n    assert f('')\n"
        "import gqaconvert.cli.main\n"
        "print({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_of_the_shells_are_written(shell):
    environment = {"_GQACONVERT_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        PROGRAM, env=os.environ | environment, capture_output=True, text=True, check=True
    )
    assert f"_GQACONVERT_COMPLETE=complete_{shell}" in done.stdout
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=done.stdout, text=True, check=True)


@pytest.mark.parametrize(("shell", "word"), [("zsh", '"tiny-cpu"'), ("fish", "tiny-cpu")])
def test_other_shells_are_offered_the_same(here, shell, word):
    environment = {
        "_GQACONVERT_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": "gqaconvert uptrain tiny",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        PROGRAM, env=os.environ | environment, cwd=here, capture_output=True, text=True, check=False
    )
    assert word in done.stdout


def test_bash_installs_it_into_its_own_home(tmp_path):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    program = " ".join(PROGRAM)
    environment = os.environ | {"HOME": str(tmp_path), "SHELL": bash}
    # A second command keeps bash from becoming the program itself: it must be found as its parent.
    subprocess.run(
        [bash, "-c", f"{program} --install-completion; true"], env=environment, check=True,
        capture_output=True,
    )  # fmt: skip
    assert "gqaconvert" in (tmp_path / ".bashrc").read_text()
    script = tmp_path / ".bash_completions" / "gqaconvert.sh"
    assert "complete -o default -F _gqaconvert_completion gqaconvert" in script.read_text()


def test_bash_offers_what_the_script_finds(here):
    bash, program = shutil.which("bash"), Path(sys.executable).with_name("gqaconvert")
    if bash is None or not program.exists():
        pytest.skip("no bash, or no program, here")
    environment = os.environ | {"_GQACONVERT_COMPLETE": "source_bash"}
    script = subprocess.run(PROGRAM, env=environment, capture_output=True, text=True, check=True)
    line = f"COMP_WORDS=({program} uptrain tiny); COMP_CWORD=2; _gqaconvert_completion {program}"
    done = subprocess.run(
        [bash, "-c", f'{script.stdout}\n{line}\necho "${{#COMPREPLY[@]}} ${{COMPREPLY[@]}}"'],
        cwd=here, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "1 tiny-cpu\n"
