"""Reads and checks the header of one safetensors file; weights are not touched.

A little-endian u64 with the header's length, a JSON header, and a run of bytes
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from gqaconvert.checkpoint.tensors import StoredFile, StoredTensor
from gqaconvert.errors import CheckpointError
from gqaconvert.units import ELEMENT_TYPES

MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library accepts, too."""

MAX_FILE_NAME_BYTES = 255
"""What file systems accept."""

MAX_DIMENSIONS = 64
"""What torch and numpy accept, too."""

AGAIN = "fetch the checkpoint again; an interrupted download leaves such files"


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


def looks_like_safetensors(path: Path) -> bool:
    """Whether a file begins as a safetensors file does; it may still be damaged further on."""
    try:
        with path.open("rb") as stream:
            prefix = stream.read(9)
    except OSError:
        return False
    return len(prefix) == 9 and prefix[8:] == b"{" and int.from_bytes(prefix[:8], "little") < 2**40


def header_length(prefix: bytes, size_bytes: int, at: str) -> int:
    """Read the length of the header from a file's first eight bytes.

    Raises:
        CheckpointError: the file is too short for such a header.
    """
    if len(prefix) < 8:
        raise CheckpointError(
            f"file of {size_bytes} bytes is too short for safetensors", at=at, remedy=AGAIN
        )
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES or 8 + length > size_bytes:
        raise CheckpointError(
            f"header claims {length} bytes but the file has {size_bytes}", at=at, remedy=AGAIN
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
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"header is not valid JSON: {error}", at=at, remedy=AGAIN) from error
    if not isinstance(header, dict):
        raise CheckpointError("header is not a JSON object", at=at, remedy=AGAIN)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("header's __metadata__ is not a map of strings", at=at, remedy=AGAIN)
    start = 8 + len(raw)
    tensors = [_parse_entry(key, entry, name, start, at) for key, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_ranges(tensors, start, size_bytes, at)
    digest = hashlib.sha256(raw).hexdigest()
    return StoredFile(name, size_bytes, digest, metadata), tensors


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, refusing a key that occurs twice (`object_pairs_hook`)."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {twice!r} occurs twice")
    return entries


def _parse_entry(key: str, entry: Any, file: str, start: int, at: str) -> StoredTensor:  # noqa: ANN401
    where = f"{at} tensor {key!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            "header entry lacks dtype, shape or data_offsets", at=where, remedy=AGAIN
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_TYPES:
        raise CheckpointError(f"unknown element type {dtype!r}", at=where)
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise CheckpointError(
            "shape or data_offsets are not lists of counts", at=where, remedy=AGAIN
        )
    tensor = StoredTensor(key, dtype, tuple(shape), file, start + offsets[0], start + offsets[1])
    if tensor.end - tensor.begin != tensor.size_bytes:
        raise CheckpointError(
            f"{tensor.end - tensor.begin} bytes cannot hold {dtype} of shape {list(shape)},"
            f" which takes {tensor.size_bytes}",
            at=where,
            remedy=AGAIN,
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
                f"byte range {fault}", at=f"{at} tensor {tensor.name!r}", remedy=AGAIN
            )
        reached = tensor.end
    if reached != size_bytes:
        fault = "truncated" if reached > size_bytes else "longer than its tensors"
        raise CheckpointError(
            f"file is {fault}: {size_bytes} bytes, its header describes {reached}",
            at=at,
            remedy=AGAIN,
        )
