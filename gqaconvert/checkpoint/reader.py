"""Reads tensors of a checkpoint as numpy arrays, whole or by rows, without mapping files.

Positional reads keep resident memory to what is asked for and are safe from several threads.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gqaconvert.checkpoint.tensors import Derived, StoredTensor
from gqaconvert.errors import CheckpointError
from gqaconvert.units import ELEMENT_TYPES

Array = NDArray[Any]

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    **{
        tag: np.dtype(kind.config_name)
        for tag, kind in ELEMENT_TYPES.items()
        if tag != "BF16" and not tag.startswith("F8")
    },
}
"""numpy type of every element type."""


class TensorReader:
    """Reads from the files of one checkpoint; a context manager that closes them.

    Args:
        folder: the checkpoint.
        derived: tensors to compute rather than read.
    """

    def __init__(self, folder: Path, derived: Mapping[str, Derived] | None = None) -> None:
        self._folder = folder
        self._derived = derived or {}
        self._computed = threading.local()
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def descriptor(self, file: str) -> int:
        """Return an open descriptor of one file, kept until the reader closes."""
        opened = self._descriptors.get(file)
        if opened is None:
            opened = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
            # Two threads may open the same file at once; the loser closes its own.
            kept = self._descriptors.setdefault(file, opened)
            if kept != opened:
                os.close(opened)
                return kept
        return opened

    def read(self, tensor: StoredTensor) -> Array:
        """Return a whole tensor in its stored type and shape."""
        if tensor.name in self._derived:
            return self._compute(tensor)
        return self._stored(tensor)

    def read_rows(self, tensor: StoredTensor, begin: int, end: int) -> Array:
        """Return rows `begin` to `end` along the first dimension."""
        if tensor.strides is not None or tensor.name in self._derived:
            return self.read(tensor)[begin:end]
        row_bytes = math.prod(tensor.shape[1:]) * ELEMENT_TYPES[tensor.dtype].size_bytes
        first = tensor.begin + begin * row_bytes
        last = tensor.begin + end * row_bytes
        return self._bytes(tensor, first, last).reshape(end - begin, *tensor.shape[1:])

    def _stored(self, tensor: StoredTensor) -> Array:
        if tensor.strides is None:
            return self._bytes(tensor, tensor.begin, tensor.end).reshape(tensor.shape)
        extent = self._bytes(tensor, tensor.begin, tensor.end)
        steps = tuple(stride * extent.itemsize for stride in tensor.strides)
        return np.lib.stride_tricks.as_strided(extent, tensor.shape, steps).copy()

    def _compute(self, tensor: StoredTensor) -> Array:
        # Heads are asked for one after the other, so the thread keeps the tensor it computed last.
        if getattr(self._computed, "name", None) != tensor.name:
            derived = self._derived[tensor.name]
            # An input may bear the name of what is computed from it.
            content = derived.compute([self._stored(source) for source in derived.inputs])
            self._computed.content = np.ascontiguousarray(content, NUMPY_TYPES[tensor.dtype])
            self._computed.name = tensor.name
        return self._computed.content  # type: ignore[no-any-return]

    def _bytes(self, tensor: StoredTensor, begin: int, end: int) -> Array:
        buffer = np.empty(end - begin, np.uint8)
        descriptor, filled = self.descriptor(tensor.file), 0
        while filled < len(buffer):
            count = os.preadv(descriptor, [buffer.data[filled:]], begin + filled)
            if count == 0:
                raise CheckpointError(
                    "file ends within the tensor; it changed while being read",
                    at=f"{tensor.file} tensor {tensor.name!r}",
                )
            filled += count
        return buffer.view(NUMPY_TYPES[tensor.dtype])
