"""Counted arithmetic against torch's counter, and MFU on GPUs by the names drivers give them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from gqaconvert.kv_cache.model_config import parse_config
from gqaconvert.settings.uptrain import UptrainSettings
from gqaconvert.training.flops import flops_of, forward_flops, mfu, training_flops_per_token
from gqaconvert.training.model_facts import model_facts

CONTEXT = 128
SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def build(kind="llama", **changes):
    config = CONFIG_MAPPING[kind](**{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model, model_facts(parse_config(config.to_dict(), "config.json"))


def count(model, backward=False):
    tokens = torch.randint(512, (2, CONTEXT))
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=tokens, use_cache=False).logits
        if backward:
            logits.sum().backward()
    return counter.get_total_flops() / tokens.numel()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 8, "head_dim": 32}),
        ("qwen3", {"head_dim": 32}),
        ("phi3", {"pad_token_id": 0}),
        ("starcoder2", {}),
    ],
)
def test_a_forward_pass_takes_what_torch_counts(kind, changes):
    model, facts = build(kind, **changes)
    # torch counts all keys of a sequence, whether attention looks at them or not.
    assert forward_flops(facts, CONTEXT, causal=False) == pytest.approx(count(model), rel=0.02)


def test_a_training_step_takes_what_torch_counts():
    model, facts = build()
    whole = training_flops_per_token(facts, CONTEXT).model
    square = forward_flops(facts, CONTEXT, causal=False) - forward_flops(facts, CONTEXT)
    # Fused attention computes its scores again backward, which is no part of the mathematics.
    again = 2 * forward_flops(facts, CONTEXT, causal=False) - 2 * forward_flops(facts, 0)
    found = count(model, backward=True)
    assert whole + 3 * square == pytest.approx(found, abs=again / 4 + 0.02 * found)


def test_activations_computed_again_count_for_the_hardware_only():
    _, facts = build()
    plain = training_flops_per_token(facts, CONTEXT)
    again = training_flops_per_token(facts, CONTEXT, checkpointing=True)
    assert plain.model == plain.hardware == again.model
    head = 2 * facts.head_matrix
    assert again.hardware - again.model == forward_flops(facts, CONTEXT) - head


def test_a_teacher_adds_its_forward_pass_and_frozen_weights_save_theirs():
    _, facts = build()
    plain = training_flops_per_token(facts, CONTEXT).model
    taught = training_flops_per_token(facts, CONTEXT, teacher=facts).model
    assert taught - plain == forward_flops(facts, CONTEXT)
    frozen = training_flops_per_token(facts, CONTEXT, trained_share=0.0).model
    assert plain - frozen == 2 * (facts.active_matrices + facts.head_matrix)


def test_a_window_bounds_the_keys():
    config = {"model_type": "mistral", **SIZES}
    wide, narrow = (
        model_facts(parse_config({**config, "sliding_window": window}, "config.json"))
        for window in (4096, 16)
    )
    per_key = 2 * 8 * (16 + 16) * 3
    keys = sum(min(place + 1, 16) for place in range(CONTEXT)) / CONTEXT
    linear = forward_flops(wide, CONTEXT) - per_key * (CONTEXT + 1) / 2
    assert forward_flops(narrow, CONTEXT) == pytest.approx(linear + per_key * keys)


def test_a_recipe_with_a_cache_runs_no_teacher():
    _, facts = build()
    plain = {
        "data": {"datasets": [{"path": "bundled"}], "context": CONTEXT},
        "budget": {"steps": 1}, "batch_tokens": CONTEXT, "lr": 1e-4,
    }  # fmt: skip

    def model(**changes):
        settings = UptrainSettings.model_validate({**plain, **changes})
        return flops_of(settings, facts, facts).model

    alone = training_flops_per_token(facts, CONTEXT).model
    assert model() == alone + forward_flops(facts, CONTEXT)
    assert model(teacher={"cache": "folder"}) == alone
    assert model(loss={"next_token": 1.0, "distill": 0.0}) == alone
    assert model(lora={}, teacher={"cache": "folder"}) < alone


def test_seven_billion_parameters_take_six_operations_each_and_attention():
    config = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
        "intermediate_size": 11008, "num_attention_heads": 32,
    }  # fmt: skip
    facts = model_facts(parse_config(config, "config.json"))
    found = training_flops_per_token(facts, 4096).model
    without_embeddings = facts.parameters - facts.embeddings
    assert found == pytest.approx(6 * without_embeddings + 6 * 32 * 4096 * 4096, rel=0.001)


def test_mfu_is_the_share_of_the_peak_where_that_is_known():
    assert mfu(1e4, 40e9, "NVIDIA H100 80GB HBM3") == pytest.approx(1e4 * 40e9 / 989e12)
    assert mfu(1e4, 40e9, "NVIDIA A100-PCIE-40GB") == pytest.approx(1e4 * 40e9 / 312e12)
    assert mfu(1e4, 40e9, "a chip of tomorrow") is None
