"""`gqaconvert env`: what this machine and installation are, to paste into an issue.

Versions come from installed metadata and GPUs from their driver, so nothing heavy is imported and
it answers even where torch does not load. It never shows a token, nor who is logged in.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from gqaconvert.cli.terminal import show_json
from gqaconvert.units import format_memory

_REQUIRED = (
    "torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "tokenizers",
    "datasets", "lm-eval", "numpy",
)  # fmt: skip
_OPTIONAL = ("peft", "hqq", "optimum-quanto", "hf-xet", "wandb", "tensorboard")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_NOT_INSTALLED = "not installed"


def env_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print versions, devices and settings, for an issue."""
    found = describe_environment()
    if as_json:
        show_json(found)
        return
    for section, rows in found.items():
        typer.echo(f"{section}:")
        for name, value in rows.items():
            typer.echo(f"  {name}: {_in_words(value)}")


def describe_environment() -> dict[str, dict[str, Any]]:
    """Return what `env` prints, by section; values are texts, numbers, truth values and lists."""
    return {
        "versions": {
            "python": platform.python_version(),
            "gqaconvert": _version("gqaconvert"),
            **{name: _version(name) for name in _REQUIRED},
            "torch built for": _torch_built_for(),
        },
        "optional": {name: _version(name) for name in _OPTIONAL},
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": _cores(),
            "vector instructions": _instructions(),
            "memory": _memory(),
            "gpus": _gpus(),
            "gpu driver": _driver(),
        },
        "hugging face": _hub_settings(os.environ),
        "settings": {
            "accelerate default config": _accelerate_default(),
            "recipes": _recipes(),
            **{
                name: os.environ[name]
                for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
                if name in os.environ
            },
        },
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _NOT_INSTALLED


def _torch_built_for() -> str | None:
    """Read torch's build from its files, since importing it takes seconds and may fail."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    text = "\n".join(_lines(Path(found.origin).with_name("version.py")))
    for name, label in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        built = re.search(rf"^{name}[^=\n]*= '([^']+)'", text, re.MULTILINE)
        if built:
            return f"{label} {built[1]}"
    return "CPU"


def _processor() -> str:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Cores this process may use, which a container may have limited."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _instructions() -> list[str]:
    """Those that decide how fast bfloat16 is; empty where the system does not tell."""
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith(("flags", "Features")):
            known = set(line.partition(":")[2].split())
            return [flag for flag in _CPU_FLAGS if flag in known]
    return []


def _memory() -> str:
    import psutil

    memory = psutil.virtual_memory()
    return f"{format_memory(memory.total)}, {format_memory(memory.available)} available"


def _gpus() -> list[str]:
    rows = _ask_driver("name,memory.total")
    return [
        f"{name.strip()}, {memory.strip()}"
        for name, _, memory in (row.partition(",") for row in rows)
    ]


def _driver() -> str | None:
    return next(iter(_ask_driver("driver_version")), None)


def _ask_driver(fields: str) -> list[str]:
    """Ask nvidia-smi, a row a GPU; none where there is no driver or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _hub_settings(environment: Mapping[str, str]) -> dict[str, Any]:
    from huggingface_hub import constants

    from gqaconvert.checkpoint.hub_errors import hub_address

    # Only whether there is a token is looked at.
    token_file = Path(constants.HF_TOKEN_PATH)
    from_environment = any(
        environment.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE")
    )
    return {
        "HF_HOME": _short(constants.HF_HOME),
        "HF_HUB_CACHE": _short(constants.HF_HUB_CACHE),
        "HF_ENDPOINT": hub_address(),
        "HF_HUB_OFFLINE": constants.HF_HUB_OFFLINE,
        "logged in": from_environment or (token_file.is_file() and token_file.stat().st_size > 0),
    }


def _accelerate_default() -> str | None:
    """Where accelerate's own default configuration is, which plain `accelerate launch` reads."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HOME) / "accelerate"
    for name in ("default_config.yaml", "default_config.json"):
        if (folder / name).is_file():
            return _short(folder / name)
    return None


def _recipes() -> str:
    from gqaconvert.settings.recipes import recipe_files

    files = recipe_files()
    where = {_short(path.parent) for path in files.values()}
    return f"{len(files)} in {', '.join(sorted(where))}" if files else "none"


def _short(path: str | Path) -> str:
    """Write the home folder as ~, so that a pasted text does not name its owner."""
    path, home = Path(path), Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _in_words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return "; ".join(value) or "none"
    return "none" if value is None else str(value)
