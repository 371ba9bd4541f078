"""The calibration file: second moments of every attention input, and of what model and text.

One safetensors file of float32 matrices, with its identity as JSON in the header. Read one layer at
a time: a matrix takes (M+1)² numbers for a hidden size of M. How the moments are gathered is
`calibration`'s affair.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gqaconvert.checkpoint.fingerprint import fingerprint_model
from gqaconvert.checkpoint.header import read_header
from gqaconvert.checkpoint.index import read_index
from gqaconvert.checkpoint.reader import TensorReader
from gqaconvert.checkpoint.shards import lay_out
from gqaconvert.checkpoint.tensors import StoredFile, StoredTensor
from gqaconvert.errors import CheckpointError, RefusedError
from gqaconvert.surgery.layer_heads import Floats, LayerStatistics

VERSION = 1
KINDS = ("inputs", "averaged", "attended")
"""Matrices of a layer, by field of `LayerStatistics`; only the first is always there."""

_KEY = "gqaconvert"
_NAME = re.compile(r"layers\.(\d+)\.(" + "|".join(KINDS) + ")")
_SAMPLE_BYTES = 4096


class TextIdentity(NamedTuple):
    """One text that statistics were taken on: its name, SHA-256 and tokens."""

    name: str
    sha256: str
    tokens: int


@dataclass(frozen=True, slots=True)
class StatisticsIdentity:
    """What statistics were gathered on.

    Attributes:
        model: label of the model, for messages.
        model_type: class of its config.
        source_fingerprint: `CheckpointIndex.fingerprint()` of its folder.
        weights_sha256: `fingerprint_model` of its folder.
        texts: what was read.
        tokens: of all texts together.
        context: tokens a window.
    """

    model: str
    model_type: str
    source_fingerprint: str
    weights_sha256: str
    texts: tuple[TextIdentity, ...]
    tokens: int
    context: int

    def record(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON."""
        return {**asdict(self), "texts": [text._asdict() for text in self.texts]}


Widths = Mapping[int, Mapping[str, int]]
"""Layer → kind of matrix → its rows, M+1."""


class StatisticsFile(Mapping[int, LayerStatistics]):
    """A calibration file, of which one layer at a time is read; maps layer numbers to statistics.

    Args:
        path: the file.

    Raises:
        CheckpointError: no such file, damaged, or no calibration file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise CheckpointError(
                "no such calibration file",
                at=str(path),
                remedy="gqaconvert calibrate MODEL --data TEXT --out FILE writes one",
            )
        self._file, tensors = read_header(self.path)
        self.identity = _parse_identity(self._file, str(path))
        self._layers: dict[int, dict[str, StoredTensor]] = {}
        for tensor in tensors:
            found = _NAME.fullmatch(tensor.name)
            square = len(tensor.shape) == 2 and tensor.shape[0] == tensor.shape[1]
            if not found or not square or tensor.dtype != "F32":
                raise CheckpointError(
                    f"{tensor.dtype} tensor of shape {list(tensor.shape)} is no second moment",
                    at=f"{path} tensor {tensor.name!r}",
                    remedy="write the file again with gqaconvert calibrate",
                )
            self._layers.setdefault(int(found[1]), {})[found[2]] = tensor

    def __getitem__(self, number: int) -> LayerStatistics:
        return self.layer(number)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._layers))

    def __len__(self) -> int:
        return len(self._layers)

    def __contains__(self, number: object) -> bool:
        return number in self._layers  # that of Mapping would read the layer

    @property
    def widths(self) -> dict[int, dict[str, int]]:
        """Layer → kind of matrix → its rows, M+1."""
        return {
            number: {kind: kinds[kind].shape[0] for kind in KINDS if kind in kinds}
            for number, kinds in sorted(self._layers.items())
        }

    @property
    def digest(self) -> str:
        """SHA-256 that tells the file apart: its header, and both ends and the middle of each."""
        digest = hashlib.sha256(self._file.header_sha256.encode())
        with TensorReader(self.path.parent) as reader:
            for number in self:
                for tensor in self._layers[number].values():
                    last = max(tensor.begin, tensor.end - _SAMPLE_BYTES)
                    for begin in (tensor.begin, (tensor.begin + last) // 2, last):
                        size = min(_SAMPLE_BYTES, tensor.end - begin)
                        digest.update(os.pread(reader.descriptor(tensor.file), size, begin))
        return digest.hexdigest()

    def layer(self, number: int) -> LayerStatistics:
        """Read the statistics of one layer, in float64.

        Raises:
            KeyError: a layer that the file does not hold.
            CheckpointError: values that are not finite.
        """
        kinds = self._layers[number]
        with TensorReader(self.path.parent) as reader:
            read = {k: _finite(reader.read(t), t, self.path) for k, t in kinds.items()}
        if "inputs" not in read:
            raise CheckpointError(f"layer {number} has no moments of its inputs", at=str(self.path))
        tokens = self.identity.tokens
        return LayerStatistics(read["inputs"], read.get("averaged"), read.get("attended"), tokens)

    def check(self, folder: Path) -> None:
        """Refuse a model that these statistics are not of.

        Args:
            folder: the model's folder.

        Raises:
            RefusedError: saying what differs.
        """
        index = read_index(folder)
        differs = None
        if index.fingerprint() != self.identity.source_fingerprint:
            differs = "the tensors' names, types, shapes or files differ"
        elif fingerprint_model(folder, index) != self.identity.weights_sha256:
            differs = "weights, config or tokenizer differ"
        if differs:
            raise RefusedError(
                f"the calibration is of another model ({self.identity.model}): {differs}",
                at=str(self.path),
                remedy=f"gqaconvert calibrate {folder} --data TEXT --out FILE",
            )


def write_statistics(
    path: Path,
    identity: StatisticsIdentity,
    layers: Mapping[int, LayerStatistics] | Iterable[tuple[int, LayerStatistics]],
    *,
    widths: Widths | None = None,
    overwrite: bool = False,
) -> None:
    """Write a calibration file, under its name only when it is whole.

    Args:
        path: where.
        identity: what the statistics are of.
        layers: layer number → statistics; or pairs in the order of `widths`, one in memory at a
            time. Stored in float32.
        widths: what `layers` will hold; needed where they come as pairs.
        overwrite: replace an existing file.

    Raises:
        RefusedError: the file exists.
    """
    if path.exists() and not overwrite:
        raise RefusedError(
            "calibration file exists", at=str(path), remedy="--overwrite, or another --out"
        )
    if isinstance(layers, Mapping):
        found = layers
        widths = found.widths if isinstance(found, StatisticsFile) else widths_of(found)
        layers = ((number, found[number]) for number in sorted(found))
    if widths is None:
        raise ValueError("pairs of layers need widths")
    fields = {"version": VERSION, **identity.record()}
    metadata = {"format": "pt", _KEY: json.dumps(fields)}
    tensors = [
        StoredTensor(f"layers.{number}.{kind}", "F32", (width, width), path.name, 0, 0)
        for number, kinds in widths.items()
        for kind, width in kinds.items()
    ]
    shard = lay_out(path.name, tensors, metadata)
    expected = iter(shard.tensors)
    staged = path.parent / f".{path.name}.partial"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with staged.open("wb") as stream:
            stream.write(shard.header)
            for number, statistics in layers:
                for kind in widths[number]:
                    tensor, matrix = next(expected), getattr(statistics, kind)
                    if tensor.name != f"layers.{number}.{kind}" or matrix.shape != tensor.shape:
                        raise ValueError(f"layer {number} is not as its widths say")
                    stream.write(np.ascontiguousarray(matrix, np.float32).data)
            if next(expected, None) is not None:
                raise ValueError("fewer layers than widths")
            stream.flush()
            os.fsync(stream.fileno())
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def widths_of(layers: Mapping[int, LayerStatistics]) -> dict[int, dict[str, int]]:
    """Return what `write_statistics` lays the file out by."""
    found: dict[int, dict[str, int]] = {}
    for number in sorted(layers):
        kinds = ((kind, getattr(layers[number], kind)) for kind in KINDS)
        found[number] = {kind: len(matrix) for kind, matrix in kinds if matrix is not None}
    return found


def statistics_bytes(widths: Widths) -> int:
    """Bytes that statistics of these widths take on disk, header left out."""
    return 4 * sum(width * width for kinds in widths.values() for width in kinds.values())


def merge(first: LayerStatistics, second: LayerStatistics) -> LayerStatistics:
    """Join one layer's statistics over two texts by tokens; what one of them lacks is left out."""
    total = first.tokens + second.tokens
    share = first.tokens / total

    def joined(a: Floats | None, b: Floats | None) -> Floats | None:
        return None if a is None or b is None else share * a + (1 - share) * b

    inputs = share * first.inputs + (1 - share) * second.inputs
    averaged = joined(first.averaged, second.averaged)
    return LayerStatistics(inputs, averaged, joined(first.attended, second.attended), total)


def _parse_identity(file: StoredFile, at: str) -> StatisticsIdentity:
    try:
        fields: dict[str, Any] = json.loads(file.metadata[_KEY])
        version = fields.pop("version")
        texts = tuple(TextIdentity(**text) for text in fields.pop("texts"))
        identity = StatisticsIdentity(texts=texts, **fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "not a calibration file: its header does not say what it is of",
            at=at,
            remedy="a file that gqaconvert calibrate wrote",
        ) from error
    if version != VERSION:
        raise CheckpointError(
            f"calibration file of version {version!r}, this version reads {VERSION}",
            at=at,
            remedy="write it again with gqaconvert calibrate",
        )
    return identity


def _finite(matrix: Any, tensor: StoredTensor, path: Path) -> Floats:  # noqa: ANN401
    wide: Floats = matrix.astype(np.float64)
    if not math.isfinite(float(wide.sum())):
        raise CheckpointError(
            "second moments hold values that are not finite",
            at=f"{path} tensor {tensor.name!r}",
            remedy="calibrate again, in float32",
        )
    return wide
