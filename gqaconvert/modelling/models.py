"""Loads a model to measure: folder, alias, Hub id or `tiny`, with its tokenizer and a fingerprint.

The fingerprint tells models apart in saved results without reading all their weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from gqaconvert.checkpoint.fingerprint import fingerprint_model as fingerprint_model
from gqaconvert.checkpoint.index import read_index
from gqaconvert.checkpoint.sources import resolve_source
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.modelling.classes import FORWARD_THROUGH, model_class, quiet_transformers
from gqaconvert.modelling.packed_attention import NAME as PACKED
from gqaconvert.units import weight_type

ATTENTION = {
    "sdpa": "sdpa",
    "eager": "eager",
    "packed": PACKED,
    "flash_attention_2": "flash_attention_2",
    "flex": "flex_attention",
}
"""Names of `--attn` → what transformers calls them."""


@dataclass
class LoadedModel:
    """A model in eval mode, ready to be measured.

    Attributes:
        name: short name, by which results are filed.
        folder: where its files are.
        model: in eval mode; of a class that takes images too, the part that takes text alone.
        tokenizer: its tokenizer.
        dtype: of the weights in memory, such as "float32".
        device: "cpu" or "cuda".
        attn: attention implementation as asked for, such as "sdpa".
        weights_sha256: see `fingerprint_model`.
        parameters: elements on disk; a tied head does not count twice.
        disk_bytes: size of all weight files.
    """

    name: str
    folder: Path
    model: Any
    tokenizer: Any
    dtype: str
    device: str
    attn: str
    weights_sha256: str
    parameters: int
    disk_bytes: int


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk, not loaded yet: what results are filed under and looked up by.

    Attributes:
        name: short name.
        folder: where its files are.
        weights_sha256: see `fingerprint_model`.
        index: its headers.
    """

    name: str
    folder: Path
    weights_sha256: str
    index: CheckpointIndex


def find_model(model: str | Path, revision: str | None = None) -> ModelFolder:
    """Find a model without loading it; a Hub model is downloaded.

    Raises:
        UsageError: no such model.
        CheckpointError: it is damaged.
    """
    source = resolve_source(str(model), revision)
    folder = source.folder
    if folder is None:
        from gqaconvert.checkpoint.hub import download_model  # imports huggingface_hub

        folder, _ = download_model(str(source.repo_id), revision)
    index = read_index(folder)
    return ModelFolder(source.label, folder, fingerprint_model(folder, index), index)


def load_model(
    model: str | Path | ModelFolder,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    attn: str = "sdpa",
    revision: str | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer, the model in eval mode.

    Args:
        model: folder, alias, Hub id or `tiny`, or what `find_model` found.
        dtype: "auto" for that of the checkpoint, or a name such as "float32".
        device: "cpu" or "cuda".
        attn: a key of `ATTENTION`.
        revision: branch, tag or commit of a Hub model.

    Raises:
        UsageError: no such model, type, device or attention implementation.
        GqaconvertError: transformers cannot load the model or its tokenizer.
    """
    _check_device(device)
    if attn not in ATTENTION:
        raise UsageError(f"unknown attention {attn!r}", remedy=", ".join(ATTENTION))
    kind = "auto" if dtype == "auto" else getattr(torch, weight_type(dtype).config_name)
    found = model if isinstance(model, ModelFolder) else find_model(model, revision)
    tokenizer = load_tokenizer(found.folder)
    try:
        with quiet_transformers():
            loaded: Any = model_class(found.folder).from_pretrained(
                found.folder, dtype=kind, attn_implementation=ATTENTION[attn]
            )
    except (ValueError, ImportError) as error:
        if attn == "sdpa":  # what every class has falls back to: the model's own fault
            raise GqaconvertError(
                f"transformers cannot load it: {error}", at=str(found.folder)
            ) from error
        raise UsageError(
            f"{attn} attention is not to be had: {_first_line(error)}",
            at=str(found.folder),
            remedy="--attn sdpa or --attn eager",
        ) from error
    loaded = getattr(loaded, FORWARD_THROUGH.get(type(loaded).__name__, ""), loaded)
    loaded = loaded.eval().to(device)
    return LoadedModel(
        name=found.name,
        folder=found.folder,
        model=loaded,
        tokenizer=tokenizer,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=device,
        attn=attn,
        weights_sha256=found.weights_sha256,
        parameters=found.index.parameters,
        disk_bytes=sum(file.size_bytes for file in found.index.files),
    )


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {device!r}", remedy="cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device here", remedy="--device cpu")


def load_tokenizer(folder: Path) -> Any:  # noqa: ANN401
    """Load the tokenizer of a model.

    Raises:
        GqaconvertError: it has none that transformers can load.
    """
    try:
        with quiet_transformers():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise GqaconvertError(
            f"its tokenizer cannot be loaded: {_first_line(error)}",
            at=str(folder),
            remedy="copy tokenizer.json and tokenizer_config.json of the source there",
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
