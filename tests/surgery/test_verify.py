"""Every level of `verify` fails on the fault that it is there for, and on no sound output."""

from __future__ import annotations

import json
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest
from checkpoints import llama_config, llama_tensors, read_tensors, write_llama, write_safetensors
from transformers.cache_utils import DynamicLayer

import gqaconvert
from gqaconvert.checkpoint.index import read_index
from gqaconvert.errors import CheckpointError, GqaconvertError, UsageError, VerificationError
from gqaconvert.surgery.class_checks import check_class, check_forward
from gqaconvert.surgery.manifest import hash_file

UNTOUCHED = "model.embed_tokens.weight"
POOLED = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pristine")
    write_llama(folder / "source", shards=2)
    gqaconvert.convert(folder / "source", folder / "out", num_kv_heads=2, hash_files=False)
    gqaconvert.convert(folder / "source", folder / "hashed", num_kv_heads=2, hash_files=True)
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path, dirs_exist_ok=True)
    return tmp_path


def flip(folder, name, at, count=1):
    tensor = read_index(folder).tensors[name]
    path = folder / tensor.file
    content = bytearray(path.read_bytes())
    begin = tensor.begin + at if at >= 0 else tensor.end + at
    for position in range(begin, begin + count):
        content[position] ^= 1
    path.write_bytes(content)


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2))


def forge_hashes(out):
    """Make the manifest agree with a changed output, as if the fault had been written by us."""
    import hashlib

    index, tensors = read_index(out), read_tensors(out)

    def forge(manifest):
        hashes = manifest["sha256"]
        hashes["config.json"] = hash_file(out / "config.json")
        hashes["raw_headers"] = {file.name: file.header_sha256 for file in index.files}
        for name in hashes["tensors"]:
            if name in tensors:
                hashes["tensors"][name] = hashlib.sha256(tensors[name].tobytes()).hexdigest()

    edit_json(out / "gqaconvert.json", forge)


def rewrite(out, change):
    """Write an output's tensors again, with a change to them."""
    for file in read_index(out).files:
        from safetensors.numpy import load_file

        tensors = load_file(out / file.name)
        tensors = {k: v.view(ml_dtypes.bfloat16) for k, v in tensors.items()}
        change(tensors)
        write_safetensors(out / file.name, tensors)


def rewrite_index(out):
    def change(index):
        index["weight_map"] = {name: file.name for file in read_each(out) for name in file.names}

    edit_json(out / "model.safetensors.index.json", change)


def read_each(out):
    from types import SimpleNamespace

    from safetensors import safe_open

    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, framework="np") as opened:
            yield SimpleNamespace(name=path.name, names=list(opened.keys()))


@pytest.mark.parametrize("out", ["out", "hashed"])
@pytest.mark.parametrize("with_source", [True, False])
def test_a_sound_output_passes_every_level(folder, out, with_source):
    source = folder / "source" if with_source else None
    seen = []
    result = gqaconvert.verify(
        folder / out, source, deep=True, forward=True, progress=lambda *sizes: seen.append(sizes)
    )
    names = {check.name for check in result.checks}
    assert {"shapes", "hashes", "class", "logits", "cache", "cache shape"} <= names
    if with_source:
        assert {"headers", "config", "untouched bytes", "other files", "changed tensors"} <= names
        done, total = seen[-1]
        assert done == total > 0


def test_expanded_outputs_pass_too(folder):
    gqaconvert.expand(folder / "out", folder / "wide", num_kv_heads=4)
    gqaconvert.verify(folder / "wide", folder / "out", deep=True, forward=True)


class TestBytes:
    @pytest.mark.parametrize("at", [0, 63, -1, -64])
    def test_the_ends_of_an_untouched_tensor_are_compared(self, folder, at):
        flip(folder / "out", UNTOUCHED, at)
        with pytest.raises(VerificationError, match="untouched tensor differ") as caught:
            gqaconvert.verify(folder / "out", folder / "source")
        assert UNTOUCHED in caught.value.at

    def test_its_middle_is_compared_by_deep_alone(self, folder):
        flip(folder / "out", UNTOUCHED, 1000)
        gqaconvert.verify(folder / "out", folder / "source")
        with pytest.raises(VerificationError, match="untouched tensor differ") as caught:
            gqaconvert.verify(folder / "out", folder / "source", deep=True)
        assert UNTOUCHED in caught.value.at

    def test_its_middle_is_in_the_hash_of_the_file(self, folder):
        flip(folder / "hashed", UNTOUCHED, 1000)
        gqaconvert.verify(folder / "hashed")
        with pytest.raises(VerificationError, match="file was changed"):
            gqaconvert.verify(folder / "hashed", deep=True)

    @pytest.mark.parametrize("at", [0, 200, -1])
    def test_any_byte_of_a_pooled_tensor_is_hashed(self, folder, at):
        flip(folder / "out", POOLED, at)
        with pytest.raises(VerificationError, match="tensor was changed") as caught:
            gqaconvert.verify(folder / "out")
        assert POOLED in caught.value.at

    def test_pooled_heads_are_computed_again_from_the_source(self, folder):
        flip(folder / "out", POOLED, 0, read_index(folder / "out").tensors[POOLED].size_bytes)
        forge_hashes(folder / "out")
        gqaconvert.verify(folder / "out")
        with pytest.raises(VerificationError, match="is not what pooling the source gives"):
            gqaconvert.verify(folder / "out", folder / "source")

    def test_heads_pooled_otherwise_are_found(self, folder):
        gqaconvert.convert(folder / "source", folder / "first", num_kv_heads=2, method="first")
        edit_json(
            folder / "first" / "gqaconvert.json",
            lambda manifest: manifest["plan"].update(
                json.loads((folder / "out" / "gqaconvert.json").read_text())["plan"]
            ),
        )
        with pytest.raises(VerificationError, match="is not what pooling the source gives"):
            gqaconvert.verify(folder / "first", folder / "source")

    def test_a_truncated_shard(self, folder):
        path = max((folder / "out").glob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:-5])
        with pytest.raises(CheckpointError, match="truncated"):
            gqaconvert.verify(folder / "out")

    def test_a_missing_shard(self, folder):
        max((folder / "out").glob("*.safetensors")).unlink()
        with pytest.raises(CheckpointError, match="shards are missing"):
            gqaconvert.verify(folder / "out")


class TestHeaders:
    def test_an_edited_header(self, folder):
        path = max((folder / "out").glob("*.safetensors"))
        path.write_bytes(path.read_bytes().replace(b'"format":"pt"', b'"format":"np"', 1))
        with pytest.raises(VerificationError, match="header was changed") as caught:
            gqaconvert.verify(folder / "out")
        assert path.name in caught.value.at
        forge_hashes(folder / "out")
        gqaconvert.verify(folder / "out")
        with pytest.raises(VerificationError, match="header differs"):
            gqaconvert.verify(folder / "out", folder / "source")

    def test_a_lost_tensor(self, folder):
        rewrite(folder / "out", lambda tensors: tensors.pop("model.norm.weight", None))
        rewrite_index(folder / "out")
        forge_hashes(folder / "out")
        with pytest.raises(VerificationError, match="missing keys, such as 'model"):
            gqaconvert.verify(folder / "out")
        with pytest.raises(VerificationError, match="lacks tensor 'model"):
            gqaconvert.verify(folder / "out", folder / "source")

    def test_a_surplus_tensor(self, folder):
        surplus = np.zeros(3, ml_dtypes.bfloat16)
        rewrite(folder / "out", lambda tensors: tensors.update(surplus=surplus))
        with pytest.raises(GqaconvertError):
            gqaconvert.verify(folder / "out")

    def test_a_lost_pooled_tensor(self, folder):
        rewrite(folder / "out", lambda tensors: tensors.pop(POOLED, None))
        rewrite_index(folder / "out")
        with pytest.raises(GqaconvertError):
            gqaconvert.verify(folder / "out")


class TestConfig:
    @pytest.mark.parametrize("count", [1, 4])
    def test_the_number_of_kv_heads(self, folder, count):
        edit_json(
            folder / "out" / "config.json", lambda config: config.update(num_key_value_heads=count)
        )
        with pytest.raises(CheckpointError, match=f"config says {count} KV heads"):
            gqaconvert.verify(folder / "out")

    def test_another_key(self, folder):
        config = folder / "out" / "config.json"
        edit_json(config, lambda content: content.update(rms_norm_eps=1e-6))
        with pytest.raises(VerificationError, match=r"config\.json was changed"):
            gqaconvert.verify(folder / "out")
        forge_hashes(folder / "out")
        gqaconvert.verify(folder / "out")
        with pytest.raises(VerificationError, match="differs from the source's in more than"):
            gqaconvert.verify(folder / "out", folder / "source")

    def test_other_files(self, folder):
        licence = folder / "out" / "LICENSE"
        licence.write_bytes(licence.read_bytes() + b".")
        gqaconvert.verify(folder / "out", folder / "source")
        with pytest.raises(VerificationError, match="file differs") as caught:
            gqaconvert.verify(folder / "out", folder / "source", deep=True)
        assert caught.value.at.endswith("LICENSE")
        licence.unlink()
        with pytest.raises(VerificationError, match="was not copied"):
            gqaconvert.verify(folder / "out", folder / "source", deep=True)


class TestSource:
    def test_of_another_shape(self, folder):
        write_llama(folder / "other", layers=3)
        with pytest.raises(UsageError, match="not the source"):
            gqaconvert.verify(folder / "out", folder / "other")

    def test_of_other_weights(self, folder):
        write_llama(folder / "other", shards=2, seed=1)
        with pytest.raises(VerificationError, match="untouched tensor differ"):
            gqaconvert.verify(folder / "out", folder / "other")

    def test_of_another_config(self, folder):
        config = folder / "source" / "config.json"
        edit_json(config, lambda content: content.update(rms_norm_eps=1e-6))
        with pytest.raises(VerificationError, match="gives another plan"):
            gqaconvert.verify(folder / "out", folder / "source")


class TestManifest:
    def test_missing(self, folder):
        (folder / "out" / "gqaconvert.json").unlink()
        with pytest.raises(UsageError, match="not a converted checkpoint"):
            gqaconvert.verify(folder / "out")

    def test_no_folder(self, folder):
        with pytest.raises(UsageError, match="no such folder"):
            gqaconvert.verify(folder / "nowhere")

    @pytest.mark.parametrize("number", [0, 2, "1", None])
    def test_of_another_format(self, folder, number):
        edit_json(folder / "out" / "gqaconvert.json", lambda content: content.update(format=number))
        with pytest.raises(UsageError, match=f"manifest of format {number!r}"):
            gqaconvert.verify(folder / "out")

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}'])
    def test_that_cannot_be_read(self, folder, content):
        (folder / "out" / "gqaconvert.json").write_text(content)
        with pytest.raises(CheckpointError) as caught:
            gqaconvert.verify(folder / "out")
        assert "gqaconvert.json" in caught.value.at

    @pytest.mark.parametrize(
        ("section", "key"),
        [("plan", "options"), ("plan", "kv_heads"), ("plan", "sha256"), ("sha256", "tensors")],
    )
    def test_with_a_part_missing(self, folder, section, key):
        path = folder / "out" / "gqaconvert.json"
        edit_json(path, lambda content: content[section].pop(key))
        with pytest.raises(CheckpointError, match="incomplete"):
            gqaconvert.verify(folder / "out")


class TestClass:
    @pytest.fixture
    def broken(self, tmp_path):
        def write(change):
            tensors = llama_tensors(kv_heads=2)
            change(tensors)
            write_safetensors(tmp_path / "model.safetensors", tensors)
            (tmp_path / "config.json").write_text(json.dumps(llama_config(kv_heads=2)))
            return tmp_path

        return write

    def test_sound(self, broken):
        assert "LlamaForCausalLM" in check_class(broken(lambda _: None), None).covered

    def test_missing(self, broken):
        with pytest.raises(VerificationError, match="1 missing keys, such as 'model"):
            check_class(broken(lambda tensors: tensors.pop("model.norm.weight")), None)

    def test_unexpected(self, broken):
        def add(tensors):
            tensors["model.layers.0.self_attn.extra.weight"] = tensors["model.norm.weight"]

        with pytest.raises(VerificationError, match="1 unexpected keys"):
            check_class(broken(add), None)

    def test_of_another_shape(self, broken):
        def narrow(tensors):
            tensors[POOLED] = tensors[POOLED][:8]

        with pytest.raises(VerificationError, match="1 mismatched keys") as caught:
            check_class(broken(narrow), None)
        assert POOLED in caught.value.what

    def test_what_the_source_lacks_too_is_its_own_affair(self, broken, folder):
        out = broken(lambda tensors: tensors.pop("model.norm.weight"))
        rewrite(folder / "source", lambda tensors: tensors.pop("model.norm.weight", None))
        rewrite_index(folder / "source")
        check_class(out, folder / "source")


class TestForward:
    def test_weights_that_are_not_finite(self, folder):
        tensor = read_index(folder / "out").tensors["model.norm.weight"]
        path = folder / "out" / tensor.file
        content = bytearray(path.read_bytes())
        content[tensor.begin : tensor.begin + 2] = struct.pack("<H", 0x7FC0)
        path.write_bytes(content)
        gqaconvert.verify(folder / "out")
        with pytest.raises(VerificationError, match="logits are not finite"):
            gqaconvert.verify(folder / "out", forward=True)

    def test_a_cache_of_other_heads(self, folder):
        with pytest.raises(VerificationError, match=r"cache holds \[2\] KV heads, not 4"):
            check_forward(folder / "out", 4)

    def test_a_cache_that_changes_what_is_computed(self, folder, monkeypatch):
        update = DynamicLayer.update

        def faulty(self, *states, **options):
            keys, values = update(self, *states, **options)
            return keys * 1.1, values

        monkeypatch.setattr(DynamicLayer, "update", faulty)
        with pytest.raises(VerificationError, match="differs from that without"):
            check_forward(folder / "out", 2)
