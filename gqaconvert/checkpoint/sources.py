"""What the word MODEL on a command line means: a folder, the bundled model, an alias or a Hub id.

Looks at the file system only; nothing is fetched here (that is `checkpoint.hub`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gqaconvert.errors import UsageError

BUNDLED_MODEL = "tiny"

ALIASES = {
    "llama-7b": "huggyllama/llama-7b",
    "llama-13b": "huggyllama/llama-13b",
    "llama-30b": "huggyllama/llama-30b",
    "llama-65b": "huggyllama/llama-65b",
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "llama2-13b-chat": "meta-llama/Llama-2-13b-chat-hf",
    "codellama-7b": "codellama/CodeLlama-7b-hf",
    "codellama-13b": "codellama/CodeLlama-13b-hf",
    "vicuna-7b": "lmsys/vicuna-7b-v1.5",
    "vicuna-13b": "lmsys/vicuna-13b-v1.5",
    "deepseek-7b": "deepseek-ai/deepseek-llm-7b-base",
    "gemma-7b": "google/gemma-7b",
    "olmo-1b": "allenai/OLMo-1B-hf",
    "olmo-7b": "allenai/OLMo-7B-hf",
    "olmo2-7b": "allenai/OLMo-2-1124-7B",
    "olmo2-13b": "allenai/OLMo-2-1124-13B",
    "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0924",
    "phi-1": "microsoft/phi-1",
    "phi-1.5": "microsoft/phi-1_5",
    "phi-2": "microsoft/phi-2",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "pythia-70m": "EleutherAI/pythia-70m",
    "pythia-160m": "EleutherAI/pythia-160m",
    "pythia-410m": "EleutherAI/pythia-410m",
    "pythia-1b": "EleutherAI/pythia-1b",
    "pythia-1.4b": "EleutherAI/pythia-1.4b",
    "pythia-2.8b": "EleutherAI/pythia-2.8b",
    "pythia-6.9b": "EleutherAI/pythia-6.9b",
    "pythia-12b": "EleutherAI/pythia-12b",
    "qwen1.5-0.5b": "Qwen/Qwen1.5-0.5B",
    "qwen1.5-1.8b": "Qwen/Qwen1.5-1.8B",
    "qwen1.5-4b": "Qwen/Qwen1.5-4B",
    "qwen1.5-7b": "Qwen/Qwen1.5-7B",
    "qwen1.5-14b": "Qwen/Qwen1.5-14B",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B",
    "stablelm-3b": "stabilityai/stablelm-3b-4e1t",
    "stablelm2-1.6b": "stabilityai/stablelm-2-1_6b",
}
"""Short names for models that people convert: mostly MHA ones, and their Hub ids."""

_BUNDLED_FOLDER = Path(__file__).resolve().parent.parent / "bundled" / BUNDLED_MODEL
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model comes from.

    Attributes:
        kind: a local folder, a Hub repository, or the model that ships with this package.
        folder: where its files are; None for "hub", until it is downloaded.
        repo_id: owner/name on the Hub; None for folders.
        label: what was asked for, to call the model by and to derive output names from.
        revision: branch, tag or commit on the Hub; None for its main branch.
    """

    kind: Literal["folder", "hub", "bundled"]
    folder: Path | None
    repo_id: str | None
    label: str
    revision: str | None = None


def resolve_source(model: str, revision: str | None = None) -> Source:
    """Say what `model` means: an existing folder wins, then `tiny`, an alias, a Hub id.

    Raises:
        UsageError: none of these, or a revision of something that has none.
    """
    folder = _local_path(model)
    if _is_folder(folder):
        _refuse_revision(revision, f"the folder {model}")
        return Source("folder", folder, None, folder.resolve().name)
    if model == BUNDLED_MODEL:
        _refuse_revision(revision, "the bundled model")
        return Source("bundled", _BUNDLED_FOLDER, None, BUNDLED_MODEL)
    if model in ALIASES:
        return Source("hub", None, ALIASES[model], model, revision)
    if _exists(folder):
        raise UsageError("a file, not a model's folder", at=model, remedy=str(folder.parent))
    if _looks_like_path(model):
        raise UsageError(
            "no such folder",
            at=model,
            remedy=_suggest(model, _neighbours(folder)) or "check the path",
        )
    if _HUB_ID.fullmatch(model) and "--" not in model and ".." not in model:
        return Source("hub", None, model, model.partition("/")[2], revision)
    raise UsageError(
        f"{model!r} is neither a folder here, nor an alias, nor a Hub id such as owner/name",
        remedy=_suggest(model, [BUNDLED_MODEL, *ALIASES, *_neighbours(folder)])
        or "gqaconvert inspect --aliases",
    )


def _local_path(model: str) -> Path:
    try:
        return Path(model or "?").expanduser()
    except RuntimeError:  # ~name of a user who is not there
        return Path(model)


def _is_folder(path: Path) -> bool:
    return _exists(path) and path.is_dir()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for any file
        return False


def _refuse_revision(revision: str | None, what: str) -> None:
    if revision is not None:
        raise UsageError(
            f"{what} has no revision {revision!r}", remedy="leave --revision out, or give a Hub id"
        )


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model


def _neighbours(folder: Path) -> list[str]:
    """Name the models in the folder where `folder` was looked for."""
    parent = folder.parent
    if not _is_folder(parent):
        return []
    return sorted(str(path.parent) for path in parent.glob("*/config.json"))


def _suggest(model: str, candidates: Iterable[str]) -> str | None:
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    nearest = difflib.get_close_matches(model.lower(), by_lower, n=3, cutoff=0.5)
    return " or ".join(by_lower[name] for name in nearest) or None
