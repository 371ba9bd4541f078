"""Converted checkpoints for other engines, and environments of their own to run those in.

An engine is installed by uv, once a session, or for good below the folder GQACONVERT_ENGINES.
GQACONVERT_REAL_MODEL may name a folder with a pretrained model, such as SmolLM2-135M, to try too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from gqaconvert.modelling.models import load_model
from gqaconvert.surgery.convert import convert

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 20
PROMPTS = (
    "The first thing that a reader of this page",
    "In the year 1871 the river",
    "def read_lines(path):",
    "A list is a sequence of",
    "There are two kinds of people:",
)


@dataclass(frozen=True)
class Case:
    """A converted checkpoint in float32, and what transformers makes of it.

    Attributes:
        folder: of the checkpoint.
        source: folder of the model it was made from.
        kv_heads: of the source and of the checkpoint.
        prompts: token ids of each prompt.
        tokens: prompts as the vocabulary writes them.
        expected: ids of the tokens that follow greedily, ends of sequence ignored.
    """

    folder: Path
    source: Path
    kv_heads: tuple[int, int]
    prompts: list[list[int]]
    tokens: list[list[str]]
    expected: list[list[int]]

    def question(self, model: Path | str | None = None) -> dict[str, Any]:
        """What the scripts of this folder are asked; `model` if not the checkpoint itself."""
        return {
            "model": str(model or self.folder),
            "prompts": self.prompts,
            "tokens": self.tokens,
            "new_tokens": NEW_TOKENS,
        }


@pytest.fixture(scope="session", params=["tiny", "real"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    source = os.environ.get("GQACONVERT_REAL_MODEL") if request.param == "real" else "tiny"
    if not source:
        pytest.skip("GQACONVERT_REAL_MODEL names no pretrained model")
    out = tmp_path_factory.mktemp(request.param) / "converted"
    wanted = {"tiny": 2, "real": 1}[request.param]
    made = convert(source, out, num_kv_heads=wanted, dtype="float32")
    loaded = load_model(str(out), dtype="float32")
    prompts = [loaded.tokenizer(text)["input_ids"] for text in PROMPTS]
    return Case(
        folder=out,
        source=made.source.folder,
        kv_heads=(made.source.attention.num_kv_heads, wanted),
        prompts=prompts,
        tokens=[loaded.tokenizer.convert_ids_to_tokens(each) for each in prompts],
        expected=[_continue(loaded.model, each) for each in prompts],
    )


def _continue(model: Any, prompt: list[int]) -> list[int]:
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )  # fmt: skip
    return found[0, len(prompt) :].tolist()


class Engine:
    """An environment with an engine in it, outside of this one; its scripts lie in `here`."""

    here = HERE

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def program(self, name: str) -> str:
        """Path of a program of the environment."""
        return str(self.folder / "bin" / name)

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        done = subprocess.run(
            [self.program(words[0]), *words[1:]], env=os.environ | environment,
            capture_output=True, text=True, check=False, timeout=280,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    def answer(self, script: str, question: dict[str, Any], **environment: str) -> dict[str, Any]:
        """Run a script of this folder, which is asked in JSON and prints a line {"ids": ...}.

        What the engine itself prints, before and after that line, is under "log".
        """
        done = self.run("python", str(HERE / script), json.dumps(question), **environment)
        lines = done.stdout.splitlines()
        answers = [line for line in lines if line.startswith('{"ids"')]
        assert len(answers) == 1, done.stdout[-3000:]
        return {**json.loads(answers[0]), "log": "\n".join([*lines, done.stderr])}


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    """A function that makes an environment with packages, or skips where it cannot be had."""

    def make(name: str, *packages: str, overrides: str = "") -> Engine:
        uv = shutil.which("uv")
        if uv is None:
            pytest.skip("uv is not installed")
        kept = os.environ.get("GQACONVERT_ENGINES")
        folder = (Path(kept) if kept else tmp_path_factory.mktemp("engines")) / name
        done = folder / "installed"
        if not done.exists():
            options = ["--python", str(folder)]
            if overrides:
                (folder.parent / f"{name}-overrides.txt").write_text(overrides)
                options += ["--override", str(folder.parent / f"{name}-overrides.txt")]
            for command in (
                [uv, "venv", "--quiet", "--clear", "--python", "3.11", str(folder)],
                [uv, "pip", "install", "--quiet", *options, *packages],
            ):
                result = subprocess.run(command, capture_output=True, text=True, check=False)
                if result.returncode:
                    pytest.skip(f"{name} cannot be installed: {result.stderr.strip()[-500:]}")
            done.touch()
        return Engine(folder)

    return make
