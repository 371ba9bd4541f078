"""What an experiment will take: orders of magnitude, from configs alone."""

import json

import pytest

from gqaconvert.pipeline.forecast import forecast
from gqaconvert.pipeline.speed import Speed, speed_of_device, speed_of_named
from gqaconvert.settings.recipes import load_recipe
from gqaconvert.training.memory import Devices

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
    "torch_dtype": "float16", "tie_word_embeddings": False,
}  # fmt: skip

RECIPE = """
version: 1
source: {model: MODEL}
convert: {kv_heads: 8, method: svd, calibration: bundled}
uptrain:
  data: {datasets: [{path: bundled}], context: 4096}
  budget: {tokens: 1.0e8}
  batch_tokens: 524288
  lr: 1.0e-4
evaluate: {suite: quick}
bench: {contexts: [4096]}
sweep: {kv_heads: [8, 1]}
"""


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("MODEL", str(tmp_path)))
    return load_recipe(tmp_path / "recipe.yaml")


def test_training_seven_billion_parameters_takes_the_hours_it_takes(llama):
    speed = speed_of_named("h100-80gb")
    rows = forecast(llama, speed, Devices(8, True, "cuda"), 80 << 30)
    # 6 operations a parameter and token for the student, 2 for the teacher; 8 GPUs at 35 %.
    by_hand = 8 * 6.6e9 * 1e8 / (8 * 0.35 * speed.flops)
    assert rows["uptrain"].seconds == pytest.approx(by_hand, rel=0.5)
    assert rows["convert"].disk_bytes == pytest.approx(11.9e9, rel=0.02)
    # Three square matrices of 4096 in float32 a layer.
    assert rows["calibrate"].disk_bytes == 3 * 4 * 4096**2 * 32
    assert rows["bench"].memory_bytes > 2 * 13e9


def test_twice_the_speed_takes_half_the_time(llama):
    devices = Devices(1, False, "cuda")
    slow = forecast(llama, Speed(1e14, 1e12, ""), devices, None)
    fast = forecast(llama, Speed(2e14, 1e12, ""), devices, None)
    assert fast["uptrain"].seconds == pytest.approx(slow["uptrain"].seconds / 2, rel=0.05)


def test_without_a_speed_there_are_no_times(llama):
    rows = forecast(llama, None, Devices(1, False, "cuda"), None)
    assert rows["uptrain"].seconds is None
    assert rows["uptrain"].disk_bytes > 0


def test_this_machine_is_measured():
    speed = speed_of_device("cpu")
    assert 1e8 < speed.flops < 1e15
    assert 1e8 < speed.bytes_per_s < 1e13
    assert "measured here" in speed.basis
