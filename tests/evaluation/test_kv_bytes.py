"""Bytes of a filled cache equal the formula, whatever the layers."""

from __future__ import annotations

import pytest
from zoo import ZOO, build, save, text_model

from gqaconvert.errors import UnsupportedModelError
from gqaconvert.evaluation.kv_bytes import measure_kv_bytes
from gqaconvert.modelling.models import LoadedModel

KINDS = ("llama", "mistral", "gemma2", "llama4_text", "falcon", "qwen3_next", "llava", "opt")
"""Plain, sliding, mixed, chunked, all heads cached, hybrid, composite, none but full heads."""


def _loaded(name, folder):
    model = build(name)
    save(model, folder)
    return LoadedModel(name, folder, text_model(model), None, "float32", "cpu", "eager", "", 10, 20)


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind in ZOO])
def test_measured_equals_formula(name, tmp_path):
    found = measure_kv_bytes(_loaded(name, tmp_path), (1, 5, 24, 4096), settings={})
    rows = found.detail["contexts"]
    assert [row["tokens"] for row in rows][:3] == [1, 5, 24]
    for row in rows:
        assert row["measured_bytes"] == row["formula_bytes"] > 0
    assert (found.detail["parameters"], found.detail["disk_bytes"]) == (10, 20)
    assert found.n == len(rows)


def test_value_is_bytes_a_token(tmp_path):
    loaded = _loaded("llama", tmp_path)
    config = loaded.model.config
    found = measure_kv_bytes(loaded, (8,), settings={})
    width = config.num_key_value_heads * config.head_dim
    assert found.value == 2 * config.num_hidden_layers * width * 4
    assert found.detail["measured_bytes_per_token"] == found.value


@pytest.mark.parametrize("name", ["recurrent_gemma", "t5"])
def test_what_has_no_such_cache_says_so(name, tmp_path):
    with pytest.raises(UnsupportedModelError):
        measure_kv_bytes(_loaded(name, tmp_path), (8,), settings={})
