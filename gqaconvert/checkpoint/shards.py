"""Lays out output files: which tensor goes where, and the exact header bytes. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gqaconvert.checkpoint.header import MAX_HEADER_BYTES
from gqaconvert.checkpoint.tensors import StoredTensor
from gqaconvert.errors import UsageError

BLOCK_BYTES = 4096
"""File systems share extents in blocks of this size, or multiples of it."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file.

    Attributes:
        name: file name.
        header: length prefix, JSON and padding: all bytes before the first tensor.
        tensors: placed tensors, in file order.
    """

    name: str
    header: bytes
    tensors: tuple[StoredTensor, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the finished file."""
        return self.tensors[-1].end if self.tensors else len(self.header)


def lay_out(
    name: str,
    tensors: Sequence[StoredTensor],
    metadata: Mapping[str, str],
    *,
    aligned_with: int = 0,
) -> Shard:
    """Place tensors one behind the other behind their header.

    Args:
        name: file name.
        tensors: names, types and shapes; where they are now is ignored.
        metadata: the header's `__metadata__`.
        aligned_with: offset of the data in the source file. The header is padded with spaces until
            the output's data starts at the same place within a block, so that file systems which
            share extents can.

    Raises:
        UsageError: the header would be larger than the safetensors library reads.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.size_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    # 8-byte alignment of the data is what the format's own writer keeps; a source that broke it
    # cannot be matched.
    start = 8 + len(raw)
    start += (aligned_with - start) % BLOCK_BYTES if aligned_with % 8 == 0 else -start % 8
    if start - 8 > MAX_HEADER_BYTES:
        raise UsageError(
            f"{name} would need a header of {start - 8} bytes, more than readers accept",
            remedy="a smaller --max-shard-size",
        )
    header = (start - 8).to_bytes(8, "little") + raw + b" " * (start - 8 - len(raw))
    placed, position = [], start
    for tensor in tensors:
        end = position + tensor.size_bytes
        placed.append(StoredTensor(tensor.name, tensor.dtype, tensor.shape, name, position, end))
        position = end
    return Shard(name, header, tuple(placed))


def split_by_size(tensors: Iterable[StoredTensor], max_bytes: int) -> list[list[StoredTensor]]:
    """Fill shards in order up to `max_bytes`; a tensor larger than that gets a shard of its own."""
    shards: list[list[StoredTensor]] = []
    filled = 0
    for tensor in tensors:
        if not shards or (shards[-1] and filled + tensor.size_bytes > max_bytes):
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size_bytes
    return shards


def shard_names(count: int) -> list[str]:
    """Return the names transformers gives `count` shards."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_json(shards: Sequence[Shard], metadata: Mapping[str, object]) -> dict[str, object]:
    """Return the content of `model.safetensors.index.json`; the source's other metadata is kept.

    `total_parameters` is recomputed where the source had it; `total_size` always.
    """
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    totals: dict[str, object] = {"total_size": sum(tensor.size_bytes for tensor in tensors)}
    if "total_parameters" in metadata:
        totals["total_parameters"] = sum(math.prod(tensor.shape) for tensor in tensors)
    return {
        "metadata": {**metadata, **totals},
        "weight_map": {
            tensor.name: tensor.file for tensor in sorted(tensors, key=lambda t: t.name)
        },
    }


def needs_index(shards: Sequence[Shard]) -> bool:
    """Whether readers need `model.safetensors.index.json` to find the shards."""
    return [shard.name for shard in shards] != ["model.safetensors"]
