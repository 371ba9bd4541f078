"""Models on the Hugging Face Hub: headers by ranged requests, whole models by download.

`read_hub_index` fetches config.json and the headers of the weights, some hundred kilobytes a shard;
`download_model` fetches what a conversion needs into the ordinary cache. Both follow HF_HOME,
HF_ENDPOINT, HF_HUB_OFFLINE and the login of `hf auth`, and fall back to the cache when the Hub
cannot be reached. Tokens are never looked at here.
"""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gqaconvert.checkpoint.header import header_length, parse_header
from gqaconvert.checkpoint.hub_errors import HubUnreachable, explained, unreachable
from gqaconvert.checkpoint.index import (
    SAFETENSORS_INDEX,
    TORCH_INDEX,
    assemble_tensors,
    check_weight_map,
    index_shards,
    parse_weight_map,
    read_index,
)
from gqaconvert.checkpoint.tensors import CheckpointIndex, StoredFile, StoredTensor
from gqaconvert.errors import CheckpointError, RefusedError, UnsupportedModelError
from gqaconvert.units import format_bytes

FIRST_BYTES = 100_000
"""Asked for at once: most headers fit, and a second request costs more than these bytes."""

WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".ot",
    ".onnx_data", ".tflite", ".npz", ".mlmodel", ".tar", ".gz", ".zip", ".7z", ".nemo", ".parquet",
)  # fmt: skip
"""Not downloaded, except the shards that are converted."""

SIDECAR_FOLDERS = ("additional_chat_templates",)
"""Folders of a repository that belong to the model, apart from its top level."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """What the Hub says about a model without sending its weights.

    Attributes:
        index: its tensors; None where there are only .bin weights, whose headers cannot be read
            from afar.
        config: the content of config.json.
        commit: the commit read.
    """

    index: CheckpointIndex | None
    config: dict[str, Any]
    commit: str


def read_hub_index(repo_id: str, revision: str | None = None) -> HubModel:
    """Read config.json and the safetensors headers of a Hub model.

    Args:
        repo_id: owner/name.
        revision: branch, tag or commit; the main branch by default.

    Raises:
        UsageError: no such repository or revision.
        CheckpointError: damaged headers, or no weights that can be converted.
        GqaconvertError: no access, or the Hub cannot be reached and the model is not cached.
    """
    at = _name(repo_id, revision)
    folder, sizes = _snapshot(repo_id, revision, at)
    commit = folder.name
    config = _read_config(folder / "config.json")
    if sizes is None:
        return HubModel(_cached_index(folder, at), config, commit)
    weights = _find_weights(repo_id, commit, sizes, at)
    if weights.kind == "torch":
        return HubModel(None, config, commit)
    with ThreadPoolExecutor(8) as pool, explained(repo_id, at):
        parts = list(
            pool.map(lambda name: _read_remote_header(repo_id, commit, name), weights.shards)
        )
    tensors, files = assemble_tensors(parts, at)
    if weights.weight_map is not None:
        check_weight_map(weights.weight_map, tensors, at)
    index = CheckpointIndex(None, tensors, files, "safetensors", weights.index_metadata)
    return HubModel(index, config, commit)


def bin_only_error(repo_id: str) -> UnsupportedModelError:
    """Return the error for a caller that cannot go on with `HubModel.index` None."""
    return UnsupportedModelError(
        "only .bin weights, whose headers cannot be read without downloading them",
        at=repo_id,
        remedy=f"hf download {repo_id}, then name the folder it prints",
    )


def download_model(repo_id: str, revision: str | None = None) -> tuple[Path, str]:
    """Download what converting a model needs, or find it in the cache.

    That is one set of weights (safetensors where there are any), and the files beside it.

    Returns:
        the snapshot's folder in the cache, and its commit.

    Raises:
        UsageError: no such repository or revision.
        CheckpointError: no weights that can be converted.
        RefusedError: the cache has too little space.
        GqaconvertError: no access, or the Hub cannot be reached and the model is not cached.
    """
    from huggingface_hub import snapshot_download

    at = _name(repo_id, revision)
    folder, sizes = _snapshot(repo_id, revision, at)
    if sizes is None:
        _cached_index(folder, at)
        return folder, folder.name
    weights = _find_weights(repo_id, folder.name, sizes, at)
    beside = [name for name in sizes if _is_sidecar(name)]
    _check_space(folder, {name: sizes[name] for name in (*beside, *weights.shards)}, at)
    # Weights come last, so that a snapshot whose shards are all there is whole.
    for names in (beside, weights.shards):
        with explained(repo_id, at):
            snapshot_download(
                repo_id, revision=folder.name, allow_patterns=[glob.escape(name) for name in names]
            )
    return folder, folder.name


@dataclass(frozen=True)
class _Weights:
    """The set of weights to use, of those a repository offers."""

    kind: Literal["safetensors", "torch"]
    shards: list[str]
    weight_map: Mapping[str, str] | None = None
    index_metadata: Mapping[str, Any] = field(default_factory=dict)


def _name(repo_id: str, revision: str | None) -> str:
    return f"{repo_id}@{revision}" if revision else repo_id


def _snapshot(repo_id: str, revision: str | None, at: str) -> tuple[Path, Mapping[str, int] | None]:
    """Return the cache's folder for a commit, config.json in it, and the size of every file.

    There are no sizes when the Hub cannot be reached, and then all must come from the cache.
    """
    listed = _list_files(repo_id, revision, at)
    config = _download_file(repo_id, "config.json", revision, at, cached=listed is None)
    folder = config.parent
    if listed is None:
        return folder, None
    commit, sizes = listed
    if commit != folder.name:  # the branch moved between the two
        _, sizes = _list_files(repo_id, folder.name, at) or listed
    return folder, sizes


def _download_file(
    repo_id: str, name: str, revision: str | None, at: str, *, cached: bool = False
) -> Path:
    from huggingface_hub import hf_hub_download

    with explained(repo_id, f"{at} {name}"):
        return Path(hf_hub_download(repo_id, name, revision=revision, local_files_only=cached))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"config.json is not valid JSON: {error}", at=str(path)) from error
    if not isinstance(config, dict):
        raise CheckpointError("config.json is not a JSON object", at=str(path))
    return config


def _list_files(
    repo_id: str, revision: str | None, at: str
) -> tuple[str, Mapping[str, int]] | None:
    """Return the commit and the size of every file, or None when the Hub cannot be reached."""
    from huggingface_hub import HfApi

    try:
        with explained(repo_id, at):
            found = HfApi().model_info(repo_id, revision=revision, files_metadata=True, timeout=10)
    except HubUnreachable:
        return None
    return found.sha or "", {file.rfilename: file.size or 0 for file in found.siblings or []}


def _cached_index(folder: Path, at: str) -> CheckpointIndex:
    try:
        return read_index(folder)
    except CheckpointError as error:
        raise unreachable(at, "the Hub does not answer") from error


def _find_weights(repo_id: str, commit: str, names: Mapping[str, int], at: str) -> _Weights:
    for kind, index_name, single in (
        ("safetensors", SAFETENSORS_INDEX, "model.safetensors"),
        ("torch", TORCH_INDEX, "pytorch_model.bin"),
    ):
        if index_name in names:
            raw = _download_file(repo_id, index_name, commit, at).read_bytes()
            weight_map, metadata = parse_weight_map(raw, f"{at} {index_name}")
            shards = index_shards(weight_map, f"{at} {index_name}")
            missing = [shard for shard in shards if shard not in names]
            if missing:
                raise CheckpointError(
                    f"{len(missing)} of {len(shards)} shards are missing, such as {missing[0]}",
                    at=at,
                )
            return _Weights(kind, shards, weight_map, metadata)  # type: ignore[arg-type]
        if single in names:
            return _Weights(kind, [single])  # type: ignore[arg-type]
    raise CheckpointError(
        "no weights that can be converted: neither safetensors nor pytorch_model.bin",
        at=at,
        remedy="a repository with weights for transformers",
    )


def _is_sidecar(name: str) -> bool:
    folder, _, file = name.rpartition("/")
    return folder in ("", *SIDECAR_FOLDERS) and not file.lower().endswith(WEIGHT_SUFFIXES)


def _check_space(folder: Path, sizes: Mapping[str, int], at: str) -> None:
    needed = sum(size for name, size in sizes.items() if not (folder / name).is_file())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise RefusedError(
            f"the download takes {format_bytes(needed)}, the cache has {format_bytes(free)} left",
            at=f"{at} → {folder}",
            remedy="make room, or point HF_HOME to another disk",
        )


def _read_remote_header(
    repo_id: str, commit: str, name: str
) -> tuple[StoredFile, list[StoredTensor]]:
    """Read one header as `index.read_header` does, by ranged requests."""
    from huggingface_hub import hf_hub_url

    at = f"{repo_id} {name}"
    url = hf_hub_url(repo_id, name, revision=commit)
    start, size_bytes = _read_range(url, 0, FIRST_BYTES, at)
    length = header_length(start[:8], size_bytes, at)
    raw = start[8 : 8 + length]
    if len(raw) < length:
        raw += _read_range(url, len(start), 8 + length, at)[0]
    return parse_header(raw, name=name, size_bytes=size_bytes, at=at)


def _read_range(url: str, begin: int, end: int, at: str) -> tuple[bytes, int]:
    """Return bytes of a file and the size of all of it; a server may ignore the range."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # exported, not in __all__
        build_hf_headers,
        hf_raise_for_status,
        http_stream_backoff,
    )

    headers = build_hf_headers()
    headers |= {"Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    with http_stream_backoff("GET", url, headers=headers, timeout=30, max_retries=3) as response:
        if response.status_code == 416:  # an empty file has no range
            return b"", 0
        hf_raise_for_status(response)
        ranged = response.status_code == 206
        total = response.headers.get("Content-Range" if ranged else "Content-Length", "")
        size = total.rpartition("/")[2]
        if not size.isdecimal():
            raise CheckpointError("the server does not say how large the file is", at=at)
        skip = 0 if ranged else begin
        wanted, received = end - begin, bytearray()
        for piece in response.iter_bytes():
            received += piece
            if len(received) >= skip + wanted:
                break
    return bytes(received[skip : skip + wanted]), int(size)
