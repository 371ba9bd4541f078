"""Second moments equal those computed the plain way, from whole matrices of attention weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from zoo import build, inputs, text_model

from gqaconvert.calibration import attention_weights
from gqaconvert.calibration.attention_weights import on_scale, sum_weights, weighing
from gqaconvert.calibration.decoder_layers import find_attention
from gqaconvert.calibration.moments import NEVER_REPORTED, LayerMoments
from gqaconvert.calibration.walk import Walk
from gqaconvert.errors import UnsupportedModelError

CLASSES = [
    "llama",
    "gemma2",  # soft cap, sliding window
    "gpt_oss",  # sinks
    "cohere2",  # sliding window
    "phi3",  # fused projection
    "qwen2",  # biases
    "gpt_bigcode",
]


def _plain(model, tokens):
    """Layer → inputs, averaged, attended by the formulas, in float64."""
    attention = find_attention(model)
    read = {number: [] for number in attention}
    weights = {number: [] for number in attention}
    removers = []
    for number, each in attention.items():
        removers += [
            each.projection.register_forward_pre_hook(
                lambda _, args, kept=read[number]: kept.append(args[0].double())
            ),
            each.module.register_forward_hook(
                lambda _, __, output, kept=weights[number]: kept.append(output[1].double())
            ),
        ]
    with torch.no_grad():
        for token_ids in tokens:
            model(input_ids=token_ids, use_cache=False)
    for remover in removers:
        remover.remove()
    found = {}
    for number in attention:
        sums, count = [0, 0, 0], 0
        for x, a in zip(read[number], weights[number], strict=True):
            x = torch.cat([x, torch.ones(*x.shape[:2], 1)], dim=-1)
            z = a @ x[:, None]
            heads = a.shape[1]
            sums[0] = sums[0] + torch.einsum("btm,btn->mn", x, x)
            sums[1] = sums[1] + torch.einsum("bhtm,bhtn->mn", z, z) / heads
            sums[2] = sums[2] + torch.einsum("bhij,bjm,bjn->mn", a, x, x) / heads
            count += x.shape[0] * x.shape[1]
        found[number] = [(each / count).numpy() for each in sums]
    return found


def _walked(model, tokens, **options):
    attention = find_attention(model)
    found = {}
    with weighing(model), torch.no_grad():
        for visit in Walk(model, tokens):
            moments = LayerMoments(attention[visit.number], **options)
            with moments.watching():
                for batch in range(len(visit)):
                    visit.leave(batch, visit.run(batch))
            found[visit.number] = moments
    return found


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CLASSES)
def test_equal_to_the_formulas(name, attn, monkeypatch):
    monkeypatch.setattr(attention_weights, "_BLOCK_QUERIES", 4)  # several blocks a window
    model = text_model(build(name))
    tokens = [inputs(model, seed)["input_ids"] for seed in range(3)]
    expected = _plain(model, tokens)
    if attn == "sdpa":
        if not model._supports_sdpa:
            pytest.skip("the class has no sdpa")
        model.set_attn_implementation("sdpa")
    found = _walked(model, tokens)
    assert model.config._attn_implementation == attn
    for number, moments in found.items():
        statistics = moments.statistics()
        assert moments.fault is None
        assert statistics.tokens == 3 * tokens[0].numel()
        kinds = (statistics.inputs, statistics.averaged, statistics.attended)
        for ours, theirs in zip(kinds, expected[number], strict=True):
            assert ours.dtype == np.float64
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


def test_the_constant_stands_last():
    model = build("llama")
    tokens = [inputs(model)["input_ids"]]
    for moments in _walked(model, tokens).values():
        statistics = moments.statistics()
        for matrix in (statistics.inputs, statistics.averaged, statistics.attended):
            assert matrix[-1, -1] == pytest.approx(1, abs=1e-5)
            assert np.array_equal(matrix, matrix.T)
            assert np.linalg.eigvalsh(matrix).min() > -1e-5


def test_inputs_alone():
    model = build("llama")
    for moments in _walked(model, [inputs(model)["input_ids"]], weighted=False).values():
        statistics = moments.statistics()
        assert statistics.averaged is None
        assert statistics.attended is None


def test_a_class_that_hides_its_weights():
    model = build("falcon-new")
    found = _walked(model, [inputs(model)["input_ids"]])
    for moments in found.values():
        assert moments.fault == NEVER_REPORTED
        assert moments.statistics().averaged is None
        assert np.isfinite(moments.statistics().inputs).all()


def test_weights_of_another_formula_are_refused():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 9, 8, generator=generator)
    key, value = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(2))
    causal = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    sum_weights(query, key, None, {}, (value, causal))
    for options in ({"scaling": 1.0}, {"softcap": 0.5}, {"s_aux": torch.ones(4)}):
        with pytest.raises(UnsupportedModelError, match="usual form"):
            sum_weights(query, key, None, options, (value, causal))
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    with pytest.raises(UnsupportedModelError, match="usual form"):
        sum_weights(query, key, mask, {}, (value, causal))


def test_attention_that_looks_ahead(monkeypatch):
    monkeypatch.setattr(attention_weights, "_BLOCK_QUERIES", 4)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 9, 8, generator=generator)
    key = torch.randn(1, 2, 9, 8, generator=generator)
    mask = torch.zeros(1, 1, 9, 9)
    mask[..., -1] = torch.finfo(torch.float32).min  # every query sees all keys but the last
    found = sum_weights(query, key, mask, {})
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5 + mask
    weights = scores.softmax(-1)
    torch.testing.assert_close(found.shared, (weights.transpose(-1, -2) @ weights).sum(1))
    torch.testing.assert_close(found.received, weights.sum((1, 2)))


def test_results_stay_the_same_on_the_scale():
    model = build("llama")
    token_ids = inputs(model)["input_ids"]
    attention = find_attention(model)[0]
    with torch.no_grad():
        expected = model(input_ids=token_ids).logits
        with weighing(model), on_scale(attention.module) as scale:
            found = model(input_ids=token_ids).logits
    assert torch.equal(found, expected)
    assert (scale.calls, scale.last.heads) == (1, 4)
