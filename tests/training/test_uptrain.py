"""Whole runs: alone, in two real processes, killed, stopped, gone on with, exported."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from gqaconvert.errors import GqaconvertError, RefusedError
from gqaconvert.settings.recipes import load_recipe
from gqaconvert.surgery.verify_model import verify
from gqaconvert.training.metrics import read_metrics
from gqaconvert.training.run import Uptraining, uptrain
from gqaconvert.training.state import saved_states

STEPS = 24
RECIPE: dict[str, Any] = {
    "version": 1,
    "source": {"model": "tiny"},
    "convert": {"kv_heads": 2},
    "uptrain": {
        "data": {"datasets": [{"path": "bundled"}], "context": 48, "workers": 1},
        "loss": {"distill": 1.0, "next_token": 0.5},
        "stages": [{"share": 0.25, "train": "kv"}, {"share": 0.75, "train": "all"}],
        "budget": {"steps": STEPS},
        "batch_tokens": 8 * 48,
        "micro_batch": 2,
        "lr": 2.0e-3,
        "precision": "fp32",
        "teacher": {"dtype": "float32"},
        "checkpoints": {"every_steps": 4, "keep": 2},
        "held_out": {"text": "bundled", "every_steps": 12, "windows": 5},
    },
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "small.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="module")
def reference(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Uptraining:
    """One process, in one go."""
    return uptrain(load_recipe(recipe), tmp_path_factory.mktemp("reference") / "run")


def curve(folder: Path) -> dict[int, float]:
    return {
        line["step"]: line["loss"]
        for line in read_metrics(folder / "metrics.jsonl")
        if line["kind"] == "step"
    }


def assert_same_curve(found: Path, expected: Path) -> None:
    a, b = curve(found), curve(expected)
    assert list(a) == list(b) == list(range(1, STEPS + 1))
    assert max(abs(a[step] - b[step]) for step in a) < 1e-4
    assert [line["tokens"] for line in read_metrics(found / "metrics.jsonl")] == [
        line["tokens"] for line in read_metrics(expected / "metrics.jsonl")
    ]


def start(recipe: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "gqaconvert", "uptrain", str(recipe), "--out", str(out), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    """Wait until a step is done and the run is not over."""
    while process.poll() is None:
        done = curve(out) if (out / "metrics.jsonl").exists() else {}
        if done and max(done) >= step:
            assert max(done) < STEPS - 4, "too fast to be stopped in the middle"
            return
        time.sleep(0.02)
    raise AssertionError(process.communicate()[0][-3000:])


def finish(process: subprocess.Popen[str]) -> str:
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 0, output[-3000:]
    return output


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL for the launcher and everything below it."""
    import psutil

    family = [process.pid, *(c.pid for c in psutil.Process(process.pid).children(recursive=True))]
    for pid in family:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def test_training_brings_the_loss_down_and_leaves_a_checkpoint(reference: Uptraining) -> None:
    assert reference.ending == "finished"
    summary = json.loads(reference.folder.summary.read_text())
    assert summary["source_loss"] < summary["last_loss"] < summary["first_loss"] - 0.3
    assert summary["tokens"] == STEPS * 8 * 48
    model, found = AutoModelForCausalLM.from_pretrained(
        reference.folder.export, output_loading_info=True
    )
    assert not any(found.values())
    assert model.config.num_key_value_heads == 2
    assert model.dtype == torch.bfloat16
    verify(reference.folder.export)
    card = (reference.folder.export / "README.md").read_text()
    assert "## Uptraining" in card
    assert "Pooling alone changes" not in card
    assert f"{summary['last_loss']:.3f}" in card
    assert reference.folder.curve.stat().st_size > 10_000
    assert (reference.folder.export / "config.json").read_bytes() == (
        reference.folder.converted / "config.json"
    ).read_bytes()


def test_stages_train_what_they_say(reference: Uptraining, recipe: Path, tmp_path: Path) -> None:
    stages = {line["step"]: line.get("stage") for line in read_metrics(reference.folder.metrics)}
    assert stages[6] == 0
    assert stages[7] == 1
    only_kv = load_recipe(
        recipe,
        ["uptrain.stages=[{share: 1.0, train: kv}]", "uptrain.budget.steps=2",
         "uptrain.held_out=null", "uptrain.export_dtype=float32"],
    )  # fmt: skip
    result = uptrain(only_kv, tmp_path / "run")
    before = AutoModelForCausalLM.from_pretrained(result.folder.converted, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(result.folder.export)
    changed = {
        name.removesuffix(".weight").rpartition(".")[2]
        for (name, a), b in zip(before.named_parameters(), after.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    assert changed == {"k_proj", "v_proj", "input_layernorm"}


@pytest.mark.distributed
def test_killed_processes_go_on_as_one_without_a_trace(
    reference: Uptraining, recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start(recipe, out, "--num-processes", "2")
    wait_for_step(process, out, 9)
    kill_all(process)
    assert not (out / "model").exists()
    states = saved_states(out / "checkpoints")
    assert states
    finish(start(recipe, out, "--resume", "auto"))
    assert_same_curve(out, reference.folder.path)


@pytest.mark.distributed
def test_divided_processes_stop_on_a_signal_and_go_on_as_copies(
    reference: Uptraining, recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = start(recipe, out, "--accelerate-config", "fsdp2", "--num-processes", "2")
    wait_for_step(process, out, 5)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 130, output[-3000:]
    stopped = max(curve(out))
    assert saved_states(out / "checkpoints")[-1].name == f"step-{stopped:08d}"
    finish(
        start(recipe, out, "--accelerate-config", "fsdp2", "--num-processes", "2",
              "--resume", "auto")
    )  # fmt: skip
    assert_same_curve(out, reference.folder.path)
    mine = AutoModelForCausalLM.from_pretrained(out / "model").state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(reference.folder.export).state_dict()
    for name, tensor in mine.items():
        assert torch.allclose(tensor.float(), theirs[name].float(), atol=2e-2), name


def test_going_on_as_another_run_is_refused(reference: Uptraining, recipe: Path) -> None:
    out = reference.folder.path
    with pytest.raises(RefusedError, match="already been trained"):
        uptrain(load_recipe(recipe), out)
    with pytest.raises(RefusedError, match=r"uptrain|lr 0\.002 → 0\.001"):
        uptrain(load_recipe(recipe, ["uptrain.lr=1.0e-3"]), out, resume="auto")
    again = uptrain(load_recipe(recipe, ["uptrain.micro_batch=4"]), out, resume="auto")
    assert again.facts.step == STEPS


def test_a_run_without_hope_stops_and_keeps_its_last_good_state(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gqaconvert.training import loop

    real, calls = loop.fault_of, 0

    def poisoned(norm: float, *others: Any) -> str | None:
        nonlocal calls
        calls += 1
        return real(math.nan if calls > 3 else norm, *others)

    monkeypatch.setattr(loop, "fault_of", poisoned)
    content = load_recipe(recipe, ["uptrain.safety.max_skipped=2", "uptrain.held_out=null"])
    with pytest.raises(GqaconvertError, match="3 steps in a row had to be skipped"):
        uptrain(content, tmp_path / "run")
    assert [path.name for path in saved_states(tmp_path / "run" / "checkpoints")][-1] == (
        "step-00000006"
    )
    assert not (tmp_path / "run" / "model").exists()
    monkeypatch.undo()
    rescued = uptrain(content, tmp_path / "run", resume="auto")
    assert rescued.ending == "finished"
    assert rescued.facts.skipped == 3


@pytest.mark.parametrize(
    ("settings", "ending"),
    [
        (["uptrain.held_out.target=9.0"], "target reached"),
        (["uptrain.held_out.patience=1", "uptrain.lr=1.0e-12"], "no longer falling"),
    ],
)
def test_training_ends_early(
    recipe: Path, tmp_path: Path, settings: list[str], ending: str
) -> None:
    settings = [*settings, "uptrain.held_out.every_steps=2", "uptrain.export_dtype=float16"]
    result = uptrain(load_recipe(recipe, settings), tmp_path / "run")
    assert result.ending == ending
    assert result.facts.step < STEPS
    exported = AutoModelForCausalLM.from_pretrained(result.folder.export)
    assert exported.dtype == torch.float16


def test_a_cached_teacher_trains_as_the_one_it_was_made_from(
    reference: Uptraining, recipe: Path, tmp_path: Path
) -> None:
    settings = [
        f"uptrain.teacher.cache={tmp_path / 'cache'}", "uptrain.teacher.cache_top_k=2048",
        "uptrain.held_out=null", "uptrain.checkpoints.every_steps=100",
    ]  # fmt: skip
    result = uptrain(load_recipe(recipe, settings), tmp_path / "run")
    a, b = curve(result.folder.path), curve(reference.folder.path)
    # Log-probabilities are kept in float16.
    assert max(abs(a[step] - b[step]) for step in a) < 2e-2
