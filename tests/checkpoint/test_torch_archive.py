"""Files written by torch.save, read back as byte ranges without torch."""

import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gqaconvert.checkpoint import torch_archive
from gqaconvert.checkpoint.index import read_index
from gqaconvert.checkpoint.tensors import StoredTensor
from gqaconvert.checkpoint.torch_archive import read_archive
from gqaconvert.errors import CheckpointError

TORCH_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
ZIP_AND_LEGACY = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def save(tensors: object, path: Path, *, zipped: bool = True, **options) -> Path:
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped, **options)
    return path


def read_tensor(folder: Path, stored: StoredTensor) -> torch.Tensor:
    raw = bytearray((folder / stored.file).read_bytes()[stored.begin : stored.end])
    if not raw:
        return torch.empty(stored.shape, dtype=TORCH_TYPES[stored.dtype])
    flat = torch.frombuffer(raw, dtype=TORCH_TYPES[stored.dtype])
    if stored.strides is None:
        return flat.reshape(stored.shape)
    return flat.as_strided(stored.shape, stored.strides)


def assert_reads_back(tensors: dict[str, torch.Tensor], path: Path) -> dict[str, StoredTensor]:
    file, stored = read_archive(path)
    assert file.name == path.name
    assert file.size_bytes == path.stat().st_size
    assert [t.begin for t in stored] == sorted(t.begin for t in stored)
    by_name = {tensor.name: tensor for tensor in stored}
    assert by_name.keys() == tensors.keys()
    for name, tensor in tensors.items():
        again = read_tensor(path.parent, by_name[name])
        assert again.dtype == tensor.dtype, name
        assert again.shape == tensor.shape, name
        assert (
            again.contiguous()
            .flatten()
            .view(torch.uint8)
            .equal(tensor.detach().contiguous().flatten().view(torch.uint8))
        ), name
    return by_name


@ZIP_AND_LEGACY
@pytest.mark.parametrize("tag", TORCH_TYPES)
def test_every_element_type_is_found_at_its_bytes(tmp_path, zipped, tag):
    values = torch.arange(24).remainder(2 if tag == "BOOL" else 24)
    tensors = {"a": values.to(TORCH_TYPES[tag]).reshape(4, 6), "b": torch.ones(3)}
    stored = assert_reads_back(tensors, save(tensors, tmp_path / "m.bin", zipped=zipped))
    assert stored["a"].dtype == tag
    assert stored["a"].size_bytes == stored["a"].end - stored["a"].begin


@ZIP_AND_LEGACY
def test_shapes_that_are_not_ordinary(tmp_path, zipped):
    base = torch.randn(6, 8)
    tensors = {
        "transposed": base.t(),
        "columns": base[:, 2:5],
        "rows": base[2:4],
        "every_other": torch.arange(10)[1::2],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "one_wide": torch.randn(5, 4)[:, :1].contiguous().as_strided((5, 1), (1, 7)),
    }
    stored = assert_reads_back(tensors, save(tensors, tmp_path / "m.bin", zipped=zipped))
    assert stored["transposed"].strides == (1, 8)
    assert stored["rows"].strides is None
    assert stored["rows"].begin == stored["transposed"].begin + 2 * 8 * 4
    assert stored["scalar"].shape == ()
    assert stored["one_wide"].strides is None


@ZIP_AND_LEGACY
def test_tied_tensors_keep_both_names_and_one_range(tmp_path, zipped):
    weight = torch.randn(5, 4)
    path = save(
        {"embed": weight, "head": weight, "v": weight.view(20)}, tmp_path / "m.bin", zipped=zipped
    )
    _, stored = read_archive(path)
    assert {t.name for t in stored} == {"embed", "head", "v"}
    assert len({(t.begin, t.end) for t in stored}) == 1


@ZIP_AND_LEGACY
def test_state_dict_of_a_module_with_parameters_metadata_and_attributes(tmp_path, zipped):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    annotated = torch.nn.Parameter(torch.randn(2, 2))
    annotated.note = "kept by _rebuild_parameter_with_state"
    noted = torch.randn(3)
    noted.note = "kept by _rebuild_from_type_v2"
    state = model.state_dict(keep_vars=True)
    assert state._metadata
    state["annotated"], state["noted"] = annotated, noted
    assert_reads_back(state, save(state, tmp_path / "m.bin", zipped=zipped))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@ZIP_AND_LEGACY
def test_every_pickle_protocol_that_torch_can_write(tmp_path, zipped, protocol):
    tensors = OrderedDict((f"layer.{i}", torch.full((2, i + 1), float(i))) for i in range(300))
    path = save(tensors, tmp_path / "m.bin", zipped=zipped, pickle_protocol=protocol)
    assert_reads_back(tensors, path)


def test_plain_values_beside_tensors_are_let_go(tmp_path):
    path = save(
        {"w": torch.ones(2), "step": 3, "name": "x", "lr": 0.1, "none": None}, tmp_path / "m.bin"
    )
    assert [tensor.name for tensor in read_archive(path)[1]] == ["w"]


def test_a_sharded_folder_is_read_through_its_index(tmp_path):
    save({"a": torch.ones(2)}, tmp_path / "pytorch_model-00001-of-00002.bin")
    save({"b": torch.zeros(3)}, tmp_path / "pytorch_model-00002-of-00002.bin", zipped=False)
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        '{"weight_map": {"a": "pytorch_model-00001-of-00002.bin",'
        ' "b": "pytorch_model-00002-of-00002.bin"}}'
    )
    index = read_index(tmp_path)
    assert index.kind == "torch"
    assert index.parameters == 5


class Command:
    """Pickles into a call of os.system."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@ZIP_AND_LEGACY
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_pickle_is_refused_by_name_and_not_executed(tmp_path, zipped, protocol):
    marker = tmp_path / "executed"
    state = {"w": torch.ones(2), "x": Command(marker)}
    path = save(state, tmp_path / "m.bin", zipped=zipped, pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match=r"not plain tensors.*posix\.system|nt\.system"):
        read_archive(path)
    assert not marker.exists()
    torch.load(path, weights_only=False)  # the same file does execute where it is trusted
    assert marker.exists()


@ZIP_AND_LEGACY
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": {"w": torch.ones(2)}}, "dict of tensors under 'state_dict'"),
        ([torch.ones(2)], "holds a list"),
        (torch.ones(2), "holds a tensor"),
        ({}, "no tensors"),
        ({"w": [torch.ones(2)]}, "list under 'w'"),
        ({3: torch.ones(2)}, "tensor under 3"),
        (torch.nn.Linear(2, 2), "it asks for torch.nn.modules.linear.Linear"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, "ComplexDoubleStorage"),
        ({"w": torch.ones(2, dtype=torch.complex64).conj()}, "conjugated"),
        ({"w": torch.eye(2).to_sparse()}, "_rebuild_sparse_tensor"),
    ],
)
def test_what_is_not_a_flat_dict_of_plain_tensors_is_named(tmp_path, zipped, content, message):
    path = save(content, tmp_path / "m.bin", zipped=zipped)
    with pytest.raises(CheckpointError, match=message):
        read_archive(path)


def rewrite(path: Path, change, *, compression: int = zipfile.ZIP_STORED) -> None:
    """Write the records of a zip archive again; `change` maps name and bytes to bytes or None."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression=compression) as archive:
        for name, content in records.items():
            changed = change(name, content)
            if changed is not None:
                archive.writestr(name, changed)


@pytest.mark.parametrize(
    ("record", "change", "message"),
    [
        ("byteorder", lambda _: b"big", "byte order 'big'"),
        ("data/0", lambda _: None, "'0' is missing"),
        ("data/0", lambda content: content[:-4], "its pickle says"),
        ("data.pkl", lambda _: None, "not one made by torch"),
        ("data.pkl", lambda content: content[:-9], "damaged pickle"),
    ],
)
def test_archives_that_torch_would_not_write(tmp_path, record, change, message):
    path = save({"w": torch.zeros(100)}, tmp_path / "m.bin")
    rewrite(path, lambda name, content: change(content) if name.endswith(record) else content)
    with pytest.raises(CheckpointError, match=message):
        read_archive(path)


def test_a_compressed_archive_is_refused(tmp_path):
    path = save({"w": torch.zeros(100)}, tmp_path / "m.bin")
    rewrite(path, lambda _, content: content, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="record is compressed"):
        read_archive(path)


def test_an_archive_without_byteorder_is_little_endian(tmp_path):
    path = save({"w": torch.arange(5.0)}, tmp_path / "m.bin")
    rewrite(path, lambda name, content: None if name.endswith("byteorder") else content)
    assert_reads_back({"w": torch.arange(5.0)}, path)


def test_other_kinds_of_file_are_told_apart(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        read_archive(path)
    path.write_bytes(b"x" * 257 + b"ustar" + b"x" * 400)
    with pytest.raises(CheckpointError, match="tar archive"):
        read_archive(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="neither"):
        read_archive(path)
    path.write_bytes(pickle.dumps({"w": 1}, 2))
    with pytest.raises(CheckpointError, match="a pickle, but not one made by torch"):
        read_archive(path)
    with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", b"\x80\x02N.")
        archive.writestr("model/constants.pkl", b"\x80\x02N." * 9)
    with pytest.raises(CheckpointError, match="TorchScript"):
        read_archive(path)


def test_a_huge_pickle_is_not_read_into_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_archive, "MAX_PICKLE_BYTES", 500)
    tensors = {f"layer.{i}": torch.zeros(1) for i in range(20)}
    with pytest.raises(CheckpointError, match="at most 500"):
        read_archive(save(tensors, tmp_path / "zip.bin"))
    with pytest.raises(CheckpointError, match="more than 500"):
        read_archive(save(tensors, tmp_path / "legacy.bin", zipped=False))


def put_pickle(path: Path, pickled: bytes) -> Path:
    save({"w": torch.zeros(4)}, path)
    rewrite(path, lambda name, content: pickled if name.endswith("data.pkl") else content)
    return path


HOSTILE_PICKLES = {
    "memo the C unpickler would make 64 GB for": b"}r" + struct.pack("<I", 0xFFFFFFFF) + b".",
    "string of a petabyte": b"\x8e" + struct.pack("<Q", 2**50) + b"x.",
    "deep tuples": b"(" * 100_000 + b"t" * 100_000 + b".",
    "key with 2**50 leaves": b"})q\x00" + b"h\x00\x86q\x00" * 50 + b"K\x01s.",
    "deep lists": b"]" * 50_000 + b"a" * 49_999 + b".",
    "very long number": b"}X\x01\x00\x00\x00w\x8a\xff" + b"\x7f" * 255 + b"s.",
    "memo of nothing": b"q\x00.",
    "memo never set": b"h\x07.",
    "no object": b".",
    "deep name": b"(" * 50_000 + b"t" * 50_000 + b"X\x01\x00\x00\x00w\x93.",
    "empty": b"",
}


@pytest.mark.parametrize("pickled", HOSTILE_PICKLES.values(), ids=HOSTILE_PICKLES)
def test_hostile_pickles_are_refused_quickly(tmp_path, pickled):
    with pytest.raises(CheckpointError):
        read_archive(put_pickle(tmp_path / "m.bin", b"\x80\x04" + pickled if pickled else b""))


def test_legacy_storages_that_contradict_their_pickle_are_refused(tmp_path):
    weight = torch.zeros(4)
    path = save({"a": weight, "b": weight.view(4)}, tmp_path / "twice.bin", zipped=False)
    path.write_bytes(path.read_bytes().replace(b"K\x04Nt", b"K\x05Nt", 1))
    with pytest.raises(CheckpointError, match="described in two ways"):
        read_archive(path)
    path = save({"a": weight}, tmp_path / "longer.bin", zipped=False)
    path.write_bytes(path.read_bytes().replace(b"K\x04Nt", b"K\x05Nt") + bytes(8))
    with pytest.raises(CheckpointError, match="has 4 elements, its pickle says 5"):
        read_archive(path)


@pytest.mark.parametrize("written", [b"K\x04t", b"K\x04\x85"], ids=["storage", "shape"])
def test_a_number_too_long_to_print_is_refused(tmp_path, written):
    path = save({"w": torch.zeros(4)}, tmp_path / "m.bin")
    number = b"\x8b" + struct.pack("<i", 4000) + b"\x7f" * 4000

    def enlarge(name: str, content: bytes) -> bytes:
        if name.endswith("data.pkl"):
            assert written in content
            return content.replace(written, number + written[2:], 1)
        return content

    rewrite(path, enlarge)
    with pytest.raises(CheckpointError, match="not counts"):
        read_archive(path)


@ZIP_AND_LEGACY
def test_truncation_at_every_point_is_a_checkpoint_error(tmp_path, zipped):
    whole = save({"a": torch.randn(6, 5), "b": torch.ones(7)}, tmp_path / "m.bin", zipped=zipped)
    content = whole.read_bytes()
    cut = tmp_path / "cut.bin"
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_archive(cut)


@ZIP_AND_LEGACY
@settings(
    max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
    at_pickle=st.booleans(),
)
def test_damaged_bytes_give_checkpoint_errors_or_ranges_inside_the_file(
    tmp_path, zipped, edits, at_pickle
):
    path = tmp_path / "m.bin"
    if not path.exists():
        save(
            {"a": torch.randn(6, 5).t(), "b": torch.nn.Parameter(torch.ones(7))},
            path,
            zipped=zipped,
        )
    content = bytearray(path.read_bytes())
    for position, value in edits:
        content[position % (500 if at_pickle else len(content))] = value
    damaged = tmp_path / "damaged.bin"
    damaged.write_bytes(content)
    try:
        _, tensors = read_archive(damaged)
    except CheckpointError:
        return
    assert all(0 <= t.begin <= t.end <= len(content) for t in tensors)


@settings(
    max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(pickled=st.binary(max_size=200))
def test_arbitrary_bytes_in_place_of_the_pickle(tmp_path, pickled):
    with pytest.raises(CheckpointError):
        read_archive(put_pickle(tmp_path / "m.bin", b"\x80\x02" + pickled))


def test_reading_imports_no_torch(tmp_path):
    path = save({"w": torch.ones(2)}, tmp_path / "m.bin")
    script = (
        "import sys; from pathlib import Path;"
        "from gqaconvert.checkpoint.torch_archive import read_archive;"
        f"tensors = read_archive(Path({str(path)!r}))[1];"
        "print(len(tensors), 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["1", "False", "False"]
