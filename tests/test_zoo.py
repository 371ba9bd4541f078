"""The zoo is what it says: its models build, load, and change with the KV heads as recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from zoo import (
    MHA_ONLY,
    NUM_HEADS,
    REFUSED,
    ZOO,
    build,
    largest_difference,
    load_cleanly,
    logits,
    logits_close,
    save,
    stored_shapes,
)
from zoo_proofs import check_cached_generation, read_tensors, repeat_kv_heads, set_kv_heads


def _changed(wide: dict[str, tuple[int, ...]], narrow: dict[str, tuple[int, ...]]) -> set[str]:
    return {name for name, shape in wide.items() if narrow.get(name) != shape}


def _assert_same_weights(model, loaded):
    state = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def _leaves(folder: Path) -> set[tuple[str, str]]:
    def walk(level, path):
        if isinstance(level, dict):
            for key, value in level.items():
                yield from walk(value, [*path, key])
        else:
            yield ".".join(path), json.dumps(level)

    return set(walk(json.loads((folder / "config.json").read_text()), []))


@pytest.mark.parametrize("name", ZOO)
def test_entry_is_what_it_says(name, tmp_path):
    entry = ZOO[name]
    models = {kv: build(name, num_kv_heads=kv) for kv in entry.legal}
    folders = {kv: save(model, tmp_path / str(kv)) for kv, model in models.items()}
    shapes = {kv: stored_shapes(folder) for kv, folder in folders.items()}
    widest, *narrower = entry.legal
    for kv, model in models.items():
        before = logits(model)
        assert not before.isnan().any()
        loaded = load_cleanly(folders[kv])
        assert type(loaded) is type(model)
        assert logits_close(before, logits(loaded))
        _assert_same_weights(model, loaded)
        heads = NUM_HEADS if entry.cache_all else kv
        check_cached_generation(model, num_kv_heads=heads)
    recorded = {tensor for tensor in shapes[widest] if entry.is_changed(tensor)}
    layers = {re.sub(r"\D*(\d+)\..*", r"\1", tensor) for tensor in recorded}
    assert len(layers) > 1 or name.startswith("zamba"), "needs two attention layers"
    kept = {tensor for tensor in recorded if ".norms." in tensor}  # of the heads that stay
    for kv in narrower:
        changed = _changed(shapes[widest], shapes[kv])
        assert recorded - kept <= changed <= recorded
        settings = [_leaves(folders[each]) for each in (widest, kv)]
        assert {key for key, _ in set.symmetric_difference(*settings)} == {*entry.config_changes}
        assert set(shapes[kv]) <= set(shapes[widest])


def _pairs():
    return [(name, kv) for name, entry in ZOO.items() for kv in entry.legal[1:]]


@pytest.mark.parametrize(("name", "kv"), _pairs())
def test_neighbouring_query_heads_share_a_kv_head(name, kv, tmp_path):
    entry = ZOO[name]
    wide = stored_shapes(save(build(name), tmp_path / "wide"))
    model = build(name, num_kv_heads=kv)
    expected = logits(model)
    folder = save(model, tmp_path / "narrow")
    repeat_kv_heads(folder, entry, num_kv_heads=kv, shapes=wide)
    set_kv_heads(folder, entry, entry.legal[0])
    assert stored_shapes(folder) == wide
    assert largest_difference(logits(load_cleanly(folder)), expected) <= entry.tolerance


@pytest.mark.parametrize("name", MHA_ONLY)
def test_mha_only_class_ignores_the_field(name, tmp_path):
    model = build(name)
    assert logits_close(logits(model), logits(load_cleanly(save(model, tmp_path / "as is"))))
    model.config.num_key_value_heads = 2
    pretended = type(model)(model.config)
    shapes = stored_shapes(save(pretended, tmp_path / "pretended"))
    assert shapes == stored_shapes(tmp_path / "as is")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_class_builds_and_loads(name, tmp_path):
    assert REFUSED[name].refusal
    model = build(name)
    before = logits(model)
    assert not before.isnan().any()
    assert logits_close(before, logits(load_cleanly(save(model, tmp_path))))


def test_weights_depend_on_the_seed_alone():
    state = torch.get_rng_state()
    first, again, other = (build("qwen2", seed=seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("name", ["llama-bias", "stablelm-qk_norm", "qwen3", "llava"])
def test_no_parameter_is_constant(name):
    for parameter, value in build(name).named_parameters():
        assert value.numel() == 1 or value.float().std() > 0.01, parameter


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.ties])
def test_tied_embeddings_are_stored_once(name, tied, tmp_path):
    model = build(name, tied=tied)
    folder = save(model, tmp_path, shards=2)
    heads = [tensor for tensor in stored_shapes(folder) if tensor.endswith("lm_head.weight")]
    assert len(heads) == (0 if tied else 1)
    _assert_same_weights(model, load_cleanly(folder))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "falcon-new", "mixtral"])
def test_half_precision_models_load_as_they_were(name, dtype, tmp_path):
    model = build(name, dtype=dtype)
    loaded = load_cleanly(save(model, tmp_path))
    assert loaded.dtype == dtype
    assert largest_difference(logits(model), logits(loaded)) == 0


def test_shards_and_types_on_disk(tmp_path):
    model = build("llama")
    whole = save(model, tmp_path / "whole")
    parts = save(model, tmp_path / "parts", shards=4)
    half = save(model, tmp_path / "half", dtype=torch.bfloat16)
    assert len(list(whole.glob("*.safetensors"))) == 1
    assert len(list(parts.glob("*.safetensors"))) >= 4
    assert stored_shapes(whole) == stored_shapes(parts)
    assert {tensor.dtype for tensor in read_tensors(half).values()} == {torch.bfloat16}
    assert model.dtype == torch.float32
    assert load_cleanly(half).dtype == torch.bfloat16


def _misnamed(tensors):
    tensors["model.layers.0.self_attn.k_proj.other"] = tensors.pop(
        "model.layers.0.self_attn.k_proj.weight"
    )


def _narrowed(tensors):
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:-16].contiguous()


@pytest.mark.parametrize("spoil", [_misnamed, _narrowed])
def test_a_spoilt_checkpoint_does_not_load_cleanly(spoil, tmp_path):
    from safetensors.torch import save_file

    folder: Path = save(build("llama"), tmp_path)
    tensors = read_tensors(folder)
    spoil(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(AssertionError, match=r"self_attn\.k_proj"):
        load_cleanly(folder)


def test_a_wrong_head_count_in_the_cache_is_noticed():
    with pytest.raises(AssertionError):
        check_cached_generation(build("llama", num_kv_heads=2), num_kv_heads=4)
