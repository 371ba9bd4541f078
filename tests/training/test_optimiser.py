"""What decays, what the optimiser holds, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
import zoo

from gqaconvert.settings.uptrain import UptrainSettings
from gqaconvert.training.optimiser import make_optimiser, parameter_groups
from gqaconvert.training.trainable import set_trainable, trainable_names


def settings(**changes):
    data = {"datasets": [{"path": "bundled"}], "context": 64}
    plain = {"data": data, "budget": {"steps": 4}, "batch_tokens": 64, "lr": 0.01}
    return UptrainSettings.model_validate({**plain, "weight_decay": 0.1, **changes})


def decaying(model):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    first = parameter_groups(model, 0.1)[0]
    assert first["weight_decay"] == 0.1
    return {names[id(parameter)] for parameter in first["params"]}


def test_matrices_decay_and_nothing_else():
    model = zoo.build("llama-bias", tied=False)
    expected = {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and "embed" not in name
    }
    assert decaying(model) == expected
    assert "lm_head.weight" in expected
    assert sum(len(group["params"]) for group in parameter_groups(model, 0.1)) == len(
        list(model.parameters())
    )


def test_a_head_tied_to_the_embeddings_does_not_decay():
    model = zoo.build("llama", tied=True)
    assert not decaying(model) & {"lm_head.weight", "model.embed_tokens.weight"}


@pytest.mark.parametrize("name", ["cohere-qk_norm", "mixtral"])
def test_norms_of_each_head_do_not_decay_and_stacked_experts_do(name):
    model = zoo.build(name)
    found = decaying(model)
    several = {key: each.ndim for key, each in model.named_parameters() if each.ndim > 1}
    norms = {key for key in several if "norm" in key}
    experts = {key for key, ndim in several.items() if ndim == 3}
    assert not found & norms
    assert experts <= found
    assert norms or experts


def trained(model, optimiser):
    held = {id(each) for group in optimiser.param_groups for each in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in held}


def test_it_holds_what_any_stage_trains():
    model = zoo.build("llama")
    both = [{"share": 0.5, "train": "kv"}, {"share": 0.5, "train": "attention"}]
    wanted = trainable_names(model, "kv") | trainable_names(model, "attention")
    assert trained(model, make_optimiser(model, settings(stages=both))) == wanted
    # ... whatever the present stage freezes
    set_trainable(model, "kv")
    optimiser = make_optimiser(model, settings())
    assert trained(model, optimiser) == trainable_names(model, "all")


def test_what_a_stage_freezes_is_neither_moved_nor_decayed():
    model = zoo.build("llama")
    optimiser = make_optimiser(model, settings(weight_decay=0.5))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    names = set_trainable(model, "kv")
    model(input_ids=torch.arange(7, 20)[None]).logits.square().sum().backward()
    optimiser.step()
    moved = {
        name
        for name, parameter in model.named_parameters()
        if not torch.equal(parameter, before[name])
    }
    assert moved == names
    assert len(optimiser.state) == len(names)


def test_settings_reach_adamw_and_it_is_fused():
    wanted = settings(betas=[0.8, 0.9], eps=1e-6)
    optimiser = make_optimiser(zoo.build("llama"), wanted)
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.1, 0.0]
    for group in optimiser.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.01, (0.8, 0.9), 1e-6)
        assert group["fused"]


def test_fused_steps_are_those_of_the_plain_formula():
    torch.manual_seed(0)
    model, other = zoo.build("llama"), zoo.build("llama")
    other.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(
        parameter_groups(other, 0.1), lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=False
    )
    for each, optimiser in ((model, make_optimiser(model, settings())), (other, plain)):
        for _ in range(3):
            each(input_ids=torch.arange(7, 20)[None]).logits.square().mean().backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
