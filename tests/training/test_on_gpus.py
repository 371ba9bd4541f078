"""What only a GPU can show: `pytest -m gpu`, and `-m multi_gpu` where there are several."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from gqaconvert.settings.recipes import load_recipe
from gqaconvert.training.metrics import read_metrics
from gqaconvert.training.run import Uptraining, uptrain

ONE = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
SEVERAL = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")

RECIPE = {
    "version": 1,
    "source": {"model": "tiny"},
    "convert": {"kv_heads": 2},
    "uptrain": {
        "data": {"datasets": [{"path": "bundled"}], "context": 256},
        "loss": {"distill": 1.0, "next_token": 0.5},
        "budget": {"steps": 30},
        "batch_tokens": 4096,
        "micro_batch": 8,
        "lr": 1.5e-3,
        "held_out": {"text": "bundled", "every_steps": 30, "windows": 8},
    },
}


def run(folder: Path, *overrides: str) -> Uptraining:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return uptrain(load_recipe(path, [f"uptrain.{each}" for each in overrides]), folder / "run")


@pytest.mark.gpu
@ONE
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("compile=true",),
        ("activation_checkpointing=true",),
        ("precision=pure-bf16", "lr=5.0e-4"),
        ("loss.hidden=0.1", "loss.attention=0.1"),
        ("data.separate_documents=true",),
    ],
    ids=lambda overrides: " ".join(overrides) or "plain",
)
def test_one_device_trains_and_exports(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    result = run(tmp_path, *overrides)
    assert result.summary["last_loss"] < result.summary["first_loss"] - 0.3
    assert "GPU" in result.summary["devices"] or "NVIDIA" in result.summary["devices"]
    model = AutoModelForCausalLM.from_pretrained(result.folder.export)
    assert model.config.num_key_value_heads == 2


@pytest.mark.gpu
@ONE
def test_a_device_and_a_cpu_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "cpu").mkdir()
    settings = ("precision=fp32", "teacher.dtype=float32", "budget.steps=5")
    on_gpu = run(tmp_path / "gpu", *settings)
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    recipe = tmp_path / "gpu" / "recipe.yaml"
    command = [sys.executable, "-m", "gqaconvert", "uptrain", str(recipe)]
    command += ["--out", str(tmp_path / "cpu" / "run")]
    command += [part for each in settings for part in ("--set", f"uptrain.{each}")]
    import os

    subprocess.run(command, env={**os.environ, **environment}, check=True)
    ours = [line["loss"] for line in read_metrics(on_gpu.folder.metrics) if line["kind"] == "step"]
    theirs = [
        line["loss"]
        for line in read_metrics(tmp_path / "cpu" / "run" / "metrics.jsonl")
        if line["kind"] == "step"
    ]
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-2


@pytest.mark.gpu
@ONE
def test_memory_is_as_estimated(tmp_path: Path) -> None:
    from gqaconvert.training.memory import Devices
    from gqaconvert.training.resources import estimate_resources

    settings = ("batch_tokens=65536", "micro_batch=64", "data.context=1024", "budget.steps=4")
    result = run(tmp_path, *settings)
    recipe = load_recipe(tmp_path / "recipe.yaml", [f"uptrain.{each}" for each in settings])
    estimate = estimate_resources(recipe, Devices(), None)
    assert estimate is not None
    allocated = estimate.memory.total - estimate.memory.unusable
    assert allocated == pytest.approx(result.summary["peak_memory_bytes"], rel=0.2)


@pytest.mark.multi_gpu
@SEVERAL
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_two_devices_train_as_one(tmp_path: Path, config: str) -> None:
    (tmp_path / "one").mkdir()
    settings = ("precision=fp32", "teacher.dtype=float32", "budget.steps=6")
    one = run(tmp_path / "one", *settings)
    recipe = tmp_path / "one" / "recipe.yaml"
    command = [sys.executable, "-m", "gqaconvert", "uptrain", str(recipe)]
    command += ["--accelerate-config", config, "--num-processes", "2"]
    command += ["--out", str(tmp_path / "two"), "--json"]
    command += [part for each in settings for part in ("--set", f"uptrain.{each}")]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    summary = json.loads(done.stdout)
    assert summary["last_loss"] == pytest.approx(one.summary["last_loss"], abs=1e-2)
