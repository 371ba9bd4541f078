"""Headers and indexes: right where the safetensors library is, and an error everywhere else."""

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file

from gqaconvert.checkpoint.header import parse_header, read_header
from gqaconvert.checkpoint.index import SAFETENSORS_INDEX, TORCH_INDEX, read_index
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.errors import CheckpointError

TORCH_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
QUICK = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write_raw(path: Path, header: object, body: bytes) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + body)
    return path


def entry(dtype: object, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def assert_library_agrees(path: Path, *, read_bytes: bool = True) -> None:
    file, tensors = read_header(path)
    content = path.read_bytes()
    with safe_open(path, "pt") as opened:
        assert {tensor.name for tensor in tensors} == set(opened.keys())
        assert (opened.metadata() or {}) == file.metadata
        for tensor in tensors:
            assert list(tensor.shape) == opened.get_slice(tensor.name).get_shape()
            assert tensor.dtype == opened.get_slice(tensor.name).get_dtype()
            if read_bytes:
                expected = opened.get_tensor(tensor.name)
                assert content[tensor.begin : tensor.end] == raw_bytes(expected)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@QUICK
@given(
    shapes=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(st.lists(st.integers(0, 4), max_size=4), st.sampled_from(sorted(TORCH_TYPES))),
        min_size=1,  # without tensors, safetensors 0.8 writes a header that is not JSON
        max_size=6,
    ),
    metadata=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text("ab")),
)
def test_any_file_that_safetensors_writes_is_read_alike(tmp_path, shapes, metadata):
    tensors = {
        name: torch.randint(0, 2, shape).to(TORCH_TYPES[tag])
        for name, (shape, tag) in shapes.items()
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata=metadata)
    assert_library_agrees(path)


def test_header_facts(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(3, 2, dtype=torch.bfloat16), "b": torch.zeros(3)}, path)
    index = read_index(tmp_path)
    assert index.kind == "safetensors"
    assert index.parameters == 9
    assert index.size_bytes == 24
    assert index.tensors["w"].end - index.tensors["w"].begin == index.tensors["w"].size_bytes == 12
    assert [file.name for file in index.files] == ["model.safetensors"]


def test_fingerprint_follows_headers_and_not_weights(tmp_path):
    def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, tmp_path / "model.safetensors")
        return read_index(tmp_path).fingerprint()

    assert fingerprint({"w": torch.zeros(3)}) == fingerprint({"w": torch.ones(3)})
    assert fingerprint({"w": torch.zeros(3)}) != fingerprint({"v": torch.zeros(3)})


VALID = {"a": entry("F32", [2, 2], 0, 16), "b": entry("I8", [3], 16, 19)}
FAULTS = {
    "overlap": ({**VALID, "b": entry("I8", [3], 15, 18)}, 18, "overlaps"),
    "same range twice": ({**VALID, "c": entry("I8", [3], 16, 19)}, 19, "overlaps"),
    "gap": ({**VALID, "b": entry("I8", [3], 17, 20)}, 20, "gap"),
    "first byte unused": ({"a": entry("I8", [3], 1, 4)}, 4, "gap"),
    "body too short": (VALID, 18, "truncated"),
    "body too long": (VALID, 20, "longer than"),
    "unknown type": ({"a": entry("F31", [1], 0, 4)}, 4, "unknown element type 'F31'"),
    "type is a list": ({"a": entry([], [1], 0, 4)}, 4, "unknown element type"),
    "type is a dict": ({"a": entry({}, [1], 0, 4)}, 4, "unknown element type"),
    "shape too large": ({"a": entry("F32", [2], 0, 4)}, 4, "cannot hold F32"),
    "shape too small": ({"a": entry("F32", [1], 0, 8)}, 8, "cannot hold F32"),
    "shape of vast numbers": ({"a": entry("F32", [10**4000] * 2, 0, 4)}, 4, "not lists of counts"),
    "shape of very many": ({"a": entry("I8", [1] * 70_000, 0, 1)}, 1, "not lists of counts"),
    "negative shape": ({"a": entry("F32", [-1, -1], 0, 4)}, 4, "not lists of counts"),
    "fractional shape": ({"a": entry("F32", [1.0], 0, 4)}, 4, "not lists of counts"),
    "true shape": ({"a": entry("F32", [True], 0, 4)}, 4, "not lists of counts"),
    "shape is a number": ({"a": entry("F32", 1, 0, 4)}, 4, "not lists of counts"),
    "ends before it begins": ({"a": entry("I8", [0], 4, 0)}, 4, "cannot hold"),
    "negative offset": ({"a": entry("I8", [4], -4, 0)}, 4, "not lists of counts"),
    "three offsets": ({"a": {**VALID["a"], "data_offsets": [0, 8, 16]}}, 16, "not lists of counts"),
    "entry is a list": ({"a": [1]}, 0, "lacks dtype"),
    "entry lacks a key": ({"a": {"dtype": "F32", "shape": []}}, 4, "lacks dtype"),
    "header is a list": ([], 0, "not a JSON object"),
    "header is a number": (b"3", 0, "not a JSON object"),
    "metadata is a list": ({"__metadata__": []}, 0, "not a map of strings"),
    "metadata holds numbers": ({"__metadata__": {"a": 1}}, 0, "not a map of strings"),
    "key twice": (
        b'{"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
        1,
        "'a' occurs twice",
    ),
    "not JSON": (b'{"a":', 0, "not valid JSON"),
    "not UTF-8": (b'{"\xff":1}', 0, "not valid JSON"),
    "UTF-16": ('{"__metadata__":{}}'.encode("utf-16"), 0, "not valid JSON"),
    "deeply nested": (b"[" * 100_000, 0, "not valid JSON"),
    "very long number": (b'{"a":' + b"9" * 5000 + b"}", 0, "not valid JSON"),
}


@pytest.mark.parametrize(("header", "body_bytes", "message"), FAULTS.values(), ids=FAULTS)
def test_every_fault_of_a_header_is_named(tmp_path, header, body_bytes, message):
    path = write_raw(tmp_path / "model.safetensors", header, bytes(body_bytes))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_index(tmp_path)
    assert str(path) in (caught.value.at or "")


def test_the_headers_that_the_faults_start_from_are_sound(tmp_path):
    write_raw(tmp_path / "model.safetensors", VALID, bytes(19))
    assert set(read_index(tmp_path).tensors) == {"a", "b"}


@pytest.mark.parametrize("length", [0, 2**63, 2**64 - 1, 100_000_001, 1000])
def test_a_length_that_does_not_fit_is_refused(tmp_path, length):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b'{"__metadata__":{}}')
    with pytest.raises(CheckpointError):
        read_header(path)


def test_truncation_at_every_point_is_a_checkpoint_error(tmp_path):
    content = save({"a": torch.zeros(4, 3), "b": torch.ones(5, dtype=torch.int8)}, {"k": "v"})
    path = tmp_path / "model.safetensors"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_index(tmp_path)


@settings(QUICK, max_examples=1000)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
@example([(0, 255)])
def test_mutated_headers_are_refused_or_agree_with_the_library(tmp_path, edits):
    tensors = {"a": torch.zeros(4, 3), "b": torch.ones(5, dtype=torch.int8), "c": torch.zeros(0, 2)}
    content = bytearray(save(tensors, {"k": "v"}))
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    for position, value in edits:
        content[position % header_bytes] = value
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    try:
        read_header(path)
    except CheckpointError:
        return
    assert_library_agrees(path, read_bytes=False)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(QUICK, max_examples=1000)
@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__"]),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "I8", "BOOL"]) | JSON_VALUES,
                "shape": st.lists(st.integers(0, 3), max_size=2) | JSON_VALUES,
                "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2) | JSON_VALUES,
            }
        )
        | JSON_VALUES,
    ),
    body_bytes=st.integers(0, 16),
)
def test_arbitrary_json_is_refused_or_agrees_with_the_library(tmp_path, header, body_bytes):
    path = write_raw(tmp_path / "model.safetensors", header, bytes(body_bytes))
    try:
        read_header(path)
    except CheckpointError:
        return
    assert_library_agrees(path, read_bytes=False)


def test_what_the_library_refuses_for_its_ranges_is_refused_here(tmp_path):
    for name, (header, body_bytes, _) in FAULTS.items():
        path = write_raw(tmp_path / "model.safetensors", header, bytes(body_bytes))
        if name in ("key twice", "shape of very many"):  # where this reader is the stricter one
            continue
        with pytest.raises(SafetensorError), safe_open(path, "pt"):
            pass


def write_sharded(folder: Path) -> dict[str, torch.Tensor]:
    shards = {
        "model-00001-of-00002.safetensors": {"a": torch.randn(3, 2), "b": torch.randn(4)},
        "model-00002-of-00002.safetensors": {"c": torch.randn(2, 2)},
    }
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    weight_map = {tensor: shard for shard, tensors in shards.items() for tensor in tensors}
    write_index(folder, {"metadata": {"total_size": 56}, "weight_map": weight_map})
    return {name: tensor for tensors in shards.values() for name, tensor in tensors.items()}


def write_index(folder: Path, index: object) -> None:
    (folder / SAFETENSORS_INDEX).write_text(json.dumps(index))


def sharded_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / SAFETENSORS_INDEX).read_text())["weight_map"]


def stored_bytes(index: CheckpointIndex, name: str) -> bytes:
    tensor = index.tensors[name]
    assert index.folder is not None
    return (index.folder / tensor.file).read_bytes()[tensor.begin : tensor.end]


def test_a_sharded_checkpoint_is_one_index(tmp_path):
    tensors = write_sharded(tmp_path)
    index = read_index(tmp_path)
    assert list(index.tensors) == ["a", "b", "c"]
    assert index.index_metadata == {"total_size": 56}
    assert len(index.files) == 2
    for name, tensor in tensors.items():
        assert stored_bytes(index, name) == raw_bytes(tensor)


def test_a_missing_shard_is_named(tmp_path):
    write_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 shards are missing.*model-00002") as caught:
        read_index(tmp_path)
    assert caught.value.remedy


def test_index_and_shards_that_disagree_are_refused(tmp_path):
    write_sharded(tmp_path)
    sound = sharded_map(tmp_path)
    first, second = sound["a"], sound["c"]
    for weight_map, message in [
        ({**sound, "a": second}, "puts tensor 'a'"),
        ({**sound, "d": first}, "'d'.*does not hold it"),
        ({name: shard for name, shard in sound.items() if name != "b"}, "1 tensors that the index"),
    ]:
        write_index(tmp_path, {"weight_map": weight_map})
        with pytest.raises(CheckpointError, match=message):
            read_index(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_sharded(tmp_path)
    save_file({"c": torch.ones(1), "a": torch.ones(1)}, tmp_path / sharded_map(tmp_path)["c"])
    with pytest.raises(CheckpointError, match="'a' is in both"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["../x", "/etc/passwd", "a/b", "..", ".", "", "a/", "a\\b", "a\0b", "é" * 200, "x" * 5000],
)
def test_a_weight_map_cannot_leave_the_folder(tmp_path, shard):
    write_index(tmp_path, {"weight_map": {"a": shard}})
    with pytest.raises(CheckpointError, match="index names a shard"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"3",
        b'{"weight_map": []}',
        b'{"weight_map": {"a": 3}}',
        b'{"weight_map": {"a": ["x"]}}',
        b'{"weight_map": {"a": "x", "a": "y"}}',
        b'\xff\xfe{"weight_map": {}}',
        b"[" * 100_000,
    ],
)
def test_an_unreadable_index_is_refused(tmp_path, raw):
    (tmp_path / SAFETENSORS_INDEX).write_bytes(raw)
    with pytest.raises(CheckpointError, match="index"):
        read_index(tmp_path)


@QUICK
@given(
    index=st.fixed_dictionaries({}, optional={"weight_map": JSON_VALUES, "metadata": JSON_VALUES})
)
def test_arbitrary_json_as_an_index_is_refused_or_empty(tmp_path, index):
    write_index(tmp_path, index)
    try:
        assert not read_index(tmp_path).tensors
    except CheckpointError:
        return


def test_safetensors_win_over_bin(tmp_path):
    torch.save({"old": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert read_index(tmp_path).kind == "torch"
    (tmp_path / TORCH_INDEX).write_text('{"weight_map": {"old": "pytorch_model.bin"}}')
    assert read_index(tmp_path).kind == "torch"
    save_file({"new": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(read_index(tmp_path).tensors) == ["new"]


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        read_index(tmp_path)


def test_a_header_is_parsed_without_a_file():
    raw = json.dumps(VALID).encode()
    file, tensors = parse_header(raw, name="x", size_bytes=8 + len(raw) + 19, at="hub")
    assert file.name == "x"
    assert [(t.name, t.begin - 8 - len(raw)) for t in tensors] == [("a", 0), ("b", 16)]
