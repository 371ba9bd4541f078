"""Going through a model layer by layer gives what its forward gives, whatever the class."""

from __future__ import annotations

import pytest
import torch
from zoo import MHA_ONLY, ZOO, build, inputs, save, text_model

from gqaconvert.calibration.decoder_layers import find_attention
from gqaconvert.calibration.offloaded import load_offloaded
from gqaconvert.calibration.walk import Walk
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.modelling.layers import find_layers

ENCODER_DECODERS = {"t5", "bart", "whisper"}
ODD = {"dory", "mllama"}  # layers that take what earlier ones left aside; layers left out
WALKED = sorted({*ZOO, *MHA_ONLY} - ENCODER_DECODERS - ODD)


def _tokens(model, batches=2):
    return [inputs(model, seed)["input_ids"] for seed in range(batches)]


def _go(walk):
    with torch.no_grad():
        for visit in walk:
            for batch in range(len(visit)):
                visit.leave(batch, visit.run(batch))


def _forward(model, token_ids):
    with torch.no_grad():
        return model.base_model(input_ids=token_ids, use_cache=False)[0]


@pytest.mark.parametrize("name", WALKED)
def test_equals_the_forward(name):
    model = text_model(build(name))
    tokens = _tokens(model)
    walk = Walk(model, tokens)
    _go(walk)
    for batch, token_ids in enumerate(tokens):
        assert (walk.finish(batch) - _forward(model, token_ids)).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "cohere2"])
def test_calls_differ_between_layers_and_are_kept_once(name):
    model = build(name)
    walk = Walk(model, _tokens(model, 3))
    first, second = walk.calls[0], walk.calls[1]
    for one, other in zip(first, second, strict=True):
        for key in ("attention_mask", "position_embeddings"):
            assert one.kwargs[key] is other.kwargs[key] or isinstance(one.kwargs[key], tuple)
    if name != "llama":  # sliding and full layers see through different masks
        masks = [call.kwargs["attention_mask"] for call in first]
        assert not torch.equal(masks[0], masks[-1])


@pytest.mark.parametrize("name", sorted(ODD))
def test_refuses_what_is_no_chain(name):
    model = build(name)
    with pytest.raises(UnsupportedModelError, match="decoder layers"):
        Walk(model, _tokens(model))


def test_refuses_hidden_states_passed_beside():
    model = build("llama")
    layers = model.model.layers
    kept = []
    layers[0].register_forward_hook(lambda _, __, output: kept.append(output))
    layers[1].register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "beside": kept[-1]}), with_kwargs=True
    )
    with pytest.raises(UnsupportedModelError, match="more from earlier layers"):
        Walk(model, _tokens(model))


def test_refuses_work_between_layers():
    model = build("llama")
    model.model.layers[1].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    with pytest.raises(UnsupportedModelError, match="between its decoder layers"):
        Walk(model, _tokens(model))


def test_leaves_the_model_as_it_was():
    model = build("llama")
    tokens = _tokens(model)
    before = _forward(model, tokens[0])
    _go(Walk(model, tokens))
    assert torch.equal(_forward(model, tokens[0]), before)
    assert all("forward" not in layer.__dict__ for layer in find_layers(model)[1])


@pytest.mark.parametrize("name", ["llama", "mixtral", "sarvam_moe", "gemma2", "exaone"])
def test_layers_left_on_disk(name, tmp_path):
    model = build(name)
    folder = save(model, tmp_path / "model")
    (tmp_path / "aside").mkdir()
    offloaded = load_offloaded(folder, dtype=torch.float32, device="cpu", aside=tmp_path / "aside")
    layer = find_layers(offloaded)[1][-1]
    assert all(parameter.is_meta for parameter in layer.parameters())
    tokens = _tokens(model)
    walk = Walk(offloaded, tokens)
    _go(walk)
    assert all(parameter.is_meta for parameter in layer.parameters())
    for batch, token_ids in enumerate(tokens):
        assert (walk.finish(batch) - _forward(model, token_ids)).abs().max() < 1e-5


def test_weights_are_fetched_once_a_layer(tmp_path):
    model = build("llama")
    (tmp_path / "aside").mkdir()
    folder = save(model, tmp_path / "model")
    offloaded = load_offloaded(folder, dtype=torch.float32, device="cpu", aside=tmp_path / "aside")
    walk = Walk(offloaded, _tokens(model, 3))
    with torch.no_grad():
        for visit in walk:
            weights = [parameter.data_ptr() for parameter in visit.layer.parameters()]
            for batch in range(len(visit)):
                visit.leave(batch, visit.run(batch))
                assert [p.data_ptr() for p in visit.layer.parameters()] == weights


def test_goes_on_from_files(tmp_path):
    model = build("cohere2")
    tokens = _tokens(model)
    first = Walk(model, tokens, folder=tmp_path)
    with torch.no_grad():
        for visit in first:
            if visit.number == 1:  # killed in the middle of this one
                visit.leave(0, visit.run(0))
                break
            for batch in range(len(visit)):
                visit.leave(batch, visit.run(batch))
    second = Walk(model, tokens, folder=tmp_path, begin=1, turn=1)
    _go(second)
    for batch, token_ids in enumerate(tokens):
        assert (second.finish(batch) - _forward(model, token_ids)).abs().max() < 1e-5


@pytest.mark.parametrize("name", sorted(set(ZOO) - ODD))
def test_finds_attention(name):
    model = text_model(build(name))
    found = find_attention(model)
    path, layers = find_layers(model)
    for number, attention in found.items():
        assert attention.path.startswith(f"{path}.{number}.")
        assert attention.module in set(layers[number].modules())
        assert attention.projection in set(attention.module.modules())
