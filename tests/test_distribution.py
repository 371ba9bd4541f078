"""What is published: the wheel holds what runs, the sdist makes the same wheel, and both work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = {
    "configs/accelerate": "gqaconvert/bundled/accelerate",
    "configs/eval": "gqaconvert/bundled/eval",
    "recipes": "gqaconvert/bundled/recipes",
}


def build(kind: str, root: Path, out: Path) -> Path:
    """Build in a process of its own, as pip and uv do, but with the hatchling that is here."""
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)],
        cwd=root, check=True, capture_output=True,
    )  # fmt: skip
    return next(out.glob("*.whl" if kind == "wheel" else "*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")
        }


def files_below(folder: Path) -> dict[str, bytes]:
    paths = [
        path
        for path in folder.rglob("*")
        if path.is_file() and not {"__pycache__", ".DS_Store"} & set(path.parts)
    ]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_the_wheel_is_the_package_and_what_ships_with_it(wheel):
    found = contents(wheel)
    expected = {
        f"gqaconvert/{name}": text for name, text in files_below(ROOT / "gqaconvert").items()
    }
    for folder, place in SHIPPED.items():
        expected |= {f"{place}/{name}": text for name, text in files_below(ROOT / folder).items()}
    inside = {name: content for name, content in found.items() if ".dist-info/" not in name}
    assert inside == expected
    for name in ("py.typed", "bundled/tiny/model.safetensors", "bundled/recipes/tiny-cpu.yaml"):
        assert f"gqaconvert/{name}" in inside
    assert any(name.endswith("licenses/LICENSE") for name in found)
    assert any(name.endswith("entry_points.txt") for name in found)


def test_the_source_distribution_makes_the_same_wheel(wheel, sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    again = build("wheel", unpacked, tmp_path / "again")
    assert contents(again) == contents(wheel)


def test_the_source_distribution_can_be_tested(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/conftest.py"} <= names
    junk = (".pyc", ".log", ".safetensors.partial", ".coverage")
    assert not [name for name in names if name.endswith(junk) or "cache" in Path(name).parts]
    large = [name for name in names if name.startswith(("runs/", "results/", "shared/", "dist/"))]
    assert large == []


def test_nothing_in_it_names_the_machine_it_was_built_on(wheel):
    places = {str(ROOT).encode(), str(Path.home()).encode() + b"/", sys.prefix.encode()}
    for name, content in contents(wheel).items():
        assert not [place for place in places if place in content], name


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, at the versions of this one, which uv may have kept."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    folder = tmp_path_factory.mktemp("installed")
    names = [Requirement(line).name for line in requires("gqaconvert") or () if "extra" not in line]
    pins = folder / "pins.txt"
    pins.write_text("".join(f"{name}=={version(name)}\n" for name in names))
    for command in (
        [uv, "venv", "--quiet", "--python", "3.11", str(folder / "venv")],
        [
            *(uv, "pip", "install", "--quiet", "--python", str(folder / "venv")),
            *("--constraint", str(pins), str(wheel)),
        ],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no environment with the wheel: {done.stderr.strip()[-500:]}")
    return folder / "venv" / "bin"


@pytest.mark.slow
@pytest.mark.timeout(1500)
class TestInstalled:
    @pytest.fixture
    def run(self, installed: Path, tmp_path: Path):
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "VIRTUAL_ENV", "HF_", "GQACONVERT"))
        }
        environment = clean | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}

        def run(program: str, *words: str) -> str:
            done = subprocess.run(
                [str(installed / program), *words], cwd=tmp_path, env=environment,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-3000:]
            return done.stdout

        return run

    def test_it_is_the_installed_one(self, run, installed):
        place = run("python", "-c", "import gqaconvert; print(gqaconvert.__file__)").strip()
        assert Path(place).is_relative_to(installed.parent)

    def test_what_ships_is_found(self, run):
        assert "tiny-cpu" in run("gqaconvert", "recipes", "list")
        assert "valid" in run("gqaconvert", "recipes", "validate", "tiny-cpu")
        assert "fsdp2" in run("gqaconvert", "run", "--help")
        found = json.loads(run("gqaconvert", "env", "--json"))
        assert found["versions"]["gqaconvert"] == version("gqaconvert")
        assert "bundled" in found["settings"]["recipes"]

    def test_a_conversion_loads_in_transformers(self, run):
        run("gqaconvert", "convert", "tiny", "out", "--kv-heads", "2")
        run("gqaconvert", "verify", "out")
        code = (
            "from transformers import AutoModelForCausalLM as M\n"
            "print(M.from_pretrained('out').config.num_key_value_heads)"
        )
        assert run("python", "-c", code).strip() == "2"

    def test_a_recipe_runs_by_name_from_model_to_report(self, run, tmp_path):
        run("gqaconvert", "run", "tiny-cpu", "--set", "uptrain.budget.steps=2")
        report = tmp_path / "runs" / "tiny-cpu" / "report"
        assert (report / "report.html").is_file()
        assert (report / "report.md").is_file()
