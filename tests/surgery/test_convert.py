"""Whole conversions of small checkpoints, against pooling written out by hand."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from checkpoints import NUMPY, folder_bytes, read_tensors, write_llama

import gqaconvert
from gqaconvert.errors import RefusedError, UsageError

HEAD_DIM = 8


def pooled_by_hand(array: np.ndarray, kv_heads: int, wanted: int, method: str) -> np.ndarray:
    heads = array.reshape(kv_heads, HEAD_DIM, -1).astype(np.float64)
    groups = heads.reshape(wanted, kv_heads // wanted, HEAD_DIM, -1)
    chosen = groups[:, 0] if method == "first" else groups.mean(1)
    return chosen.reshape(wanted * HEAD_DIM, *array.shape[1:])


def is_head_tensor(name: str) -> bool:
    return re.search(r"\.[kv]_proj\.(weight|bias)$", name) is not None


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(("kv_heads", "wanted"), [(4, 2), (4, 1), (2, 1)])
@pytest.mark.parametrize("method", ["mean", "first"])
def test_pools_k_and_v_and_leaves_every_other_byte(
    tmp_path, dtype, shards, kv_heads, wanted, method
):
    source = write_llama(tmp_path / "in", shards=shards, kv_heads=kv_heads, dtype=dtype, bias=True)
    gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=wanted, method=method)
    output = read_tensors(tmp_path / "out")
    assert output.keys() == source.keys()
    for name, before in source.items():
        after = output[name].view(NUMPY[dtype])
        if not is_head_tensor(name):
            assert after.tobytes() == before.tobytes(), name
            continue
        expected = pooled_by_hand(before, kv_heads, wanted, method)
        assert after.shape == expected.shape
        if method == "first":
            assert (after.astype(np.float64) == expected).all(), name
        else:
            rounding = float(np.finfo(np.float32).eps if dtype in ("F32", "F64") else 2**-8)
            np.testing.assert_allclose(after.astype(np.float64), expected, rtol=rounding, atol=1e-7)


def test_random_heads_replace_k_and_v_only(tmp_path):
    source = write_llama(tmp_path / "in", dtype="F32")
    gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=2, method="random", seed=3)
    output = read_tensors(tmp_path / "out")
    for name, before in source.items():
        if is_head_tensor(name):
            assert abs(output[name].std() / 0.02 - 1) < 0.2
        else:
            assert output[name].tobytes() == before.tobytes()


@pytest.mark.parametrize("method", ["mean", "first", "random"])
def test_expanding_a_pooled_model_and_pooling_it_again_gives_the_same_bytes(tmp_path, method):
    write_llama(tmp_path / "mha", shards=2, bias=True)
    gqaconvert.convert(tmp_path / "mha", tmp_path / "gqa", num_kv_heads=2, method=method)
    gqaconvert.expand(tmp_path / "gqa", tmp_path / "wide", num_kv_heads=4)
    gqaconvert.convert(tmp_path / "wide", tmp_path / "again", num_kv_heads=2)
    once, twice = read_tensors(tmp_path / "gqa"), read_tensors(tmp_path / "again")
    assert once.keys() == twice.keys()
    assert all(once[name].tobytes() == twice[name].tobytes() for name in once)


def test_expanding_repeats_each_head_in_place(tmp_path):
    source = write_llama(tmp_path / "in", kv_heads=2, dtype="F32")
    gqaconvert.expand(tmp_path / "in", tmp_path / "out", num_kv_heads=4)
    name = "model.layers.1.self_attn.v_proj.weight"
    heads = source[name].reshape(2, HEAD_DIM, -1)
    assert (
        read_tensors(tmp_path / "out")[name].reshape(4, HEAD_DIM, -1) == heads[[0, 0, 1, 1]]
    ).all()


def test_the_source_is_not_touched(tmp_path):
    write_llama(tmp_path / "in", shards=2)
    before = folder_bytes(tmp_path / "in")
    gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=1)
    assert folder_bytes(tmp_path / "in") == before


def test_config_changes_only_what_must_change_and_keeps_its_order(tmp_path):
    write_llama(tmp_path / "in")
    gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=2)
    before = (tmp_path / "in" / "config.json").read_text()
    after = (tmp_path / "out" / "config.json").read_text()
    expected = before.replace('"num_key_value_heads": 4', '"num_key_value_heads": 2')
    expected = expected.replace(
        '"eos_token_id": 2\n', f'"eos_token_id": 2,\n  "head_dim": {HEAD_DIM}\n'
    )
    assert after == expected


def test_other_files_are_copied_byte_for_byte_and_stale_weights_are_not(tmp_path):
    write_llama(tmp_path / "in")
    (tmp_path / "in" / "assets").mkdir()
    (tmp_path / "in" / "assets" / "logo.svg").write_bytes(b"<svg/>")
    (tmp_path / "in" / "original").mkdir()
    stale = [
        "pytorch_model.bin",
        "model-q4.gguf",
        "original/params.json",
        "consolidated.safetensors",
    ]
    for name in stale:
        (tmp_path / "in" / name).write_bytes(b"old")
    conversion = gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=2)
    before, after = folder_bytes(tmp_path / "in"), folder_bytes(tmp_path / "out")
    for name in (
        "generation_config.json",
        "LICENSE",
        "tokenizer.json",
        "chat_template.jinja",
        "assets/logo.svg",
    ):
        assert after[name] == before[name]
    assert not set(stale) & set(after)
    assert set(conversion.sidecars.left_out) == set(stale)


def test_the_card_keeps_the_source_card_and_licence(tmp_path):
    write_llama(tmp_path / "in")
    gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=2)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: llama2\ntags:\n- chat\n- gqaconvert\n")
    assert "# Source card" in card
    assert "4 key and value heads" in card


def test_sharding_of_the_source_is_kept(tmp_path):
    write_llama(tmp_path / "in", shards=3)
    gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=2)
    maps = [
        json.loads((tmp_path / f / "model.safetensors.index.json").read_text())
        for f in ("in", "out")
    ]
    assert maps[0]["weight_map"] == maps[1]["weight_map"]
    total = sum(array.nbytes for array in read_tensors(tmp_path / "out").values())
    assert maps[1]["metadata"]["total_size"] == total


@pytest.mark.parametrize("limit", [1, 3_000, 10**9])
def test_max_shard_size_divides_anew_with_equal_tensors(tmp_path, limit):
    write_llama(tmp_path / "in", shards=2)
    gqaconvert.convert(tmp_path / "in", tmp_path / "plain", num_kv_heads=2)
    gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=2, max_shard_size=limit)
    plain, output = read_tensors(tmp_path / "plain"), read_tensors(tmp_path / "out")
    assert {n: a.tobytes() for n, a in plain.items()} == {n: a.tobytes() for n, a in output.items()}
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == {1: len(plain), 10**9: 1}.get(limit, len(files))
    assert (limit == 10**9) != (tmp_path / "out" / "model.safetensors.index.json").is_file()
    for file in files:
        held = [a.nbytes for a in read_file(file).values()]
        assert sum(held) <= limit or len(held) == 1


def read_file(path):
    from safetensors import safe_open

    with safe_open(path, framework="np") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def test_another_dtype_casts_everything_and_says_so_in_the_config(tmp_path):
    source = write_llama(tmp_path / "in", dtype="F32")
    gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=2, dtype="bfloat16")
    output = read_tensors(tmp_path / "out")
    for name, before in source.items():
        if not is_head_tensor(name):
            assert output[name].tobytes() == before.astype(NUMPY["BF16"]).tobytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert "dtype" not in config


def test_equal_count_is_a_no_op_with_a_word(tmp_path):
    write_llama(tmp_path / "in")
    conversion = gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=4)
    assert not conversion.written
    assert "4 KV heads already" in conversion.notices[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wanted", [3, 5, 0, 8])
def test_impossible_counts_name_the_possible_ones(tmp_path, wanted):
    write_llama(tmp_path / "in")
    with pytest.raises(UsageError) as caught:
        gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=wanted)
    if wanted == 3:
        assert caught.value.remedy == "--kv-heads 2 or 1"
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]


def test_dry_run_writes_nothing(tmp_path):
    write_llama(tmp_path / "in")
    conversion = gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=2, dry_run=True)
    assert conversion.plan is not None
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]


class TestOutputFolder:
    def test_non_empty_is_refused(self, tmp_path):
        write_llama(tmp_path / "in")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")
        for overwrite in (False, True):
            with pytest.raises(RefusedError):
                gqaconvert.convert(
                    tmp_path / "in", tmp_path / "out", num_kv_heads=2, overwrite=overwrite
                )
        assert folder_bytes(tmp_path / "out") == {"notes.txt": b"mine"}

    def test_overwrite_replaces_an_earlier_conversion(self, tmp_path):
        write_llama(tmp_path / "in")
        gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=2)
        with pytest.raises(RefusedError):
            gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=1)
        gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=1, overwrite=True)
        assert (
            json.loads((tmp_path / "out" / "config.json").read_text())["num_key_value_heads"] == 1
        )
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]

    @pytest.mark.parametrize("out", ["in", "in/out", "."])
    def test_within_the_source_or_around_it_is_refused(self, tmp_path, out):
        write_llama(tmp_path / "in")
        with pytest.raises(RefusedError):
            gqaconvert.convert(tmp_path / "in", tmp_path / out, num_kv_heads=2)

    def test_name_defaults_to_the_model_and_its_heads(self, tmp_path, monkeypatch):
        write_llama(tmp_path / "models" / "llama")
        monkeypatch.chdir(tmp_path)
        gqaconvert.convert("models/llama", num_kv_heads=2)
        gqaconvert.convert("llama-gqa2", num_kv_heads=1)
        gqaconvert.expand("llama-mqa", num_kv_heads=4)
        assert sorted(p.name for p in tmp_path.iterdir()) == [
            "llama-gqa2",
            "llama-mha",
            "llama-mqa",
            "models",
        ]

    def test_too_little_space_is_refused_before_the_first_byte(self, tmp_path, monkeypatch):
        write_llama(tmp_path / "in")
        usage = type("Usage", (), {"free": 1000})
        monkeypatch.setattr("gqaconvert.checkpoint.staging.shutil.disk_usage", lambda _: usage)
        with pytest.raises(RefusedError, match="only 1 kB are free"):
            gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=2)
        assert list(tmp_path.iterdir()) == [tmp_path / "in"]


class TestTensorParallel:
    def test_degree_must_divide_the_query_heads(self, tmp_path):
        write_llama(tmp_path / "in")
        with pytest.raises(UsageError, match="query heads"):
            gqaconvert.convert(tmp_path / "in", num_kv_heads=2, tensor_parallel=3, dry_run=True)

    def test_below_the_degree_it_is_said_that_nothing_more_is_saved(self, tmp_path):
        write_llama(tmp_path / "in")
        conversion = gqaconvert.convert(
            tmp_path / "in", num_kv_heads=1, tensor_parallel=4, dry_run=True
        )
        assert any("nothing more is saved" in notice for notice in conversion.notices)
        quiet = gqaconvert.convert(tmp_path / "in", num_kv_heads=2, tensor_parallel=2, dry_run=True)
        assert not quiet.notices


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("projection", ["k", "v"])
def test_values_that_are_not_finite_are_refused_and_nothing_is_left(tmp_path, value, projection):
    from checkpoints import llama_tensors, write_safetensors

    from gqaconvert.errors import CheckpointError

    write_llama(tmp_path / "in")
    tensors = llama_tensors()
    name = f"model.layers.1.self_attn.{projection}_proj.weight"
    tensors[name][13, 5] = value
    write_safetensors(tmp_path / "in" / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match="not finite") as caught:
        gqaconvert.convert(tmp_path / "in", tmp_path / "out", num_kv_heads=2)
    assert name in caught.value.at
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]
