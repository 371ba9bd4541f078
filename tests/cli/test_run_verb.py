"""The verb `run`: what it prints, its plan, its codes, and that a stopped run goes on."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from gqaconvert.cli.main import app
from gqaconvert.pipeline.experiment import Experiment
from gqaconvert.pipeline.folder import experiment_folder
from gqaconvert.pipeline.stages import plan_stages
from gqaconvert.settings.recipes import load_recipe, recipe_files

TEXT = "The quick brown fox jumps over the lazy dog. " * 60
RECIPE = """
version: 1
source: {model: tiny}
convert: {kv_heads: 2}
uptrain:
  data: {datasets: [{path: text.txt}], context: 32}
  loss: {next_token: 1.0}
  budget: {steps: 2}
  batch_tokens: 64
  micro_batch: 2
  lr: 1.0e-4
  precision: fp32
  held_out: null
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "small.yaml").write_text(RECIPE)
    return tmp_path


def gqaconvert(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "gqaconvert", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)


def test_the_plan_names_every_stage_and_writes_nothing(folder):
    done = gqaconvert(folder, "run", "small.yaml", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    states = {stage["name"]: stage["state"] for stage in plan["stages"]}
    assert states == {
        "source": "to do", "calibrate": "left out", "convert": "to do", "verify": "to do",
        "evaluate": "left out", "uptrain": "to do", "evaluate-uptrained": "left out",
        "bench": "left out", "sweep": "left out", "report": "to do",
    }  # fmt: skip
    assert plan["seconds"] > 0
    assert plan["disk_bytes"] > 2 * 6_590_976  # two checkpoints at least
    assert not (folder / "runs").exists()


def test_a_gpu_that_is_not_here_can_be_planned_for(folder):
    done = gqaconvert(folder, "run", "small.yaml", "--dry-run", "--gpu", "h100-80gb")
    assert done.returncode == 0, done.stderr
    assert "H100" in done.stderr
    assert "uptrain" in done.stdout


def test_wrong_stages_and_recipes_are_usage(folder):
    wrong = gqaconvert(folder, "run", "small.yaml", "--from", "measure")
    assert wrong.returncode == 2
    assert "no stage 'measure'" in wrong.stderr
    assert "evaluate-uptrained" in wrong.stderr
    assert gqaconvert(folder, "run", "nothing.yaml").returncode == 2


def test_an_interrupted_run_goes_on_when_repeated(folder):
    command = [sys.executable, "-m", "gqaconvert", "run", "small.yaml", "--json",
               "--set", "uptrain.budget.steps=150"]  # fmt: skip
    running = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = folder / "runs" / "small" / "metrics.jsonl"
    deadline = time.monotonic() + 150
    while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
        assert running.poll() is None, running.communicate()[1]
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=100)
    assert running.returncode == 130, err
    assert "repeat the command" in err
    assert json.loads(out)["interrupted"] is True
    stopped = len(metrics.read_text().splitlines())
    assert 0 < stopped < 150

    finished = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
    assert finished.returncode == 0, finished.stderr
    content = json.loads(finished.stdout)
    assert content["kept"] == ["convert", "verify"]
    assert content["done"] == ["source", "uptrain", "report"]
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 151))
    assert (folder / "runs" / "small" / "report" / "report.html").is_file()


@pytest.mark.distributed
def test_the_training_of_a_run_can_have_several_processes(folder):
    done = gqaconvert(folder, "run", "small.yaml", "--num-processes", "2", "--out", "two")
    assert done.returncode == 0, done.stderr
    summary = json.loads((folder / "two" / "summary.json").read_text())
    assert summary["steps"] == 2
    assert "2" in summary["devices"]
    assert (folder / "two" / "report" / "report.md").is_file()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", sorted(recipe_files()))
def test_the_command_of_every_stage_is_one_that_the_verbs_take(name, device, tmp_path):
    group = typer.main.get_command(app)
    context = group.make_context("gqaconvert", ["--help"], resilient_parsing=True)
    experiment = Experiment(load_recipe(name), experiment_folder(tmp_path, name), device)
    for stage in plan_stages(experiment):
        words = shlex.split(stage.command)
        if stage.left_out is None:
            verb, command, rest = group.resolve_command(context, words[1:])
            command.make_context(verb, rest)
