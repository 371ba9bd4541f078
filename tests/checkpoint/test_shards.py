"""The shard planner and the header writer: the safetensors library reads what they lay out."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from checkpoints import NUMPY
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from gqaconvert.checkpoint.header import parse_header
from gqaconvert.checkpoint.shards import (
    BLOCK_BYTES,
    index_json,
    lay_out,
    needs_index,
    shard_names,
    split_by_size,
)
from gqaconvert.checkpoint.tensors import StoredTensor
from gqaconvert.errors import UsageError

names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.lists(
    st.builds(
        lambda name, dtype, shape: StoredTensor(name, dtype, shape, "", 0, 0),
        names, st.sampled_from(sorted(NUMPY)), shapes,
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda tensor: tensor.name,
)  # fmt: skip


@given(tensors, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
@settings(max_examples=150, deadline=None)
def test_a_header_is_read_back_as_it_was_planned(wanted, metadata):
    shard = lay_out("x.safetensors", wanted, metadata)
    length = int.from_bytes(shard.header[:8], "little")
    assert len(shard.header) == 8 + length
    file, found = parse_header(
        shard.header[8:], name="x.safetensors", size_bytes=shard.size_bytes, at="here"
    )
    # Tensors without elements share their place with a neighbour, so compare by name.
    assert {t.name: t for t in found} == {t.name: t for t in shard.tensors}
    assert file.metadata == metadata


@given(tensors, st.integers(0, 3 * BLOCK_BYTES).map(lambda n: 8 * n))
@settings(max_examples=100, deadline=None)
def test_data_starts_at_the_same_place_within_a_block_as_the_source(wanted, begin):
    shard = lay_out("x.safetensors", wanted, {}, aligned_with=begin)
    assert (len(shard.header) - begin) % BLOCK_BYTES == 0


@given(tensors=tensors)
@settings(max_examples=40, deadline=None)
def test_the_safetensors_library_reads_what_was_laid_out(tmp_path_factory, tensors):
    path = tmp_path_factory.mktemp("laid_out") / "x.safetensors"
    shard = lay_out(path.name, tensors, {"format": "pt"}, aligned_with=1000)
    path.write_bytes(shard.header + bytes(shard.size_bytes - len(shard.header)))
    with safe_open(path, framework="np") as opened:
        assert set(opened.keys()) == {tensor.name for tensor in tensors}
        for tensor in tensors:
            assert tuple(opened.get_tensor(tensor.name).shape) == tensor.shape


@given(tensors, st.integers(1, 400))
@settings(deadline=None)
def test_shards_hold_every_tensor_once_in_order_within_the_limit(wanted, limit):
    parts = split_by_size(wanted, limit)
    assert [tensor for part in parts for tensor in part] == wanted
    assert all(parts)
    for part in parts:
        assert sum(tensor.size_bytes for tensor in part) <= limit or len(part) == 1
    for before, after in pairwise(parts):
        assert sum(t.size_bytes for t in before) + after[0].size_bytes > limit


def test_names_and_index_are_those_of_transformers():
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(2) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    wanted = [StoredTensor(name, "F32", (2, 3), "", 0, 0) for name in ("b", "a")]
    shards = [lay_out(n, [t], {}) for n, t in zip(shard_names(2), wanted, strict=True)]
    index = index_json(shards, {"total_parameters": 0, "note": "kept"})
    assert index["metadata"] == {"total_parameters": 12, "note": "kept", "total_size": 48}
    assert json.dumps(index["weight_map"]) == json.dumps(
        {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
    )
    assert needs_index(shards)
    assert not needs_index([lay_out("model.safetensors", wanted, {})])


def test_a_header_too_long_for_readers_is_refused(monkeypatch):
    monkeypatch.setattr("gqaconvert.checkpoint.shards.MAX_HEADER_BYTES", 200)
    wanted = [StoredTensor("n" * 300, "F32", (1,), "", 0, 0)]
    with pytest.raises(UsageError, match="header"):
        lay_out("x.safetensors", wanted, {})


def test_sizes_are_counted_in_bytes():
    assert StoredTensor("x", "BF16", (3, 5), "", 0, 0).size_bytes == math.prod((3, 5)) * 2
