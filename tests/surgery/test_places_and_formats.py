"""Conversions from other places and formats: the Hub by alias, and `.bin` files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import folder_bytes, read_tensors, write_llama
from hub_server import HubServer

import gqaconvert


class TestHub:
    def test_an_alias_is_fetched_converted_and_named_after_it(self, tmp_path, monkeypatch):
        write_llama(tmp_path / "repo", shards=2)
        work = tmp_path / "work"
        work.mkdir()
        monkeypatch.chdir(work)
        with HubServer() as hub:
            hub.add("meta-llama/Llama-2-7b-hf", tmp_path / "repo")
            words = ["-m", "gqaconvert", "convert", "llama2-7b", "--kv-heads", "2"]
            done = hub.run(*words, cache=tmp_path / "cache")
            assert done.returncode == 0, done.stderr
            out = work / "llama2-7b-gqa2"
            manifest = json.loads((out / "gqaconvert.json").read_text())
            assert manifest["source"]["name"] == "meta-llama/Llama-2-7b-hf"
            assert len(manifest["source"]["revision"]) == 40
            card = (out / "README.md").read_text()
            assert "base_model: meta-llama/Llama-2-7b-hf" in card
        gqaconvert.convert(tmp_path / "repo", tmp_path / "local", num_kv_heads=2)
        for name, content in folder_bytes(tmp_path / "local").items():
            if name not in ("gqaconvert.json", "README.md"):
                assert folder_bytes(out)[name] == content, name

    def test_inspecting_fetches_headers_only(self, tmp_path):
        write_llama(tmp_path / "repo", vocab=40_000)
        weights = (tmp_path / "repo" / "model.safetensors").stat().st_size
        with HubServer() as hub:
            hub.add("owner/name", tmp_path / "repo")
            words = ["-m", "gqaconvert", "inspect", "owner/name", "--json"]
            done = hub.run(*words, cache=tmp_path / "cache")
            assert done.returncode == 0, done.stderr
            assert hub.bytes_sent < weights / 10
        found = json.loads(done.stdout)
        assert found["attention"] == "MHA"
        assert found["legal_kv_heads"] == [2, 1]
        assert len(found["revision"]) == 40

    def test_a_gated_model_is_explained(self, tmp_path):
        write_llama(tmp_path / "repo")
        with HubServer() as hub:
            hub.add("meta-llama/Llama-2-7b-hf", tmp_path / "repo", gated=True)
            words = ["-m", "gqaconvert", "convert", "llama2-7b", "--kv-heads", "2"]
            done = hub.run(*words, cache=tmp_path / "cache")
        assert done.returncode != 0
        assert done.stderr.startswith("error: ")
        assert "try: " in done.stderr
        assert "Traceback" not in done.stderr


class TestTorchFiles:
    def write(self, folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
        """Replace the safetensors files of a folder by .bin files."""
        for path in folder.glob("model*"):
            path.unlink()
        names = list(tensors)
        if shards == 1:
            torch.save(tensors, folder / "pytorch_model.bin")
            return
        weight_map = {}
        for number in range(shards):
            part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
            file = f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
            torch.save({name: tensors[name] for name in part}, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))

    @pytest.fixture
    def pair(self, tmp_path) -> tuple[Path, Path, dict[str, torch.Tensor]]:
        """The same model in safetensors and, still to be written, in .bin files."""
        arrays = write_llama(tmp_path / "safe", dtype="F32")
        write_llama(tmp_path / "bin", dtype="F32")
        return (
            tmp_path / "safe",
            tmp_path / "bin",
            {n: torch.from_numpy(a) for n, a in arrays.items()},
        )

    @pytest.mark.parametrize("shards", [1, 3])
    def test_give_the_same_tensors_as_safetensors(self, tmp_path, pair, shards):
        safe, other, tensors = pair
        self.write(other, tensors, shards)
        gqaconvert.convert(safe, tmp_path / "a", num_kv_heads=2)
        gqaconvert.convert(other, tmp_path / "b", num_kv_heads=2)
        first, second = read_tensors(tmp_path / "a"), read_tensors(tmp_path / "b")
        assert {n: a.tobytes() for n, a in first.items()} == {
            n: a.tobytes() for n, a in second.items()
        }
        assert not list((tmp_path / "b").glob("*.bin*"))
        assert len(list((tmp_path / "b").glob("*.safetensors"))) == shards
        gqaconvert.verify(tmp_path / "b", other, deep=True, forward=True)

    def test_transposed_tensors_are_written_in_row_order(self, tmp_path, pair):
        safe, other, tensors = pair
        strided = {n: t.T.contiguous().T if t.ndim == 2 else t for n, t in tensors.items()}
        assert not strided["model.embed_tokens.weight"].is_contiguous()
        self.write(other, strided, 1)
        gqaconvert.convert(safe, tmp_path / "a", num_kv_heads=1)
        gqaconvert.convert(other, tmp_path / "b", num_kv_heads=1)
        first, second = read_tensors(tmp_path / "a"), read_tensors(tmp_path / "b")
        assert all((first[name] == second[name]).all() for name in first)

    def test_a_tied_head_is_stored_once_as_in_safetensors(self, tmp_path, pair):
        _, other, tensors = pair
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        self.write(other, tensors, 1)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        conversion = gqaconvert.convert(other, tmp_path / "out", num_kv_heads=2)
        assert "lm_head.weight" not in read_tensors(tmp_path / "out")
        assert conversion.plan.dropped == {"lm_head.weight": "tied to model.embed_tokens.weight"}
        gqaconvert.verify(tmp_path / "out", other, deep=True, forward=True)

    def test_a_pickle_that_would_run_code_is_refused_unrun(self, tmp_path):
        class Planted:
            def __reduce__(self):
                return (Path(tmp_path / "ran").touch, ())

        write_llama(tmp_path / "bin")
        (tmp_path / "bin" / "model.safetensors").unlink()
        torch.save({"a": Planted()}, tmp_path / "bin" / "pytorch_model.bin")
        with pytest.raises(gqaconvert.errors.CheckpointError):
            gqaconvert.convert(tmp_path / "bin", tmp_path / "out", num_kv_heads=2)
        assert not (tmp_path / "ran").exists()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["bin"]

    def test_safetensors_win_where_both_are_present(self, tmp_path):
        source = write_llama(tmp_path / "both")
        torch.save({"wrong": torch.zeros(3)}, tmp_path / "both" / "pytorch_model.bin")
        gqaconvert.convert(tmp_path / "both", tmp_path / "out", num_kv_heads=2)
        output = read_tensors(tmp_path / "out")
        assert output.keys() == source.keys()
        name = "model.norm.weight"
        assert np.array_equal(output[name].view(np.uint16), source[name].view(np.uint16))


def test_the_bundled_model_converts_from_anywhere(tmp_path):
    conversion = gqaconvert.convert("tiny", tmp_path / "out", num_kv_heads=2)
    assert conversion.written
    gqaconvert.verify(tmp_path / "out", "tiny", deep=True, forward=True)
    assert sys.modules["torch"]
