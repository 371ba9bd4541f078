"""What a checkpoint holds, from headers alone: names, types, shapes and where the bytes are.

Reads neither weights nor torch. safetensors files are a little-endian u64 with the header's length,
a JSON header and a run of bytes (https://github.com/huggingface/safetensors#format); `.bin` files
are read by `checkpoint.torch_archive`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gqaconvert.errors import CheckpointError
from gqaconvert.units import ELEMENT_TYPES

MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library accepts, too."""

MAX_FILE_NAME_BYTES = 255
"""What file systems accept."""

MAX_DIMENSIONS = 64
"""What torch and numpy accept, too."""

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk.

    Attributes:
        name: its key.
        dtype: safetensors tag, such as "BF16".
        shape: its dimensions.
        file: name of the file inside the checkpoint folder.
        begin: first byte in that file, counted from the start of the file.
        end: one past the last byte.
        strides: elements between neighbours along each dimension, where the bytes are not in row
            order (only in .bin files).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int
    strides: tuple[int, ...] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes the elements take, packed."""
        return math.prod(self.shape) * ELEMENT_TYPES[self.dtype].size_bytes


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of weights.

    Attributes:
        name: file name inside the checkpoint folder.
        size_bytes: whole size.
        header_sha256: of the raw JSON header; for .bin files, of the pickle that describes the
            tensors.
        metadata: the free-form strings of the header.
    """

    name: str
    size_bytes: int
    header_sha256: str
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Derived:
    """How a tensor that is on no disk comes from some that are.

    Attributes:
        inputs: stored tensors, in the order `compute` takes them.
        compute: arrays of the inputs in their stored types → the tensor, in any floating type;
            pure.
    """

    inputs: tuple[StoredTensor, ...]
    compute: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class CheckpointIndex:
    """All tensors of a checkpoint, by name, in file order.

    Attributes:
        folder: where the files are; None when headers were read from a Hub.
        tensors: name → tensor.
        files: weight files in name order.
        kind: "safetensors" or "torch".
        index_metadata: the `metadata` of the index file, empty without one.
        derived: tensors of `tensors` that have to be computed, when a checkpoint is read as another
            class; their file is that of their first input, their byte range is empty.
    """

    folder: Path | None
    tensors: Mapping[str, StoredTensor]
    files: tuple[StoredFile, ...]
    kind: Literal["safetensors", "torch"]
    index_metadata: Mapping[str, Any] = field(default_factory=dict)
    derived: Mapping[str, Derived] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Number of elements stored; a tied head that is not stored does not count twice."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())

    def fingerprint(self) -> str:
        """SHA-256 over file names, sizes and headers: the layout, without reading weights."""
        digest = hashlib.sha256()
        for file in self.files:
            digest.update(f"{file.name}\0{file.size_bytes}\0{file.header_sha256}\n".encode())
        return digest.hexdigest()


def read_header(path: Path) -> tuple[StoredFile, list[StoredTensor]]:
    """Read and check the header of one safetensors file.

    Raises:
        CheckpointError: truncated, not JSON, an unknown type, ranges that overlap, leave gaps or do
            not fit the shape.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as stream:
        length = header_length(stream.read(8), size_bytes, str(path))
        raw = stream.read(length)
    return parse_header(raw, name=path.name, size_bytes=size_bytes, at=str(path))


def header_length(prefix: bytes, size_bytes: int, at: str) -> int:
    """Read the length of the header from a file's first eight bytes.

    Raises:
        CheckpointError: the file is too short for such a header.
    """
    if len(prefix) < 8:
        raise CheckpointError(
            f"file of {size_bytes} bytes is too short for safetensors", at=at, remedy=_AGAIN
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES or 8 + length > size_bytes:
        raise CheckpointError(
            f"header claims {length} bytes but the file has {size_bytes}", at=at, remedy=_AGAIN
        )
    return length


def parse_header(
    raw: bytes, *, name: str, size_bytes: int, at: str
) -> tuple[StoredFile, list[StoredTensor]]:
    """Check a raw JSON header (without its length prefix) against the size of its file.

    Args:
        raw: the header's bytes.
        name: file name to record.
        size_bytes: size of the whole file.
        at: where to say an error is.

    Raises:
        CheckpointError: as `read_header`.
    """
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"header is not valid JSON: {error}", at=at, remedy=_AGAIN) from error
    if not isinstance(header, dict):
        raise CheckpointError("header is not a JSON object", at=at, remedy=_AGAIN)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("header's __metadata__ is not a map of strings", at=at, remedy=_AGAIN)
    start = 8 + len(raw)
    tensors = [_parse_entry(key, entry, name, start, at) for key, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_ranges(tensors, start, size_bytes, at)
    digest = hashlib.sha256(raw).hexdigest()
    return StoredFile(name, size_bytes, digest, metadata), tensors


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
        return _assemble(folder, [_read_torch(folder / "pytorch_model.bin")], "torch")
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
        index = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"index is not valid JSON: {error}", at=at, remedy=_AGAIN) from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(s, str) for s in weight_map.values()):
        raise CheckpointError("index has no weight_map of names", at=at, remedy=_AGAIN)
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
                remedy=_AGAIN,
            )
        if tensors[name].file != shard:
            raise CheckpointError(
                f"index puts tensor {name!r} in {shard}, but it is in {tensors[name].file}",
                at=at,
                remedy=_AGAIN,
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


_AGAIN = "fetch the checkpoint again; an interrupted download leaves such files"


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {twice!r} occurs twice")
    return entries


def _parse_entry(key: str, entry: Any, file: str, start: int, at: str) -> StoredTensor:  # noqa: ANN401
    where = f"{at} tensor {key!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            "header entry lacks dtype, shape or data_offsets", at=where, remedy=_AGAIN
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_TYPES:
        raise CheckpointError(f"unknown element type {dtype!r}", at=where)
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            "shape or data_offsets are not lists of counts", at=where, remedy=_AGAIN
        )
    tensor = StoredTensor(key, dtype, tuple(shape), file, start + offsets[0], start + offsets[1])
    if tensor.end - tensor.begin != tensor.size_bytes:
        raise CheckpointError(
            f"{tensor.end - tensor.begin} bytes cannot hold {dtype} of shape {list(shape)},"
            f" which takes {tensor.size_bytes}",
            at=where,
            remedy=_AGAIN,
        )
    return tensor


def _are_counts(value: object) -> bool:
    # Products of larger or more numbers could not even be printed in an error.
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(item) is int and 0 <= item < 2**63 for item in value)
    )


def _check_ranges(tensors: list[StoredTensor], start: int, size_bytes: int, at: str) -> None:
    reached = start
    for tensor in tensors:
        if tensor.begin != reached:
            fault = (
                "overlaps the one before" if tensor.begin < reached else "leaves a gap before it"
            )
            raise CheckpointError(
                f"byte range {fault}", at=f"{at} tensor {tensor.name!r}", remedy=_AGAIN
            )
        reached = tensor.end
    if reached != size_bytes:
        fault = "truncated" if reached > size_bytes else "longer than its tensors"
        raise CheckpointError(
            f"file is {fault}: {size_bytes} bytes, its header describes {reached}",
            at=at,
            remedy=_AGAIN,
        )


def _read_torch(path: Path) -> tuple[StoredFile, list[StoredTensor]]:
    from gqaconvert.checkpoint.torch_archive import (
        read_archive,
    )  # only .bin sources need the unpickler

    return read_archive(path)


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
    read = read_header if kind == "safetensors" else _read_torch
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
