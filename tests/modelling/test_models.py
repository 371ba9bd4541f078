"""Loading a model to measure, and the fingerprint that tells models apart."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import gqaconvert
from gqaconvert.checkpoint.sources import resolve_source
from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.modelling.models import ATTENTION, find_model, fingerprint_model, load_model


@pytest.fixture
def copy(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(resolve_source("tiny").folder, folder)
    return folder


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_model_is_loaded_as_asked(attn, dtype):
    loaded = load_model("tiny", dtype=dtype, attn=attn)
    assert loaded.name == "tiny"
    assert loaded.dtype == ("bfloat16" if dtype == "auto" else dtype)
    assert loaded.model.config._attn_implementation == ATTENTION[attn]
    assert not loaded.model.training
    assert loaded.tokenizer("x")["input_ids"]
    assert loaded.parameters == 3_688_704
    assert loaded.disk_bytes == 7_381_504
    assert loaded.weights_sha256 == find_model("tiny").weights_sha256


def test_a_copy_has_the_same_fingerprint(copy):
    assert fingerprint_model(copy) == find_model("tiny").weights_sha256


def test_methods_that_give_the_same_shapes_are_told_apart(tmp_path):
    folders = [
        gqaconvert.convert("tiny", tmp_path / method, num_kv_heads=2, method=method).out
        for method in ("mean", "first", "random")
    ]
    assert len({fingerprint_model(folder) for folder in folders}) == 3


def test_a_training_step_changes_the_fingerprint(copy):
    before = fingerprint_model(copy)
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.01
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert fingerprint_model(copy) != before


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [("config.json", "rms_norm_eps", 1e-5), ("tokenizer_config.json", "bos_token", None)],
)
def test_what_else_changes_results_changes_the_fingerprint(copy, file, key, value):
    before = fingerprint_model(copy)
    content = json.loads((copy / file).read_text())
    (copy / file).write_text(json.dumps({**content, key: value}))
    assert fingerprint_model(copy) != before


def test_unknown_attention_is_refused():
    with pytest.raises(UsageError, match="unknown attention 'flash'"):
        load_model("tiny", attn="flash")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_says_so():
    with pytest.raises(UsageError, match="no CUDA device here"):
        load_model("tiny", device="cuda")
    with pytest.raises(UsageError, match="flash_attention_2 attention is not to be had"):
        load_model("tiny", attn="flash_attention_2")


def test_missing_tokenizer_is_named(copy):
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    with pytest.raises(GqaconvertError, match="its tokenizer cannot be loaded") as error:
        load_model(copy)
    assert error.value.at == str(copy)
