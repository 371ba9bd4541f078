"""Angles of RoPE are those that transformers turns by."""

from __future__ import annotations

import pytest
import torch
from scrambling import open_model
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import build

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def angles_of_transformers(model) -> torch.Tensor:
    return next(b for name, b in model.named_buffers() if name.endswith("rotary_emb.inv_freq"))


@pytest.mark.parametrize("name", ["llama", "glm", "phi", "smollm3", "cohere2", "qwen2_5_vl"])
def test_of_classes(name):
    model = build(name)
    (_, freedom), *_ = open_model(model).blocks
    torch.testing.assert_close(torch.tensor(freedom.angles), angles_of_transformers(model))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        LLAMA3,
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_of_scalings(rope):
    model = LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=rope))
    [(_, freedom)] = open_model(model).blocks
    torch.testing.assert_close(torch.tensor(freedom.angles), angles_of_transformers(model))


def test_scalings_that_depend_on_the_length_are_left_unknown():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    [(_, freedom)] = open_model(LlamaForCausalLM(LlamaConfig(**SMALL, rope_parameters=rope))).blocks
    assert freedom.angles is None


def test_nothing_turns_where_there_is_no_rope():
    opened = open_model(build("smollm3"))
    assert [freedom.angles is None for _, freedom in opened.blocks] == [False, True]
