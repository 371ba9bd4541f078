"""The local fit brings each layer nearer to its source, and changes nothing else."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from zoo import build, inputs, text_model

from gqaconvert.calibration.block_fit import FitOptions, fit_block
from gqaconvert.calibration.calibrate import calibrate
from gqaconvert.calibration.decoder_layers import find_attention
from gqaconvert.calibration.fit import fit_model
from gqaconvert.calibration.local_fit import LocalFit
from gqaconvert.calibration.windows import calibration_text, spread_windows, token_batches
from gqaconvert.errors import UsageError
from gqaconvert.modelling.models import load_model
from gqaconvert.surgery.convert import convert
from gqaconvert.surgery.in_memory import convert_model
from gqaconvert.surgery.verify_model import verify

OPTIONS = FitOptions(steps=30, lr=1e-2, bf16=False, held_out=0.25)
CLASSES = [
    "llama",
    "qwen2",  # biases
    "phi",  # parallel, partial rotary
    "phi3",  # fused
    "cohere2",  # sliding window, layers without positions
    "qwen3",  # norm on the keys of each head
    "olmo2",  # norm over all keys, norms after the blocks
    "gpt_oss",  # sinks, experts
    "jamba",  # layers without attention
]


def _batches(model, count=8):
    return [inputs(model, seed, length=12)["input_ids"] for seed in range(count)]


def _projections(model):
    return {
        name
        for attention in find_attention(model).values()
        for stem in attention.block.stems.values()
        for name in (f"{stem}.weight", f"{stem}.bias")
    }


@pytest.mark.parametrize("trained", ["attention", "attention+norm", "layer"])
@pytest.mark.parametrize("inputs_of", ["source", "converted"])
@pytest.mark.parametrize("name", CLASSES)
def test_lowers_the_error_of_every_layer(name, inputs_of, trained):
    if trained != "attention" and name not in ("llama", "phi"):
        pytest.skip("tried on two classes")
    source = text_model(build(name))
    converted = convert_model(source, num_kv_heads=2)
    before = copy.deepcopy(converted.state_dict())
    kept = copy.deepcopy(source.state_dict())
    options = replace(OPTIONS, inputs=inputs_of, trained=trained)
    reports = fit_model(source, converted, _batches(source), options)
    assert set(reports) == set(find_attention(source))
    assert all(report.error_after <= report.error_before for report in reports.values())
    assert sum(report.error_after < 0.9 * report.error_before for report in reports.values()) >= 1
    changed = {name for name, each in converted.state_dict().items()
               if not torch.equal(each, before[name])}  # fmt: skip
    if trained == "attention":
        assert changed
        assert changed <= _projections(converted)
    assert all(torch.equal(each, kept[name]) for name, each in source.state_dict().items())


def test_the_norm_is_trained_when_asked():
    source = build("llama")
    converted = convert_model(source, num_kv_heads=2)
    fit_model(source, converted, _batches(source), replace(OPTIONS, trained="attention+norm"))
    for number, layer in enumerate(converted.model.layers):
        other = source.model.layers[number]
        assert not torch.equal(layer.input_layernorm.weight, other.input_layernorm.weight)
        same = layer.post_attention_layernorm.weight, other.post_attention_layernorm.weight
        assert torch.equal(*same)


def test_fitted_on_source_inputs_to_the_source_outputs():
    """What the report says, measured again by hand on the held-out batches."""
    source = build("llama")
    converted = convert_model(source, num_kv_heads=2)
    batches = _batches(source)
    reports = fit_model(source, converted, batches, OPTIONS)
    seen = {number: [] for number in reports}
    attention, ours = find_attention(source), find_attention(converted)
    for number in reports:

        def compare(_, args, kwargs, output, number=number):
            with torch.no_grad():
                found = ours[number].module.forward(*args, **kwargs)[0]
            seen[number].append((found - output[0], output[0]))

        attention[number].module.register_forward_hook(compare, with_kwargs=True)
    with torch.no_grad():
        for token_ids in batches[-2:]:
            source(input_ids=token_ids, use_cache=False)
    for number, report in reports.items():
        wrong, energy = (
            sum(float(each[i].square().sum()) for each in seen[number]) for i in (0, 1)
        )
        assert report.error_after == pytest.approx(wrong / energy, rel=1e-3)


def test_on_converted_inputs_the_residual_stream_is_the_target():
    source = build("llama")
    converted = convert_model(source, num_kv_heads=2)
    batches = _batches(source)
    options = replace(OPTIONS, steps=1, lr=1e-12, inputs="converted")
    reports = fit_model(source, converted, batches, options)
    entering, after = {}, {}
    for name, model in (("source", source), ("converted", converted)):
        layer, held = model.model.layers[1], ([], [])
        layer.register_forward_pre_hook(lambda _, args, kept=held[0]: kept.append(args[0]))
        layer.self_attn.register_forward_hook(
            lambda _, __, output, kept=held[1]: kept.append(output[0])
        )
        with torch.no_grad():
            for token_ids in batches[-2:]:
                model(input_ids=token_ids, use_cache=False)
        entering[name], after[name] = (torch.stack(each) for each in held)
    wanted = after["source"] + entering["source"] - entering["converted"]
    expected = (after["converted"] - wanted).square().sum() / wanted.square().sum()
    assert reports[1].error_before == pytest.approx(float(expected), rel=1e-4)


def test_an_unchanged_model_has_no_error():
    source = build("llama", num_kv_heads=2)
    converted = copy.deepcopy(source)
    for inputs_of in ("source", "converted"):
        options = replace(OPTIONS, steps=2, inputs=inputs_of)
        for report in fit_model(source, converted, _batches(source), options).values():
            assert report.error_before < 1e-10
            assert report.kept_step == 0


def test_the_best_state_is_kept():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    wanted = {batch: torch.full((1, 2, 4), float(batch + 1)) for batch in range(4)}
    before = weight.detach().clone()
    report = fit_block(
        [weight],
        lambda batch: wanted[batch] @ weight / 4,
        wanted.__getitem__,
        4,
        replace(OPTIONS, lr=100.0),  # overshoots at once
    )
    assert report.kept_step == 0
    assert report.error_before == report.error_after == pytest.approx(0, abs=1e-12)
    assert torch.equal(weight, before)
    with pytest.raises(UsageError, match="two batches"):
        fit_block([weight], wanted.__getitem__, wanted.__getitem__, 1, OPTIONS)


@pytest.fixture(scope="module")
def statistics(tmp_path_factory):
    out = tmp_path_factory.mktemp("calibration") / "tiny.safetensors"
    calibrate("tiny", "bundled", out=out, tokens=2048, context=64)
    return out


def _local_fit(inputs_of="source", **options):
    chosen = FitOptions(steps=24, inputs=inputs_of, lr=1e-2)
    return LocalFit("tiny", "bundled", chosen, windows=16, context=64, **options)


@pytest.mark.parametrize("inputs_of", ["source", "converted"])
def test_as_a_step_of_a_conversion(statistics, tmp_path, inputs_of):
    """The same as converting in memory and fitting then, up to the rounding of weights."""
    with _local_fit(inputs_of, stream=inputs_of == "converted") as fit:
        conversion = convert(
            "tiny", tmp_path / "out", num_kv_heads=2, statistics=statistics, refine=fit
        )
    verify(conversion.out, "tiny")
    manifest = json.loads((conversion.out / "gqaconvert.json").read_text(encoding="utf-8"))
    loaded = load_model("tiny")
    from gqaconvert.surgery.statistics import StatisticsFile

    expected = convert_model(
        loaded.model, num_kv_heads=2, statistics=StatisticsFile(statistics), metric="plain"
    )
    start = copy.deepcopy(expected.state_dict())
    windows = spread_windows(loaded.tokenizer, calibration_text("bundled"), tokens=1024, context=64)
    options = FitOptions(steps=24, inputs=inputs_of, lr=1e-2)
    reports = fit_model(loaded.model, expected, token_batches(windows, 4), options)
    found = load_model(conversion.out).model.state_dict()
    for number, report in reports.items():
        facts = manifest["layers"][number]["fit"]
        assert facts["error_before"] == pytest.approx(report.error_before, rel=0.05)
        assert facts["error_after"] == pytest.approx(report.error_after, rel=0.1)
        assert facts["error_after"] < facts["error_before"]
    for name in _projections(expected) & set(start):
        ours, theirs, before = (
            each[name].float() for each in (found, expected.state_dict(), start)
        )
        assert (ours - theirs).norm() < 0.3 * (before - theirs).norm()


def test_identity_says_all_that_matters():
    same = _local_fit().identity
    assert _local_fit().identity == same
    assert _local_fit("converted").identity != same
    assert _local_fit(batch=2).identity != same
    assert _local_fit(dtype="float32").identity != same


def test_what_cannot_be_fitted_is_said_before():
    with pytest.raises(UsageError, match="attention alone"):
        LocalFit("tiny", "bundled", FitOptions(trained="layer"))
    with pytest.raises(UsageError, match="single batch"):
        LocalFit("tiny", "bundled", FitOptions(), windows=4, context=64, batch=4)
    with pytest.raises(UsageError, match="makes no sense"):
        FitOptions(steps=0)
