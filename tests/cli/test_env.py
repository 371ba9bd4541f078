"""`gqaconvert env` as a process: quick, complete, and nothing that should not be pasted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from gqaconvert.cli.env import describe_environment

TOKEN = "hf_secret_of_somebody"
DRIVER = """#!/bin/sh
case "$1" in
*memory*) echo "NVIDIA H100 80GB HBM3, 81559 MiB"; echo "NVIDIA H100 80GB HBM3, 81559 MiB" ;;
*) echo 570.86.15; echo 570.86.15 ;;
esac
"""


def env(*options: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-m", "gqaconvert", "env", *options],
        env=inherited | {"HOME": str(home)} | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip


def test_versions_and_machine_are_named(tmp_path):
    found = json.loads(env("--json", home=tmp_path).stdout)
    for name in ("torch", "transformers", "accelerate", "huggingface_hub"):
        assert found["versions"][name] == version(name)
    assert found["versions"]["torch built for"]
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory"].count("GiB") == 2
    assert found["settings"]["recipes"].startswith(tuple("123456789"))
    assert found["settings"]["accelerate default config"] is None
    assert found["hugging face"]["logged in"] is False
    assert found["hugging face"]["HF_HUB_OFFLINE"] is False


def test_what_is_printed_is_what_json_holds(tmp_path):
    printed = env(home=tmp_path).stdout
    assert f"  torch: {version('torch')}\n" in printed
    assert "  logged in: no\n" in printed
    for section, rows in describe_environment().items():
        assert f"{section}:\n" in printed
        assert all(f"\n  {name}: " in printed for name in rows)


@pytest.mark.parametrize("way", ["file", "variable"])
def test_a_login_is_told_and_its_token_is_not(tmp_path, way):
    (tmp_path / "token").write_text(TOKEN)
    environment = {"HF_HOME": str(tmp_path)} if way == "file" else {"HF_TOKEN": TOKEN}
    for options in ((), ("--json",)):
        done = env(*options, home=tmp_path / "nobody", **environment)
        assert TOKEN not in done.stdout + done.stderr
    assert json.loads(done.stdout)["hugging face"]["logged in"] is True


def test_paths_and_addresses_do_not_name_their_owner(tmp_path):
    mirror = {"HF_ENDPOINT": "https://me:word@mirror.example/hf", "HF_HUB_OFFLINE": "1"}
    done = env("--json", home=tmp_path / "jane-doe", **mirror)
    settings = json.loads(done.stdout)["hugging face"]
    assert settings["HF_ENDPOINT"] == "https://mirror.example/hf"
    assert settings["HF_HUB_OFFLINE"] is True
    assert settings["HF_HOME"] == "~/.cache/huggingface"
    assert "jane-doe" not in done.stdout


def test_the_default_of_accelerate_is_named(tmp_path):
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("use_cpu: true\n")
    done = env("--json", home=tmp_path / "home", HF_HOME=str(tmp_path))
    found = json.loads(done.stdout)["settings"]["accelerate default config"]
    assert found == str(tmp_path / "accelerate" / "default_config.yaml")


def test_gpus_come_from_the_driver(tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(DRIVER)
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    machine = json.loads(env("--json", home=tmp_path, PATH=path).stdout)["machine"]
    assert machine["gpus"] == ["NVIDIA H100 80GB HBM3, 81559 MiB"] * 2
    assert machine["gpu driver"] == "570.86.15"
    program.write_text("#!/bin/sh\nexit 9\n")
    assert json.loads(env("--json", home=tmp_path, PATH=path).stdout)["machine"]["gpus"] == []


def test_nothing_heavy_is_imported_and_what_is_missing_is_said():
    code = (
        "import sys\nfrom gqaconvert.cli.env import _version, describe_environment\n"
        "describe_environment()\nprint(_version('no-such-package'))\n"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "not installed\nset()\n"
