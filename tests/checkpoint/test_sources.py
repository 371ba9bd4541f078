"""What MODEL means on a command line."""

import re
from pathlib import Path

import pytest

from gqaconvert.checkpoint.sources import ALIASES, Source, resolve_source
from gqaconvert.errors import UsageError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_an_existing_folder_wins_over_everything():
    for name in ("llama2-7b", "tiny", "owner/name", "unheard-of"):
        Path(name).mkdir(parents=True)
        source = resolve_source(name)
        assert source == Source("folder", Path(name), None, Path(name).name)


def test_the_current_folder_is_called_by_its_name(tmp_path):
    assert resolve_source(".").label == tmp_path.name


def test_tiny_is_the_bundled_model():
    source = resolve_source("tiny")
    assert source.kind == "bundled"
    assert source.folder is not None
    assert source.folder.parts[-3:] == ("gqaconvert", "bundled", "tiny")


def test_an_alias_is_a_hub_id_and_keeps_its_short_name():
    source = resolve_source("llama2-7b", "abc")
    assert source == Source("hub", None, "meta-llama/Llama-2-7b-hf", "llama2-7b", "abc")


def test_a_hub_id_is_called_by_its_second_half():
    assert resolve_source("Qwen/Qwen1.5-7B") == Source("hub", None, "Qwen/Qwen1.5-7B", "Qwen1.5-7B")


def test_aliases_are_short_names_of_well_formed_hub_ids():
    for alias, repo_id in ALIASES.items():
        assert re.fullmatch(r"[a-z0-9.-]+", alias)
        assert resolve_source(repo_id).repo_id == repo_id
    assert len(set(ALIASES.values())) == len(ALIASES)


@pytest.mark.parametrize(
    ("written", "meant"),
    [("lama2-7b", "llama2-7b"), ("Llama2-7B", "llama2-7b"), ("tinny", "tiny"), ("phi2", "phi-2")],
)
def test_a_misspelt_alias_names_the_nearest(written, meant):
    with pytest.raises(UsageError) as caught:
        resolve_source(written)
    assert meant in (caught.value.remedy or "")


def test_a_misspelt_folder_names_the_nearest():
    Path("my-model").mkdir()
    Path("my-model/config.json").touch()
    for written in ("my-modle", "./my-modle"):
        with pytest.raises(UsageError) as caught:
            resolve_source(written)
        assert "my-model" in (caught.value.remedy or "")


@pytest.mark.parametrize("path", ["./x", "../x", "/nowhere/x", "a/b/c", "~/no such folder", "a\\b"])
def test_a_path_that_is_not_there_is_not_sought_on_the_hub(path):
    with pytest.raises(UsageError, match="no such folder"):
        resolve_source(path)


def test_a_file_is_answered_with_its_folder():
    Path("m").mkdir()
    Path("m/model.safetensors").touch()
    with pytest.raises(UsageError, match="a file") as caught:
        resolve_source("m/model.safetensors")
    assert caught.value.remedy == "m"


@pytest.mark.parametrize(
    "model",
    ["", " ", "a b/c", "-x/y", "x" * 5000, "~nobody-of-this-name", "a--b/c", "a..b/c", "\0"],
)
def test_nonsense_is_a_usage_error(model):
    with pytest.raises(UsageError):
        resolve_source(model)


def test_a_revision_needs_a_hub_id():
    Path("here").mkdir()
    for model in ("here", "tiny"):
        with pytest.raises(UsageError, match="no revision 'v1'"):
            resolve_source(model, "v1")
    assert resolve_source("owner/name", "v1").revision == "v1"
