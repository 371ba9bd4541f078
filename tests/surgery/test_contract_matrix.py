"""What a conversion promises, for every class in the zoo.

Repeated heads compute what the source does and pool back to its bytes; pooled checkpoints change
the tensors and keys that they must and no other, load with nothing missing, and generate.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from zoo import (
    MHA_ONLY,
    NUM_HEADS,
    REFUSED,
    ZOO,
    Entry,
    build,
    largest_difference,
    load_cleanly,
    logits,
    save,
    stored_shapes,
)
from zoo_proofs import check_cached_generation, read_tensors, repeat_kv_heads

import gqaconvert
from gqaconvert.attention import blocks, layouts
from gqaconvert.attention.equivalents import MAPPINGS
from gqaconvert.attention.specs import certified_types
from gqaconvert.errors import CheckpointError, GqaconvertError, UnsupportedModelError, UsageError
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.surgery import plan, planning

METHODS = ("mean", "first", "random")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FAMILIES = {
    "llama": "head_dim implied, no bias",
    "qwen2": "bias",
    "olmo2": "one key norm over all heads",
    "cohere-qk_norm": "a key norm for each head",
    "stablelm-qk_norm": "a norm module for each head",
    "phi3": "fused in blocks",
    "dbrx": "fused in blocks, nested key",
    "falcon-new": "fused by group",
    "falcon-old-alibi": "fused by head or in blocks",
    "gpt_bigcode": "fused by head or in blocks, bias",
    "sarvam_moe": "fused on disk alone",
    "gemma4_text-k_is_v": "layers whose keys are their values",
    "chameleon": "composite, key norms with bias",
    "qwen2_5_vl": "composite, bias",
    "qwen3_next": "linear layers, gated queries",
    "zamba2": "one block for several layers",
    "mixtral": "experts",
    "gemma": "tied by default",
}
"""An entry for each way in which attention is stored."""
_TOWERS = re.compile(r"vision|visual|vqmodel|image|audio")


def read_config_leaves(folder: Path) -> dict[str, object]:
    def walk(level, path):
        if isinstance(level, dict):
            for key, value in level.items():
                yield from walk(value, [*path, key])
        else:
            yield ".".join(path), level

    return dict(walk(json.loads((folder / "config.json").read_text()), []))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def assert_same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    different = [name for name in a if not same_bytes(a[name], b[name])]
    assert not different


# --- pooling, written out in torch and apart from the package ---


def split_heads(tensor: torch.Tensor, entry: Entry, kv_heads: int) -> list[torch.Tensor]:
    """[q,] k and v of a fused tensor, or the one projection of a split one: (heads, rows, ...)."""
    if entry.layout == "split":
        return [tensor.unflatten(0, (kv_heads, -1))]
    heads = tensor.unflatten(0, (NUM_HEADS + 2 * kv_heads, -1))
    if entry.layout == "blocks" or (entry.layout == "per_head" and kv_heads == 1):
        return list(heads.split([NUM_HEADS, kv_heads, kv_heads]))
    groups = heads.unflatten(0, (kv_heads, -1))
    return [groups[:, :-2].flatten(0, 1), groups[:, -2], groups[:, -1]]


def pool_heads(heads: torch.Tensor, wanted: int, method: str) -> torch.Tensor:
    groups = heads.unflatten(0, (wanted, -1))
    return groups[:, 0] if method == "first" else groups.double().mean(1).to(heads.dtype)


def expected_parts(
    source: dict[str, torch.Tensor], name: str, entry: Entry, wanted: int, method: str
) -> list[torch.Tensor]:
    """The projections of a pooled tensor, as `split_heads` gives them."""
    kv_heads = max(entry.legal)
    if ".norms." in name:
        size = kv_heads // wanted
        number = int(re.search(r"\.norms\.(\d+)\.", name)[1])
        heads = [
            source[re.sub(r"\.norms\.\d+\.", f".norms.{each}.", name)]
            for each in range(number * size, (number + 1) * size)
        ]
        return [pool_heads(torch.stack(heads), 1, method)]
    *queries, keys, values = (None, *split_heads(source[name], entry, kv_heads))[-3:]
    pooled = [pool_heads(each, wanted, method) for each in (keys, values) if each is not None]
    return [each for each in queries if each is not None] + pooled


def assert_pooled(
    source: dict[str, torch.Tensor],
    output: dict[str, torch.Tensor],
    entry: Entry,
    wanted: int,
    method: str = "mean",
    deviation: float = 0.0,
) -> None:
    for name, tensor in output.items():
        if not entry.is_changed(name):
            assert same_bytes(tensor, source[name]), name
            continue
        expected = expected_parts(source, name, entry, wanted, method)
        found = [tensor[None]] if ".norms." in name else split_heads(tensor, entry, wanted)
        assert len(found) == len(expected)
        for number, (part, want) in enumerate(zip(found, expected, strict=True)):
            if method == "random" and not (len(found) == 3 and number == 0):
                assert_fresh(part, name, deviation)
            else:
                assert same_bytes(part.contiguous(), want.contiguous()), name


def assert_fresh(part: torch.Tensor, name: str, deviation: float) -> None:
    if name.endswith("bias"):
        assert not part.any(), name
    elif re.search(r"\.k_(layer)?norm\.", name):
        assert (part == 1).all(), name
    else:
        assert 0.8 < part.float().std() / deviation < 1.25, name
        assert part.float().abs().max() < 6 * deviation, name


# --- (a) repeating heads, and pooling them again ---


def check_round_trip(name: str, folder: Path) -> None:
    """Expand a GQA model as the oracle does, with equal logits, and pool it back to its bytes."""
    entry = ZOO[name]
    widest, kv = entry.legal[:2]
    model = build(name, num_kv_heads=kv)
    before = logits(model)
    narrow = save(model, folder / "narrow")
    shapes = stored_shapes(save(build(name), folder / "shapes"))
    shutil.copytree(narrow, folder / "oracle")
    repeat_kv_heads(folder / "oracle", entry, num_kv_heads=kv, shapes=shapes)

    gqaconvert.expand(narrow, folder / "wide", num_kv_heads=widest)
    assert_same_tensors(read_tensors(folder / "wide"), read_tensors(folder / "oracle"))
    assert largest_difference(logits(load_cleanly(folder / "wide")), before) <= entry.tolerance

    gqaconvert.convert(folder / "wide", folder / "back", num_kv_heads=kv)
    assert_same_tensors(read_tensors(folder / "back"), read_tensors(narrow))
    assert read_config_leaves(folder / "back") == read_config_leaves(narrow)


@pytest.mark.parametrize("name", ZOO)
def test_repeated_heads_compute_the_same_and_pool_back_to_the_same_bytes(name, tmp_path):
    check_round_trip(name, tmp_path)


# --- (b) pooling heads that differ ---


@pytest.mark.parametrize("name", ZOO)
def test_pooling_changes_what_it_must_and_the_result_loads_and_generates(name, tmp_path):
    entry = ZOO[name]
    source = save(build(name, seed=1), tmp_path / "source")
    tensors, leaves = read_tensors(source), read_config_leaves(source)
    if entry.composite:
        assert any(_TOWERS.search(tensor) for tensor in tensors)
    for kv in entry.legal[1:]:
        out = tmp_path / str(kv)
        conversion = gqaconvert.convert(source, out, num_kv_heads=kv)
        assert not any("not in the test matrix" in notice for notice in conversion.notices)
        changed = {tensor.output.name for tensor in conversion.plan.changed()}
        output = read_tensors(out)
        assert changed == {tensor for tensor in output if entry.is_changed(tensor)}
        assert set(output) <= set(tensors)
        assert {tensor for tensor in tensors if not entry.is_changed(tensor)} <= set(output)
        assert_pooled(tensors, output, entry, kv)
        after = read_config_leaves(out)
        assert after.keys() == leaves.keys()
        assert {key for key in after if after[key] != leaves[key]} == {*entry.config_changes}
        model = load_cleanly(out)
        assert logits(model).isfinite().all()
        check_cached_generation(model, num_kv_heads=NUM_HEADS if entry.cache_all else kv)


@pytest.mark.parametrize("name", ZOO)
def test_every_level_of_verify_accepts_the_result(name, tmp_path):
    source = save(build(name, seed=1), tmp_path / "source")
    gqaconvert.convert(source, tmp_path / "out", num_kv_heads=ZOO[name].legal[1])
    result = gqaconvert.verify(tmp_path / "out", source, deep=True, forward=True)
    assert {"logits", "cache", "cache shape"} <= {check.name for check in result.checks}


@pytest.mark.parametrize("name", ["falcon-new", "falcon-old", "phi3"])
def test_a_cache_that_transformers_does_not_shrink_is_said(name, tmp_path):
    source = save(build(name), tmp_path / "source")
    conversion = gqaconvert.convert(source, tmp_path / "out", num_kv_heads=1, dry_run=True)
    said = any("there the cache does not shrink" in notice for notice in conversion.notices)
    assert said == ZOO[name].cache_all


def test_other_keys_with_the_same_count_change_with_it(tmp_path):
    source = save(build("gemma4_text-k_is_v"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["per_layer_config"]
    config |= {"num_global_key_value_heads": 4, "global_head_dim": 32}
    (source / "config.json").write_text(json.dumps(config))
    gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2)
    after = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (after["num_key_value_heads"], after["num_global_key_value_heads"]) == (2, 2)
    assert logits(load_cleanly(tmp_path / "out")).isfinite().all()


def test_head_dim_is_written_where_it_was_implied(tmp_path):
    source = save(build("llama"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    width = config.pop("head_dim")
    (source / "config.json").write_text(json.dumps(config))
    gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["head_dim"] == width
    load_cleanly(tmp_path / "out")


def test_layers_of_several_widths_get_no_common_head_dim(tmp_path):
    source = save(build("gemma4_text"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["head_dim"]
    config["per_layer_config"] = {"0": {"head_dim": 16}, "1": {"head_dim": 32}}
    (source / "config.json").write_text(json.dumps(config))
    conversion = gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2)
    assert {edit.path for edit in conversion.plan.config_edits} == {("num_key_value_heads",)}


def test_the_classes_that_pass_are_the_classes_that_are_called_certified(tmp_path):
    types = set()
    for name, entry in ZOO.items():
        if entry.type not in types:
            folder = save(build(name), tmp_path / name)
            types.add(read_config(folder).text_model_type)
    assert types == certified_types()


# --- (c) methods, shards, element types and ties, for each way of storing attention ---


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folders: dict[tuple[object, ...], Path] = {}

    def source(name: str, dtype: str, tied: bool | None, shards: int) -> Path:
        key = (name, dtype, tied, shards)
        if key not in folders:
            model = build(name, seed=2, dtype=DTYPES[dtype], tied=tied)
            folder = tmp_path_factory.mktemp("source")
            folders[key] = save(model, folder, shards=shards)
        return folders[key]

    return source


def _ties():
    return [
        pytest.param(name, tied, id=f"{name}-{'tied' if tied else 'untied'}")
        for name in FAMILIES
        for tied in ((True, False) if ZOO[name].ties else (None,))
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("name", "tied"), _ties())
def test_every_method_on_every_layout(name, tied, method, shards, dtype, sources, tmp_path):
    entry, wanted = ZOO[name], ZOO[name].legal[1]
    source = sources(name, dtype, tied, shards)
    gqaconvert.convert(source, tmp_path / "out", num_kv_heads=wanted, method=method, seed=5)
    before, after = read_tensors(source), read_tensors(tmp_path / "out")
    assert {tensor for tensor in before if not entry.is_changed(tensor)} <= set(after)
    deviation = read_config(source).text.get("initializer_range", 0.02)
    assert_pooled(before, after, entry, wanted, method, deviation)
    files = [sorted(p.name for p in f.glob("*.safetensors*")) for f in (source, tmp_path / "out")]
    assert files[0] == files[1]
    assert (len(files[0]) > 1) == (shards > 1)
    model = load_cleanly(tmp_path / "out")
    assert model.dtype == DTYPES[dtype]
    assert logits(model).isfinite().all()


# --- (d) what cannot be converted ---


def _refused():
    """Without the classes that are converted as another, which test_equivalents.py covers."""
    entries = {**REFUSED, **MHA_ONLY}
    return [name for name, entry in entries.items() if entry.type not in MAPPINGS]


@pytest.mark.parametrize("name", _refused())
def test_what_cannot_be_converted_is_refused_with_the_reason(name, tmp_path):
    entry = {**REFUSED, **MHA_ONLY}[name]
    source = save(build(name), tmp_path / "source")
    if name == "falcon-old-kv2":  # one head or all of them: only the count is refused
        with pytest.raises(UsageError) as refused_count:
            gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2)
        assert refused_count.value.remedy == "--kv-heads 1"
    else:
        with pytest.raises(UnsupportedModelError) as refused:
            gqaconvert.convert(source, tmp_path / "out", num_kv_heads=1)
        assert refused.value.exit_code == 3
        assert refused.value.at
        assert len(refused.value.what) > 30
        assert any(word in refused.value.what for word in _reasons(entry))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def _reasons(entry: Entry) -> list[str]:
    """Words of which one must be in the reason."""
    known = {
        "multi-head latent attention": ["latent"],
        "layers share K and V": ["num_kv_shared_layers"],
        "K and V are compressed": ["compressed"],
        "adapters": ["use_shared_attention_adapter"],
        "learned mask": ["gate"],
        "convolutions mix": ["convolutions"],
        "not neighbours": ["not contiguous"],
        "twice the KV heads": ["different numbers of KV heads"],
        "layer kinds differ": ["different numbers of KV heads"],
    }
    refusal = entry.refusal or ""
    found = [words for part, words in known.items() if part in refusal]
    return found[0] if found else ["no number of KV heads", "is an encoder-decoder"]


# --- negative controls: the checks above notice faults ---


def _interleaved(num_kv_heads: int, wanted: int, number: int) -> range:
    """Groups of every G-th head instead of neighbours."""
    if wanted <= num_kv_heads:
        return range(number, num_kv_heads, wanted)
    return range(number % num_kv_heads, number % num_kv_heads + 1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "falcon-new", "stablelm-qk_norm"])
def test_interleaved_groups_would_be_noticed(name, tmp_path, monkeypatch):
    for module in (plan, planning):
        monkeypatch.setattr(module, "pooled_sources", _interleaved)
    with pytest.raises(AssertionError):
        check_round_trip(name, tmp_path)


def test_interleaved_groups_would_move_logits(tmp_path, monkeypatch):
    model = build("llama", num_kv_heads=2)
    save(model, tmp_path / "narrow")
    for module in (plan, planning):
        monkeypatch.setattr(module, "pooled_sources", _interleaved)
    gqaconvert.expand(tmp_path / "narrow", tmp_path / "wide", num_kv_heads=4)
    assert largest_difference(logits(load_cleanly(tmp_path / "wide")), logits(model)) > 0.1


@pytest.mark.parametrize(("name", "other"), [("phi3", "per_group"), ("falcon-new", "blocks")])
def test_another_row_order_would_be_noticed(name, other, tmp_path, monkeypatch):
    order = layouts.head_order
    monkeypatch.setattr(plan, "head_order", lambda layout, *counts: order(other, *counts))
    with pytest.raises(AssertionError):
        check_round_trip(name, tmp_path)


@pytest.mark.parametrize("name", ["phi3", "falcon-new", "gpt_bigcode"])
def test_keys_and_values_swapped_on_the_way_would_be_noticed(name, tmp_path, monkeypatch):
    order = layouts.head_order

    def swapped(layout, num_heads, num_kv_heads):
        heads = order(layout, num_heads, num_kv_heads)
        other = {"q": "q", "k": "v", "v": "k"}
        if num_kv_heads == num_heads:
            heads = [layouts.Head(other[head.role], head.number) for head in heads]
        return heads

    monkeypatch.setattr(plan, "head_order", swapped)
    with pytest.raises(AssertionError):
        check_round_trip(name, tmp_path)


@pytest.mark.parametrize("name", ["olmo2", "cohere-qk_norm", "stablelm-qk_norm", "chameleon"])
def test_key_norms_left_alone_would_be_noticed(name, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "_key_norm", lambda *_: ("none", [], ()))
    with pytest.raises(AssertionError):
        check_round_trip(name, tmp_path)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_values_left_alone_would_be_noticed(name, tmp_path, monkeypatch):
    complete = blocks._parameters
    monkeypatch.setattr(
        blocks, "_parameters", lambda stem, *a: [] if "v_proj" in stem else complete(stem, *a)
    )
    with pytest.raises((AssertionError, GqaconvertError)):
        check_round_trip(name, tmp_path)


def test_a_config_left_alone_is_noticed_before_the_output_gets_its_name(tmp_path, monkeypatch):
    save(build("llama"), tmp_path / "source")
    monkeypatch.setattr(planning, "_config_edits", lambda *_: iter(()))
    with pytest.raises(CheckpointError, match="config says 4 KV heads, the tensors hold 2"):
        gqaconvert.convert(tmp_path / "source", tmp_path / "out", num_kv_heads=2)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
