"""Adapters: what they train, that they start as nothing, and that merging keeps what they learn."""

from __future__ import annotations

import sys

import pytest
import torch
import zoo

from gqaconvert.errors import UsageError
from gqaconvert.settings.uptrain import LoraSettings
from gqaconvert.training.adapters import add_adapters, merge_adapters

pytest.importorskip("peft")

TOKENS = torch.arange(7, 20)[None]


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, use_cache=False).logits


def train(model, steps=3):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=0.05)
    model.train()
    for _ in range(steps):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimiser.step()
        optimiser.zero_grad()


@pytest.mark.parametrize("train_kv", [True, False])
@pytest.mark.parametrize("target", ["attention", "all"])
@pytest.mark.parametrize("name", ["llama-bias", "qwen3", "phi3", "gpt_bigcode", "mixtral"])
def test_merging_keeps_what_was_learnt_and_gives_the_plain_model_back(name, target, train_kv):
    model = zoo.build(name)
    names = [each for each, _ in model.named_parameters()]
    before = logits(model)
    add_adapters(model, LoraSettings(rank=4, target=target, train_kv=train_kv), seed=1)
    assert torch.equal(logits(model), before)
    train(model)
    after = logits(model)
    assert (after - before).abs().max() > 1e-3
    merged = merge_adapters(model)
    assert merged is model
    assert [each for each, _ in merged.named_parameters()] == names
    assert not any("lora" in type(each).__module__ for each in merged.modules())
    torch.testing.assert_close(logits(merged), after, rtol=1e-5, atol=1e-5)


def adapted(names):
    return {name.partition(".lora_")[0] for name in names if ".lora_" in name}


def test_attention_alone_or_all_linear_layers_but_never_the_head():
    attention = {f"model.layers.{n}.self_attn.{each}_proj" for n in range(2) for each in "qo"}
    mlp = {f"model.layers.{n}.mlp.{each}_proj" for n in range(2) for each in ("gate", "up", "down")}
    model = zoo.build("llama")
    assert adapted(add_adapters(model, LoraSettings(target="attention"))) == attention
    names = add_adapters(zoo.build("llama"), LoraSettings())
    assert adapted(names) == attention | mlp
    whole = {name for name in names if ".lora_" not in name}
    assert whole == {f"model.layers.{n}.self_attn.{e}_proj.weight" for n in range(2) for e in "kv"}


def test_without_train_kv_k_and_v_get_adapters_too():
    names = add_adapters(zoo.build("llama"), LoraSettings(train_kv=False, target="attention"))
    assert all(".lora_" in name for name in names)
    assert {name.rpartition(".")[2] for name in adapted(names)} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip


def test_the_seed_decides_the_adapters_and_nothing_else_changes():
    def first_factor(seed):
        torch.manual_seed(7)
        model = zoo.build("llama")
        add_adapters(model, LoraSettings(), seed=seed)
        after = torch.rand(1)
        factors = [each for name, each in model.named_parameters() if "lora_A" in name]
        return factors[0].clone(), after

    one, again, other = first_factor(1), first_factor(1), first_factor(2)
    assert torch.equal(one[0], again[0])
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


def test_scale_is_alpha_over_rank():
    model = zoo.build("llama")
    add_adapters(model, LoraSettings(rank=4, alpha=8.0))
    layer = model.model.layers[0].self_attn.q_proj
    base = layer.get_base_layer().weight.clone()
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(1.0)
    expected = base + 2.0 * torch.ones(len(base), 4) @ layer.lora_A["default"].weight
    merged = merge_adapters(model).model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(merged, expected)


def test_a_merge_that_is_not_finite_is_refused():
    model = zoo.build("llama")
    add_adapters(model, LoraSettings())
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.lora_B["default"].weight.fill_(torch.inf)
    with pytest.raises(UsageError, match="cannot be merged") as error:
        merge_adapters(model)
    assert error.value.at == "model.layers.1.self_attn.q_proj"


def test_without_peft_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match="peft, which is not installed") as error:
        add_adapters(zoo.build("llama"), LoraSettings())
    assert error.value.remedy == "pip install gqaconvert[peft]"
