"""Reading and downloading from a Hub: real processes against a server on this machine."""

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gqaconvert.checkpoint.hub_errors import explained
from gqaconvert.checkpoint.index import read_index
from gqaconvert.errors import GqaconvertError, RefusedError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hub_server import HubServer

SCRIPT = """
import dataclasses, json, sys
from gqaconvert.checkpoint import hub
from gqaconvert.errors import GqaconvertError
assert "huggingface_hub" not in sys.modules
def describe(index):
    if index is None:
        return None
    return {
        "tensors": [dataclasses.astuple(tensor) for tensor in index.tensors.values()],
        "files": [dataclasses.astuple(file) for file in index.files],
        "folder": index.folder and str(index.folder),
        "kind": index.kind,
        "metadata": index.index_metadata,
        "fingerprint": index.fingerprint(),
    }
try:
    if sys.argv[1] == "index":
        model = hub.read_hub_index(*sys.argv[2:])
        answer = [describe(model.index), model.config, model.commit]
    else:
        folder, commit = hub.download_model(*sys.argv[2:])
        answer = [str(folder), commit]
except GqaconvertError as error:
    answer = {"error": type(error).__name__, "text": str(error), "code": error.exit_code}
assert "torch" not in sys.modules
print(json.dumps(answer))
"""
CONFIG = {"model_type": "llama", "num_attention_heads": 8}


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def ask(hub: HubServer, cache: Path, *arguments: str, **environment: str):
    done = hub.run("-c", SCRIPT, *arguments, cache=cache, **environment)
    assert done.returncode == 0, done.stderr
    assert hub.token not in done.stdout + done.stderr
    return json.loads(done.stdout)


def write_model(folder: Path, *, shards: int = 1, rows: int = 1000) -> Path:
    """A config, a tokenizer and some megabytes of weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    tensors = {f"layers.{i}.weight": torch.randn(rows, 500) for i in range(shards * 2)}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {
            f"layers.{i}.weight": tensors[f"layers.{i}.weight"] for i in (2 * shard, 2 * shard + 1)
        }
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    return folder


def as_json(index) -> dict[str, object]:
    return json.loads(
        json.dumps(
            {
                "tensors": [
                    [t.name, t.dtype, t.shape, t.file, t.begin, t.end, t.strides]
                    for t in index.tensors.values()
                ],
                "files": [
                    [f.name, f.size_bytes, f.header_sha256, dict(f.metadata)] for f in index.files
                ],
                "folder": None,
                "kind": index.kind,
                "metadata": index.index_metadata,
                "fingerprint": index.fingerprint(),
            }
        )
    )


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("redirect", [False, True], ids=["direct", "cdn"])
def test_the_index_of_a_hub_model_is_the_local_one_and_needs_no_weights(
    hub, cache, tmp_path, shards, redirect
):
    folder = write_model(tmp_path / "model", shards=shards)
    hub.redirect_weights = redirect
    repo = hub.add("owner/name", folder)
    index, config, commit = ask(hub, cache, "index", "owner/name")
    assert index == as_json(read_index(folder))
    assert config == CONFIG
    assert commit == repo.commit
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert weights > 4_000_000 * shards
    assert hub.bytes_sent < 110_000 * shards
    ranged = [request for request in hub.requests if request.range]
    assert len([request for request in ranged if request.status == 206]) == shards


def test_a_header_longer_than_the_first_request_is_read_in_two(hub, cache, tmp_path):
    folder = write_model(tmp_path / "model")
    many = {f"layers.{i}.some.long.name": torch.zeros(300) for i in range(2000)}
    save_file(many, folder / "model.safetensors")
    hub.add("owner/name", folder)
    assert ask(hub, cache, "index", "owner/name")[0] == as_json(read_index(folder))
    assert hub.bytes_sent < 300_000 < (folder / "model.safetensors").stat().st_size
    for ignored in (True, False):
        hub.ignore_ranges = ignored
        assert ask(hub, cache, "index", "owner/name")[0] == as_json(read_index(folder))


def test_a_server_that_ignores_ranges_is_hung_up_on(hub, cache, tmp_path):
    folder = write_model(tmp_path / "model", rows=20_000)
    hub.ignore_ranges = True
    hub.add("owner/name", folder)
    assert ask(hub, cache, "index", "owner/name")[0] == as_json(read_index(folder))
    assert hub.bytes_sent < (folder / "model.safetensors").stat().st_size / 3


def test_damaged_files_on_the_hub_get_the_errors_of_local_ones(hub, cache, tmp_path):
    folder = write_model(tmp_path / "model", shards=2)
    hub.add("owner/name", folder)
    shard = folder / "model-00002-of-00002.safetensors"
    whole = shard.read_bytes()
    for content, message in [
        (whole[:-1], "truncated"),
        (whole + b"x", "longer than"),
        (whole[:4], "too short"),
        (b"", "too short"),
        (b"\xff" * 100, "header claims"),
    ]:
        shard.write_bytes(content)
        answer = ask(hub, cache, "index", "owner/name")
        assert answer["error"] == "CheckpointError"
        assert message in answer["text"]
        assert "owner/name model-00002-of-00002.safetensors" in answer["text"]
    shard.unlink()
    assert "1 of 2 shards are missing" in ask(hub, cache, "index", "owner/name")["text"]


def test_an_index_that_disagrees_with_its_shards_is_refused(hub, cache, tmp_path):
    folder = write_model(tmp_path / "model", shards=2)
    save_file({"other": torch.zeros(3)}, folder / "model-00002-of-00002.safetensors")
    hub.add("owner/name", folder)
    assert "does not hold it" in ask(hub, cache, "index", "owner/name")["text"]


def test_bin_weights_give_the_config_and_no_index(hub, cache, tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"w": torch.ones(2)}, folder / "pytorch_model.bin")
    hub.add("owner/name", folder)
    assert ask(hub, cache, "index", "owner/name")[:2] == [None, CONFIG]
    downloaded, _ = ask(hub, cache, "download", "owner/name")
    assert (Path(downloaded) / "pytorch_model.bin").is_file()


def test_a_repository_without_weights_or_config_is_refused(hub, cache, tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model.gguf")
    hub.add("owner/name", folder)
    for verb in ("index", "download"):
        answer = ask(hub, cache, verb, "owner/name")
        assert answer["error"] == "CheckpointError"
        assert "no weights" in answer["text"]
    (folder / "config.json").unlink()
    answer = ask(hub, cache, "index", "owner/name")
    assert "no such file" in answer["text"]
    assert "config.json" in answer["text"]


@pytest.mark.parametrize("verb", ["index", "download"])
def test_gated_missing_and_unknown_revisions_are_told_apart(hub, cache, tmp_path, verb):
    folder = write_model(tmp_path / "model")
    hub.add("owner/gated", folder, gated=True)
    hub.add("owner/open", folder)
    gated = ask(hub, cache, verb, "owner/gated")
    assert gated["code"] == 1
    assert "licence" in gated["text"]
    assert "hf auth login" in gated["text"]
    missing = ask(hub, cache, verb, "owner/missing")
    assert missing["error"] == "UsageError"
    assert "no such model" in missing["text"]
    revision = ask(hub, cache, verb, "owner/open", "v9")
    assert revision["error"] == "UsageError"
    assert "no such revision" in revision["text"]
    assert "owner/open@v9" in revision["text"]
    assert ask(hub, cache, verb, "a b/c")["text"].startswith("not a Hub id")
    for answer in (gated, missing, revision):
        assert len(answer["text"].splitlines()) == 3


@pytest.mark.parametrize("verb", ["index", "download"])
def test_a_token_opens_a_gated_model_and_is_stored_nowhere(hub, cache, tmp_path, verb):
    folder = write_model(tmp_path / "model")
    hub.redirect_weights = True
    hub.add("owner/gated", folder, gated=True)
    answer = ask(hub, cache, verb, "owner/gated", HF_TOKEN=hub.token)
    assert isinstance(answer, list)
    elsewhere = [request for request in hub.requests if request.path.startswith("/cdn")]
    assert elsewhere
    assert not any(request.authorization for request in elsewhere)
    stored = b"".join(path.read_bytes() for path in cache.rglob("*") if path.is_file())
    assert hub.token.encode() not in stored


def test_a_download_takes_one_set_of_weights_and_what_lies_beside(hub, cache, tmp_path):
    folder = write_model(tmp_path / "model", shards=2)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.gguf", "tf_model.h5"):
        (folder / name).write_bytes(b"x" * 1000)
    for name in ("onnx/model.onnx", "onnx/config.json", "original/params.json", "runs/events"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    for name in ("LICENSE", "README.md", "[odd].txt", "additional_chat_templates/tool.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("kept")
    repo = hub.add("owner/name", folder)
    downloaded, commit = ask(hub, cache, "download", "owner/name")
    assert commit == repo.commit
    assert Path(downloaded).is_relative_to(cache)
    paths = [path for path in Path(downloaded).rglob("*") if path.is_file()]
    assert {path.relative_to(downloaded).as_posix() for path in paths} == {
        "LICENSE",
        "README.md",
        "[odd].txt",
        "additional_chat_templates/tool.jinja",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    }
    assert as_json(read_index(Path(downloaded))) == as_json(read_index(folder))


def test_a_second_download_and_an_offline_one_use_the_cache(hub, cache, tmp_path):
    folder = write_model(tmp_path / "model", shards=2)
    hub.add("owner/name", folder, branches=("main", "v1"))
    first = ask(hub, cache, "download", "owner/name")
    sent = hub.bytes_sent
    assert ask(hub, cache, "download", "owner/name") == first
    assert hub.bytes_sent - sent < 10_000
    asked = len(hub.requests)
    assert ask(hub, cache, "download", "owner/name", HF_HUB_OFFLINE="1") == first
    index, config, commit = ask(hub, cache, "index", "owner/name", HF_HUB_OFFLINE="1")
    assert len(hub.requests) == asked
    assert index["fingerprint"] == read_index(folder).fingerprint()
    assert index["folder"] == first[0]
    assert (config, commit) == (CONFIG, first[1])
    assert (
        "HF_HUB_OFFLINE" in ask(hub, cache, "index", "owner/name", "v1", HF_HUB_OFFLINE="1")["text"]
    )
    assert "HF_HUB_OFFLINE" in ask(hub, cache, "index", "owner/other", HF_HUB_OFFLINE="1")["text"]


def test_a_partial_snapshot_does_not_pass_for_a_cached_model(hub, cache, tmp_path):
    hub.add("owner/name", write_model(tmp_path / "model", shards=2))
    downloaded, _ = ask(hub, cache, "download", "owner/name")
    (Path(downloaded) / "model-00002-of-00002.safetensors").unlink()
    for verb in ("index", "download"):
        answer = ask(hub, cache, verb, "owner/name", HF_HUB_OFFLINE="1")
        assert answer["error"] == "HubUnreachable"
        assert "not wholly" in answer["text"]


def test_a_network_that_is_down_leaves_the_cache(hub, cache, tmp_path):
    hub.add("owner/name", write_model(tmp_path / "model"))
    first = ask(hub, cache, "download", "owner/name")
    hub.fail_with = 503
    assert ask(hub, cache, "download", "owner/name") == first
    hub.stop()
    assert ask(hub, cache, "download", "owner/name") == first
    assert ask(hub, cache, "index", "owner/name")[1:] == [CONFIG, first[1]]
    answer = ask(hub, cache, "index", "owner/other")
    assert answer["error"] == "HubUnreachable"
    assert "check the network" in answer["text"]


def test_too_little_space_is_seen_before_the_weights_are_fetched(hub, cache, tmp_path):
    folder = write_model(tmp_path / "model")
    os.truncate(folder / "model.safetensors", shutil.disk_usage(tmp_path).free + 2**34)
    hub.add("owner/name", folder)
    answer = ask(hub, cache, "download", "owner/name")
    assert answer["error"] == "RefusedError"
    assert answer["code"] == 4
    assert "the download takes" in answer["text"]
    assert hub.bytes_sent < 10_000


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (OSError(errno.ENOSPC, "No space left"), RefusedError, "no space left"),
        (PermissionError(errno.EACCES, "denied", "/x"), GqaconvertError, "cache cannot be used"),
        (OSError("Consistency check failed"), GqaconvertError, "did not arrive whole"),
    ],
)
def test_faults_of_the_disk_are_explained(raised, kind, message):
    with pytest.raises(kind, match=message) as caught, explained("owner/name", "owner/name"):
        raise raised
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("status", "message"),
    [(403, "denies access"), (429, "too many requests"), (418, "does not answer")],
)
def test_other_refusals_of_the_hub_are_explained(hub, cache, status, message):
    hub.fail_with = status
    answer = ask(hub, cache, "index", "owner/name")
    assert answer["code"] == 1
    assert message in answer["text"]
