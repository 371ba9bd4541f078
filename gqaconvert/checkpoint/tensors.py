"""What is known of a checkpoint's tensors and files: names, types, shapes, places. Values only."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gqaconvert.units import ELEMENT_TYPES


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
