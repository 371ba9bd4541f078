"""What a checkpoint folder holds, from headers alone; safetensors or the older `.bin` files.

Reads neither weights nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from gqaconvert.checkpoint.header import AGAIN, MAX_FILE_NAME_BYTES, read_header, unique_keys
from gqaconvert.checkpoint.tensors import CheckpointIndex, StoredFile, StoredTensor
from gqaconvert.checkpoint.torch_archive import read_archive
from gqaconvert.errors import CheckpointError

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"


def read_index(folder: Path) -> CheckpointIndex:
    """Read every header of a checkpoint folder; safetensors win over .bin where both are present.

    Raises:
        CheckpointError: no weights, a missing shard, or index and shards that disagree.
    """
    if (folder / SAFETENSORS_INDEX).is_file():
        return _read_sharded(folder, SAFETENSORS_INDEX, "safetensors")
    if (folder / "model.safetensors").is_file():
        return _assemble(folder, [read_header(folder / "model.safetensors")], "safetensors")
    if (folder / TORCH_INDEX).is_file():
        return _read_sharded(folder, TORCH_INDEX, "torch")
    if (folder / "pytorch_model.bin").is_file():
        return _assemble(folder, [read_archive(folder / "pytorch_model.bin")], "torch")
    raise CheckpointError(
        "no weights here: neither model.safetensors nor pytorch_model.bin, nor an index of shards",
        at=str(folder),
        remedy="a folder made by save_pretrained, or a Hub id such as owner/name",
    )


def parse_weight_map(raw: bytes, at: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Read an index file: which shard holds which tensor, and the index's own metadata.

    Raises:
        CheckpointError: not JSON, or not a map from names to names.
    """
    try:
        index = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"index is not valid JSON: {error}", at=at, remedy=AGAIN) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(s, str) for s in weight_map.values()):
        raise CheckpointError("index has no weight_map of names", at=at, remedy=AGAIN)
    metadata = index.get("metadata")
    return weight_map, metadata if isinstance(metadata, dict) else {}


def index_shards(weight_map: Mapping[str, str], at: str) -> list[str]:
    """Return the file names of an index, refusing names that leave the folder.

    Raises:
        CheckpointError: a shard name with a path in it.
    """
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard or shard in ("", "..") or "\\" in shard or "\0" in shard:
            raise CheckpointError(f"index names a shard outside its folder: {shard!r}", at=at)
        if len(shard.encode("utf-8", "surrogatepass")) > MAX_FILE_NAME_BYTES:
            raise CheckpointError(f"index names a shard by {len(shard)} letters", at=at)
    return shards


def check_weight_map(
    weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor], at: str
) -> None:
    """Refuse an index that disagrees with the headers of its shards.

    Raises:
        CheckpointError: a tensor is missing, in another shard, or not in the index.
    """
    for name, shard in weight_map.items():
        if name not in tensors:
            raise CheckpointError(
                f"index lists tensor {name!r} in {shard}, which does not hold it",
                at=at,
                remedy=AGAIN,
            )
        if tensors[name].file != shard:
            raise CheckpointError(
                f"index puts tensor {name!r} in {shard}, but it is in {tensors[name].file}",
                at=at,
                remedy=AGAIN,
            )
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        raise CheckpointError(
            f"shards hold {len(unlisted)} tensors that the index does not list,"
            f" such as {unlisted[0]!r}",
            at=at,
            remedy="rebuild the index from the shards, or fetch it again",
        )


def assemble_tensors(
    parts: Iterable[tuple[StoredFile, list[StoredTensor]]], at: str
) -> tuple[dict[str, StoredTensor], tuple[StoredFile, ...]]:
    """Join the headers of several files.

    Raises:
        CheckpointError: two files hold a tensor of the same name.
    """
    tensors: dict[str, StoredTensor] = {}
    files = []
    for file, entries in parts:
        files.append(file)
        for tensor in entries:
            if tensor.name in tensors:
                raise CheckpointError(
                    f"tensor {tensor.name!r} is in both {tensors[tensor.name].file}"
                    f" and {tensor.file}",
                    at=at,
                    remedy="remove the stale shard, or fetch the checkpoint again",
                )
            tensors[tensor.name] = tensor
    return tensors, tuple(files)


def _read_sharded(
    folder: Path, index_name: str, kind: Literal["safetensors", "torch"]
) -> CheckpointIndex:
    at = str(folder / index_name)
    weight_map, metadata = parse_weight_map((folder / index_name).read_bytes(), at)
    shards = index_shards(weight_map, at)
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {len(shards)} shards are missing, such as {missing[0]}",
            at=at,
            remedy="fetch the missing shards",
        )
    read = read_header if kind == "safetensors" else read_archive
    checkpoint = _assemble(folder, [read(folder / shard) for shard in shards], kind, metadata)
    check_weight_map(weight_map, checkpoint.tensors, at)
    return checkpoint


def _assemble(
    folder: Path,
    parts: list[tuple[StoredFile, list[StoredTensor]]],
    kind: Literal["safetensors", "torch"],
    index_metadata: Mapping[str, Any] | None = None,
) -> CheckpointIndex:
    tensors, files = assemble_tensors(parts, str(folder))
    return CheckpointIndex(folder, tensors, files, kind, index_metadata or {})
