"""Uploading to a Hub: real processes and huggingface_hub's own code against a server here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from checkpoints import write_llama
from hub_server import HubServer

from gqaconvert.checkpoint.hub_upload import UploadTarget, files_to_upload, upload_command


@pytest.fixture
def hub(tmp_path):
    with HubServer(storage=tmp_path / "hub") as server:
        yield server


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_llama(tmp_path / "model", shards=2)
    return tmp_path / "model"


class Uploads:
    """The command line as somebody who is logged in, or with `token=""` nobody."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self.hub, self.folder, self.token = hub, folder, hub.token

    def convert(self, *options: str, out: str = "out", model: str = "model", **environment: str):
        words = ["convert", str(self.folder / model), str(self.folder / out), "--kv-heads", "1"]
        return self.run(*words, *options, **environment)

    def run(self, *words: str, **environment: str):
        """The command line in a process of its own, which never shows the token."""
        login = {"HF_TOKEN": self.token} if self.token else {}
        offline = {"HF_HUB_OFFLINE": "0"}
        done = self.hub.run(
            "-m", "gqaconvert", *words, cache=self.folder / "cache", **login | offline | environment
        )
        assert self.hub.token not in done.stdout + done.stderr
        return done

    def refused(self, *options: str, code: int, **environment: str) -> str:
        """The error of a conversion that does not begin."""
        done = self.convert(*options, **environment)
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 3
        assert not (self.folder / "out").exists()
        return done.stderr


@pytest.fixture
def uploads(hub, model, tmp_path):
    return Uploads(hub, tmp_path)


def contents(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    found.pop(".gitattributes", None)
    return found


def writes(hub: HubServer) -> list[str]:
    return [each.path for each in hub.requests if each.method in ("POST", "PUT")]


def test_a_conversion_is_uploaded_whole_and_private(hub, uploads, tmp_path):
    done = uploads.convert("--push-to-hub", "small-model")
    assert done.returncode == 0, done.stderr
    assert "uploaded: " + hub.url + "/somebody/small-model" in done.stderr
    repo = hub.repos["somebody/small-model"]
    assert repo.private
    assert contents(repo.folder) == contents(tmp_path / "out")
    assert "gqaconvert.json" in contents(repo.folder)
    assert repo.commits == ["Convert to 1 KV head with gqaconvert"]
    first_write = min(i for i, each in enumerate(hub.requests) if each.method == "POST")
    assert "whoami" in hub.requests[0].path
    assert first_write > 1  # questions come before anything is made


def test_the_token_goes_to_the_hub_alone_and_is_stored_nowhere(hub, uploads, tmp_path):
    done = uploads.convert("--push-to-hub", "somebody/small", "-vv")
    assert done.returncode == 0, done.stderr
    blobs = [each for each in hub.requests if each.path.startswith("/lfs/")]
    assert len(blobs) == 2
    assert not any(each.authorization for each in blobs)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert hub.token.encode() not in stored


def test_the_way_that_uploads_go_with_xet_installed(hub, uploads, tmp_path):
    hub.large = ("no large files, which need a server of its own",)
    done = uploads.convert("--push-to-hub", "small", HF_HUB_DISABLE_XET="0")
    assert done.returncode == 0, done.stderr
    assert contents(hub.repos["somebody/small"].folder) == contents(tmp_path / "out")


def test_public_is_asked_for(hub, uploads):
    assert "--push-to-hub ID" in uploads.refused("--public", code=2)
    assert uploads.convert("--push-to-hub", "small", "--public").returncode == 0
    assert not hub.repos["somebody/small"].private


def test_a_dry_run_asks_and_sends_nothing(hub, uploads, tmp_path):
    done = uploads.convert("--push-to-hub", "small", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "would upload 2 weight files" in done.stderr
    assert "/somebody/small (private, new)" in done.stderr
    assert writes(hub) == []
    shown = uploads.convert("--push-to-hub", "small", "--dry-run", "--json")
    assert json.loads(shown.stdout)["hub"] == {
        "url": f"{hub.url}/somebody/small",
        "private": True,
    }


def test_what_would_refuse_the_upload_is_said_before_the_work(hub, uploads):
    push = ("--push-to-hub", "small")
    assert "HF_HUB_OFFLINE is set" in uploads.refused(*push, code=1, HF_HUB_OFFLINE="1")
    for name in ("a/b/c", "two words", "-x", "a..b", ""):
        assert "not a name for a repository" in uploads.refused("--push-to-hub", name, code=2)
    error = uploads.refused("--push-to-hub", "stranger/small", code=1)
    assert "not a member of, stranger" in error
    hub.role = "read"
    error = uploads.refused(*push, code=1)
    assert "may only read" in error
    assert "try: hf auth login" in error
    assert "login is not valid" in uploads.refused(*push, code=1, HF_TOKEN="hf_wrong")
    hub.fail_at["whoami"] = 503
    assert "HTTP 503" in uploads.refused(*push, code=1)
    assert writes(hub) == []
    hub.stop()
    assert "does not answer" in uploads.refused(*push, code=1)


def test_nobody_logged_in(hub, uploads):
    uploads.token = ""
    error = uploads.refused("--push-to-hub", "small", code=1)
    assert "nobody is logged in" in error
    assert "try: hf auth login" in error
    assert hub.requests == []


def test_an_organisation_of_the_account_may_be_written_to(hub, uploads):
    hub.organisations = ("Lab",)
    assert uploads.convert("--push-to-hub", "Lab/small").returncode == 0
    assert hub.repos["Lab/small"].private


def test_what_others_made_is_never_replaced(hub, uploads, tmp_path):
    folder = tmp_path / "theirs"
    write_llama(folder)
    hub.add("somebody/theirs", folder, private=True)
    before = contents(folder)
    for more in ((), ("--overwrite",), ("--overwrite", "--public")):
        error = uploads.refused("--push-to-hub", "theirs", *more, code=4)
        assert "did not make" in error
    assert contents(folder) == before


def test_our_own_is_replaced_when_asked_and_stale_files_go(hub, uploads, tmp_path):
    assert uploads.convert("--push-to-hub", "small", out="first").returncode == 0
    repo = hub.repos["somebody/small"]
    again = ("--push-to-hub", "small", "--max-shard-size", "1GB")
    assert "--overwrite to replace it" in uploads.refused(*again, code=4)
    done = uploads.convert(*again, "--overwrite")
    assert done.returncode == 0, done.stderr
    assert "replacing what it holds" in done.stderr
    assert contents(repo.folder) == contents(tmp_path / "out")
    assert "model-00001-of-00002.safetensors" not in contents(repo.folder)
    assert (repo.folder / ".gitattributes").is_file()
    assert len(repo.commits) == 2


def test_an_existing_public_repository_needs_public(hub, uploads, tmp_path):
    (tmp_path / "empty").mkdir()
    hub.add("somebody/open", tmp_path / "empty")
    assert "is public" in uploads.refused("--push-to-hub", "open", code=4)
    assert uploads.convert("--push-to-hub", "open", "--public").returncode == 0
    assert "gqaconvert.json" in contents(hub.repos["somebody/open"].folder)


@pytest.mark.parametrize(
    ("where", "status", "message"),
    [
        ("repos/create", 403, "may not write there"),
        ("objects/batch", 402, "no room left"),
        ("/lfs/", 400, "HTTP 400"),
        ("/commit/", 409, "meanwhile"),
    ],
)
def test_a_failed_upload_keeps_the_output_and_says_how_to_go_on(
    hub, uploads, tmp_path, where, status, message
):
    hub.fail_at[where] = status
    done = uploads.convert("--push-to-hub", "small")
    assert done.returncode == 1
    error = done.stderr[done.stderr.index("error: ") :]
    assert message in error
    assert f"try: hf upload somebody/small {tmp_path / 'out'} . --private" in error
    assert len(error.splitlines()) == 3
    assert uploads.convert(out="unpushed").returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "unpushed")


def test_a_card_that_the_hub_refuses_is_told(hub, uploads, tmp_path):
    hub.card_faults = ('"license" must be one of [apache-2.0, mit]',)
    done = uploads.convert("--push-to-hub", "small")
    assert done.returncode == 1
    assert '"license" must be one of' in done.stderr
    assert (tmp_path / "out").is_dir()


def test_the_card_has_metadata_that_the_hub_knows(uploads, model, tmp_path):
    card = "---\nlicense: apache-2.0\ntags: [text]\npipeline_tag: text-generation\n---\n# Source\n"
    (model / "README.md").write_text(card)
    assert uploads.convert("--push-to-hub", "small").returncode == 0
    from huggingface_hub import ModelCard

    loaded = ModelCard.load(tmp_path / "out" / "README.md").data
    assert loaded.license == "apache-2.0"
    assert loaded.library_name == "transformers"
    assert loaded.tags == ["text", "gqaconvert"]
    assert loaded.to_dict().keys() <= {"license", "tags", "pipeline_tag", "library_name"}


def test_hidden_files_stay_here(tmp_path):
    for name in ("config.json", ".env", ".cache/token", "extra/.hidden", "extra/merges.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert files_to_upload(tmp_path) == {"config.json": 1, "extra/merges.txt": 1}


def test_the_command_that_tries_again_survives_a_shell():
    target = UploadTarget("o/n", private=False, exists=True, replaces=True, url="u")
    assert upload_command(Path("my models/x"), target) == (
        "hf upload o/n 'my models/x' . --delete '*'"
    )


RECIPE = {
    "version": 1,
    "source": {"model": "tiny"},
    "convert": {"kv_heads": 2},
    "uptrain": {
        "data": {"datasets": [{"path": "bundled"}], "context": 32, "workers": 1},
        "loss": {"distill": 0.0, "next_token": 1.0},
        "budget": {"steps": 1},
        "batch_tokens": 64,
        "micro_batch": 1,
        "lr": 1.0e-3,
        "precision": "fp32",
    },
}


@pytest.fixture
def training(tmp_path) -> list[str]:
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(RECIPE))
    return ["uptrain", str(tmp_path / "short.yaml"), "--out", str(tmp_path / "run")]


@pytest.mark.parametrize(
    "processes",
    ["1", pytest.param("2", marks=[pytest.mark.slow, pytest.mark.distributed])],
    ids=["one", "two"],
)
def test_a_trained_model_is_uploaded_once_and_nothing_else_of_the_run(
    hub, uploads, training, tmp_path, processes
):
    done = uploads.run(*training, "--num-processes", processes, "--push-to-hub", "trained")
    assert done.returncode == 0, done.stderr
    repo = hub.repos["somebody/trained"]
    assert repo.private
    assert repo.commits == ["Uptrain for 1 step with gqaconvert"]
    assert contents(repo.folder) == contents(tmp_path / "run" / "model")
    uploaded = contents(repo.folder)
    assert yaml.safe_load(uploaded["README.md"].decode().split("---")[1])["library_name"]
    assert str(tmp_path).encode() not in uploaded["README.md"] + uploaded["gqaconvert.json"]


def test_a_training_that_could_not_be_uploaded_does_not_begin(hub, uploads, training, tmp_path):
    hub.role = "read"
    done = uploads.run(*training, "--push-to-hub", "trained")
    assert done.returncode == 1
    assert "may only read" in done.stderr
    assert not (tmp_path / "run").exists()
