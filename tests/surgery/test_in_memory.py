"""A model converted in memory is the model that the streamed conversion writes."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from zoo import ZOO, build, largest_difference, load_cleanly, logits, save
from zoo_proofs import check_cached_generation

import gqaconvert
from gqaconvert.errors import CheckpointError, UnsupportedModelError, UsageError

REPRESENTATIVES = (
    "llama", "qwen2", "olmo2", "stablelm-qk_norm", "phi3", "falcon-new", "gpt_bigcode",
    "sarvam_moe", "gemma3", "qwen2_5_vl", "qwen3_next", "mixtral",
)  # fmt: skip
RENAMED = {"sarvam_moe", "gemma3", "qwen2_5_vl"}
"""Classes whose tensors have other names on disk; `random` draws by name."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_same_state(a: PreTrainedModel, b: PreTrainedModel) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert torch.equal(tensor, right[name]), name


def heads_of(model: PreTrainedModel) -> int:
    return model.config.get_text_config().num_key_value_heads


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", ["mean", "first", "random"])
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_equals_the_streamed_conversion(name, method, dtype, tmp_path):
    kv = ZOO[name].legal[1]
    source = save(build(name, dtype=dtype, seed=3), tmp_path / "source")
    gqaconvert.convert(source, tmp_path / "out", num_kv_heads=kv, method=method, seed=4)
    model = load_cleanly(source)
    converted = gqaconvert.convert_model(model, num_kv_heads=kv, method=method, seed=4)
    streamed = load_cleanly(tmp_path / "out")
    assert type(converted) is type(streamed)
    assert converted.dtype == dtype
    if method == "random" and name in RENAMED:
        assert heads_of(converted) == heads_of(streamed) == kv
        return
    assert_same_state(converted, streamed)
    assert torch.equal(logits(converted), logits(streamed))


@pytest.mark.parametrize("name", ZOO)
def test_every_class_narrows_generates_and_widens(name):
    entry = ZOO[name]
    widest, kv = entry.legal[:2]
    model = build(name)
    narrow = gqaconvert.convert_model(model, num_kv_heads=kv)
    check_cached_generation(narrow, num_kv_heads=widest if entry.cache_all else kv)
    wide = gqaconvert.convert_model(narrow, num_kv_heads=widest)
    assert largest_difference(logits(wide), logits(narrow)) <= entry.tolerance
    tensors = [*wide.parameters(), *wide.buffers()]
    assert not any(tensor.is_meta for tensor in tensors)
    attributes = [value for module in wide.modules() for value in vars(module).values()]
    assert not any(isinstance(value, torch.Tensor) and value.is_meta for value in attributes)


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3", "dbrx"])
def test_the_source_is_left_as_it_is(name):
    model = build(name)
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    config, before = model.config.to_dict(), logits(model)
    gqaconvert.convert_model(model, num_kv_heads=1)
    assert model.config.to_dict() == config
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("name", ["llama", "stablelm-qk_norm", "gemma3"])
def test_untouched_parameters_share_their_storage(name):
    model = build(name)
    converted = gqaconvert.convert_model(model, num_kv_heads=2)
    original = dict(model.named_parameters())
    shared = {
        key
        for key, parameter in converted.named_parameters()
        if key in original and parameter.data_ptr() == original[key].data_ptr()
    }
    parameters = dict(converted.named_parameters())
    changed = {key for key in parameters if ".k_" in key or ".v_proj" in key}
    untouched = {key for key in changed if "vision" in key or (name == "gemma3" and "norm" in key)}
    assert shared == parameters.keys() - (changed - untouched)


def test_tied_embeddings_stay_tied():
    for tied in (True, False):
        converted = gqaconvert.convert_model(build("llama", tied=tied), num_kv_heads=2)
        head, embeddings = converted.get_output_embeddings(), converted.get_input_embeddings()
        assert (head.weight is embeddings.weight) == tied


def test_buffers_that_are_not_saved_are_those_of_the_source():
    model = build("gemma3_text")
    converted = gqaconvert.convert_model(model, num_kv_heads=1)
    buffers = dict(converted.named_buffers())
    assert any("inv_freq" in name for name in buffers)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffers[name], buffer), name
    assert not any("inv_freq" in name for name in converted.state_dict())


def test_modes_and_settings_are_kept():
    model = build("stablelm-qk_norm").train()
    model.generation_config.max_new_tokens = 7
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("k_layernorm" in name)
    for kv in (2, 1):
        converted = gqaconvert.convert_model(model, num_kv_heads=kv)
        assert converted.training
        assert converted.generation_config.max_new_tokens == 7
        trained = [name for name, p in converted.named_parameters() if p.requires_grad]
        assert len(trained) == 2 * kv
        assert all("k_layernorm" in name for name in trained)


def test_a_saved_result_loads_cleanly(tmp_path):
    converted = gqaconvert.convert_model(build("gemma4_text-k_is_v"), num_kv_heads=2)
    loaded = load_cleanly(save(converted, tmp_path))
    assert heads_of(loaded) == 2
    assert torch.equal(logits(loaded), logits(converted))


def test_an_equal_count_gives_the_model_itself():
    model = build("llama")
    assert gqaconvert.convert_model(model, num_kv_heads=4) is model


def test_a_result_can_be_trained():
    converted = gqaconvert.convert_model(build("llama"), num_kv_heads=1).train()
    tokens = torch.arange(10, 20)[None]
    converted(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in converted.parameters())


class TestRefused:
    def test_spread_over_devices(self):
        model = build("llama")
        model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
        with pytest.raises(UnsupportedModelError, match="several devices"):
            gqaconvert.convert_model(model, num_kv_heads=2)

    def test_one_device_by_map(self):
        model = build("llama")
        model.hf_device_map = {"": "cpu"}
        assert heads_of(gqaconvert.convert_model(model, num_kv_heads=2)) == 2

    def test_quantised_by_config(self):
        model = build("llama")
        model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        with pytest.raises(UnsupportedModelError, match="quantised"):
            gqaconvert.convert_model(model, num_kv_heads=2)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
    def test_quantised_by_its_weights(self, dtype):
        model = build("llama")
        weight = model.model.layers[0].self_attn.k_proj.weight
        weight.requires_grad_(False)
        weight.data = weight.data.to(dtype)
        with pytest.raises(UnsupportedModelError) as caught:
            gqaconvert.convert_model(model, num_kv_heads=2)
        assert "k_proj" in caught.value.at

    @pytest.mark.parametrize("count", [3, 0, -1, 8])
    def test_impossible_counts(self, count):
        with pytest.raises(UsageError):
            gqaconvert.convert_model(build("llama"), num_kv_heads=count)

    def test_an_unknown_method(self):
        with pytest.raises(UsageError, match="unknown method"):
            gqaconvert.convert_model(build("llama"), num_kv_heads=2, method="median")

    def test_a_class_without_kv_heads(self):
        with pytest.raises(UnsupportedModelError):
            gqaconvert.convert_model(build("bloom"), num_kv_heads=1)

    def test_values_that_are_not_finite(self):
        model = build("llama")
        with torch.no_grad():
            model.model.layers[1].self_attn.v_proj.weight[3, 3] = float("nan")
        with pytest.raises(CheckpointError, match="not finite"):
            gqaconvert.convert_model(model, num_kv_heads=2)
