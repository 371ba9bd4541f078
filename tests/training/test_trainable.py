"""What trains, by kind, in classes that lay attention out differently; and which stage it is."""

from __future__ import annotations

import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st

from gqaconvert.errors import UnsupportedModelError
from gqaconvert.modelling.loaded_attention import recognise_model
from gqaconvert.settings.uptrain import StageSettings
from gqaconvert.training.trainable import set_trainable, stage_at, trainable_names

LAYER = "model.layers.0."


def in_first_layer(model, kind, layer=LAYER):
    names = trainable_names(model, kind)
    return {name.removeprefix(layer) for name in names if name.startswith(layer)}


def weights(*modules):
    return {f"{module}.weight" for module in modules}


ATTENTION = weights(*(f"self_attn.{each}_proj" for each in "qkvo"))
KV = weights("self_attn.k_proj", "self_attn.v_proj")


@pytest.mark.parametrize(
    ("name", "attention", "kv"),
    [
        ("llama", ATTENTION, KV | weights("input_layernorm")),
        (
            "qwen3",
            ATTENTION | weights("self_attn.q_norm", "self_attn.k_norm"),
            KV | weights("self_attn.k_norm", "input_layernorm"),
        ),
        (  # normalises what a block gives, so nothing stands before its attention
            "olmo2",
            ATTENTION | weights("self_attn.q_norm", "self_attn.k_norm"),
            KV | weights("self_attn.k_norm"),
        ),
        (
            "phi3",
            weights("self_attn.qkv_proj", "self_attn.o_proj"),
            weights("self_attn.qkv_proj", "input_layernorm"),
        ),
    ],
)
def test_kinds_are_what_the_recipe_says(name, attention, kv):
    model = zoo.build(name)
    assert in_first_layer(model, "attention") == attention
    assert in_first_layer(model, "kv") == kv
    assert trainable_names(model, "all") == {each for each, _ in model.named_parameters()}
    assert not any("layers" not in each for each in trainable_names(model, "attention"))


def test_biases_go_with_their_projections():
    kinds = in_first_layer(zoo.build("llama-bias"), "kv")
    assert {"self_attn.k_proj.bias", "self_attn.v_proj.bias"} <= kinds
    assert "self_attn.q_proj.bias" not in kinds


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "falcon-new",
        "falcon-old",
        "gpt_bigcode",
        "dbrx",
        "gemma2",
        "glm4",
        "cohere",
        "phi",
        "lfm2",
    ],
)
def test_the_norm_that_trains_with_kv_is_the_one_that_keys_are_made_of(name):
    model = zoo.text_model(zoo.build(name))
    attention = recognise_model(model)
    block = attention.blocks[0]
    parent = block.module.rpartition(".")[0]
    kv = trainable_names(model, "kv")
    (norm,) = {
        each.rpartition(".")[0]
        for each in kv
        if each.startswith(f"{parent}.") and not each.startswith(f"{block.module}.")
    }
    key = next(each.name for each in block.head_tensors if each.role in ("key", "fused"))
    seen = {}
    model.get_submodule(norm).register_forward_hook(
        lambda _, inputs, output: seen.update(norm=output.clone())
    )
    model.get_submodule(key.rpartition(".")[0]).register_forward_pre_hook(
        lambda _, inputs: seen.update(key=inputs[0].clone())
    )
    with torch.no_grad():
        model(input_ids=torch.arange(7, 20)[None], use_cache=False)
    assert torch.equal(seen["norm"].flatten(), seen["key"].flatten())


def test_only_what_trains_requires_and_keeps_gradients():
    model = zoo.build("llama")
    model(input_ids=torch.arange(7, 20)[None]).logits.sum().backward()
    names = set_trainable(model, "kv")
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name in names)
        assert (parameter.grad is not None) == (name in names)
    set_trainable(model, "all")
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_tied_parameter_trains_under_its_first_name():
    model = zoo.build("llama", tied=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = trainable_names(model, "all")
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_towers_beside_the_language_model_stay_as_they_are():
    model = zoo.build("mllama")
    trained = trainable_names(model, "all")
    assert trained
    assert not any("vision_model" in name for name in trained)
    assert any("vision_model" in name for name, _ in model.named_parameters())


def test_a_model_without_known_attention_can_only_be_trained_whole():
    model = torch.nn.Module()
    model.model = torch.nn.Linear(2, 2)
    model.config = zoo.build("llama").config
    assert trainable_names(model, "all") == {"model.weight", "model.bias"}
    with pytest.raises(UnsupportedModelError, match="no attention projections"):
        trainable_names(model, "kv")


STAGES = (
    StageSettings(share=0.25, train="kv"),
    StageSettings(share=0.25, train="attention"),
    StageSettings(share=0.5),
)


def test_stages_take_their_share_of_the_steps():
    numbers = [stage_at(STAGES, step, 8)[0] for step in range(10)]
    assert numbers == [0, 0, 1, 1, 2, 2, 2, 2, 2, 2]
    assert stage_at(STAGES, 0, 8)[1].train == "kv"


@given(st.integers(1, 50), st.integers(1, 20))
def test_stages_come_in_order_and_the_last_one_ends_the_budget(total, count):
    stages = tuple(StageSettings(share=1 / count) for _ in range(count))
    numbers = [stage_at(stages, step, total)[0] for step in range(total)]
    assert numbers == sorted(numbers)
    assert stage_at(stages, total, total)[0] == count - 1
