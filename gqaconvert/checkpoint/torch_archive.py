"""What a `pytorch_model*.bin` file holds and where its bytes are, without torch.

Both formats of `torch.save`: a zip archive whose storages are stored uncompressed (torch 1.6 and
later), and the older run of pickles followed by raw storages. The pickle is read by
`checkpoint.torch_pickle`, which executes nothing.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from gqaconvert.checkpoint.tensors import StoredFile, StoredTensor
from gqaconvert.checkpoint.torch_pickle import RESAVE, Storage, View, read_pickle
from gqaconvert.errors import CheckpointError
from gqaconvert.units import ELEMENT_TYPES

MAX_PICKLE_BYTES = 100_000_000
"""Far above what any model needs (some 200 bytes a tensor), far below what would fill memory."""

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_PROTOCOL = 1001


def read_archive(path: Path) -> tuple[StoredFile, list[StoredTensor]]:
    """Read which tensors a torch file holds, and where.

    Tensors come in file order. Those that share a storage (tied weights) share their range.
    A tensor whose elements are not in row order has `strides`, and its range spans its elements.

    Raises:
        CheckpointError: damaged, truncated, big-endian, another kind of file, or a pickle that
            is not plain tensors.
    """
    size_bytes = path.stat().st_size
    at = str(path)
    with path.open("rb") as stream:
        start = stream.read(512)
        stream.seek(0)
        if start.startswith(b"PK\x03\x04"):
            described, pickles, place = _read_zip(stream, size_bytes, at)
        else:
            _refuse_other_files(start, at)
            described, pickles, place = _read_legacy(stream, size_bytes, at)
    views = _state_dict(described, at)
    tensors = [_locate(name, view, place, path.name, at) for name, view in views.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    return StoredFile(path.name, size_bytes, hashlib.sha256(pickles).hexdigest()), tensors


_AGAIN = "fetch the checkpoint again; an interrupted download leaves such files"
_Place = Callable[[Storage], int]
"""Where a storage begins in the file; raises CheckpointError when it is not there whole."""


def _damaged(what: str, at: str) -> CheckpointError:
    return CheckpointError(what, at=at, remedy=_AGAIN)


def _refuse_other_files(start: bytes, at: str) -> None:
    """Name what is neither format, before it is called a damaged pickle."""
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError("a Git LFS pointer, not the weights", at=at, remedy="git lfs pull")
    if start[257:262] == b"ustar":
        raise CheckpointError(
            "a tar archive, the format of torch before 0.1.10, which is not read",
            at=at,
            remedy=RESAVE,
        )
    if not start.startswith(b"\x80"):
        raise _damaged("neither a zip archive nor a pickle, so not made by torch.save", at)


@dataclass(frozen=True, slots=True)
class _Record:
    begin: int
    size_bytes: int


def _read_zip(stream: IO[bytes], size_bytes: int, at: str) -> tuple[object, bytes, _Place]:
    records = _zip_records(stream, size_bytes, at)
    pickles = [name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise CheckpointError("a zip archive, but not one made by torch.save", at=at)
    folder = pickles[0].removesuffix("data.pkl")
    if folder + "byteorder" in records:
        order = _read_record(stream, records[folder + "byteorder"], 16, at)
        if order != b"little":
            raise CheckpointError(
                f"byte order {order.decode('ascii', 'replace')!r}, only little is read",
                at=at,
                remedy=RESAVE,
            )
    pickled = _read_record(stream, records[pickles[0]], MAX_PICKLE_BYTES, at)

    def place(storage: Storage) -> int:
        record = records.get(f"{folder}data/{storage.key}")
        if record is None:
            raise _damaged(f"storage {storage.key!r} is missing", at)
        if record.size_bytes != storage.size_bytes:
            raise _damaged(
                f"storage {storage.key!r} has {record.size_bytes} bytes,"
                f" its pickle says {storage.size_bytes}",
                at,
            )
        return record.begin

    return read_pickle(io.BytesIO(pickled), at), pickled, place


def _zip_records(stream: IO[bytes], size_bytes: int, at: str) -> dict[str, _Record]:
    try:
        with zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
        if any(entry.filename.endswith("/constants.pkl") for entry in entries):
            raise CheckpointError(
                "a TorchScript program, not a file of weights", at=at, remedy=RESAVE
            )
        records = {entry.filename: _zip_record(stream, entry, size_bytes, at) for entry in entries}
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, struct.error) as error:
        raise _damaged(f"damaged or truncated zip archive: {error}", at) from error
    if len(records) != len(entries):
        raise _damaged("zip archive with two records of one name", at)
    return records


def _zip_record(stream: IO[bytes], entry: zipfile.ZipInfo, size_bytes: int, at: str) -> _Record:
    """Find a record's bytes: behind its local header, which is padded to align them."""
    where = f"{at} record {entry.filename!r}"
    stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
    if not stored or entry.flag_bits & 1:
        raise CheckpointError(
            "record is compressed or encrypted, which torch.save never does",
            at=where,
            remedy=RESAVE,
        )
    stream.seek(entry.header_offset)
    header = stream.read(30)
    if len(header) < 30 or not header.startswith(b"PK\x03\x04"):
        raise _damaged("record has no local header", where)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    begin = entry.header_offset + 30 + name_length + extra_length
    if begin + entry.file_size > size_bytes:
        raise _damaged("record runs past the end of the file", where)
    return _Record(begin, entry.file_size)


def _read_record(stream: IO[bytes], record: _Record, limit: int, at: str) -> bytes:
    if record.size_bytes > limit:
        raise CheckpointError(
            f"a record of {record.size_bytes} bytes where at most {limit} make sense", at=at
        )
    stream.seek(record.begin)
    return stream.read(record.size_bytes)


class _Bounded(io.BufferedIOBase):
    """Lets pickles be read from a file of weights without ever taking in the weights."""

    def __init__(self, stream: IO[bytes], at: str) -> None:
        self._stream, self._at, self._left = stream, at, MAX_PICKLE_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        return self._count(self._stream.read(self._allowed(size)))

    def readline(self, size: int | None = -1, /) -> bytes:
        return self._count(self._stream.readline(self._allowed(size)))

    def tell(self) -> int:
        return self._stream.tell()

    def _allowed(self, size: int | None) -> int:
        return self._left + 1 if size is None or size < 0 else min(size, self._left + 1)

    def _count(self, piece: bytes) -> bytes:
        self._left -= len(piece)
        if self._left < 0:
            raise CheckpointError(
                f"a pickle of more than {MAX_PICKLE_BYTES} bytes", at=self._at, remedy=RESAVE
            )
        return piece


def _read_legacy(stream: IO[bytes], size_bytes: int, at: str) -> tuple[object, bytes, _Place]:
    bounded = cast("IO[bytes]", _Bounded(stream, at))
    if read_pickle(bounded, at) != LEGACY_MAGIC:
        raise _damaged("a pickle, but not one made by torch.save", at)
    if read_pickle(bounded, at) != LEGACY_PROTOCOL:
        raise CheckpointError("unknown version of torch's pre-1.6 format", at=at, remedy=RESAVE)
    system = read_pickle(bounded, at)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise CheckpointError("not written on a little-endian machine", at=at, remedy=RESAVE)
    described = read_pickle(bounded, at)
    keys = read_pickle(bounded, at)
    begin = stream.tell()
    stream.seek(0)
    pickles = stream.read(begin)
    storages = {view.storage.key: view.storage for view in _state_dict(described, at).values()}
    begins = _legacy_storages(stream, keys, storages, size_bytes, at)

    def place(storage: Storage) -> int:
        if storage != storages[storage.key]:
            raise _damaged(f"storage {storage.key!r} is described in two ways", at)
        return begins[storage.key]

    return described, pickles, place


def _legacy_storages(
    stream: IO[bytes],
    keys: object,
    storages: Mapping[str, Storage],
    size_bytes: int,
    at: str,
) -> dict[str, int]:
    """Walk the storages: each an int64 count of elements and then its elements."""
    names = [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []
    if sorted(names) != sorted(storages):
        raise _damaged("list of storages disagrees with the tensors", at)
    begins = {}
    for key in names:
        count = int.from_bytes(stream.read(8), "little", signed=True)
        begins[key] = stream.tell()
        end = begins[key] + storages[key].size_bytes
        if end > size_bytes:
            raise _damaged(
                f"file is truncated: {size_bytes} bytes, storage {key!r} ends at {end}", at
            )
        if count != storages[key].count:
            raise _damaged(
                f"storage {key!r} has {count} elements, its pickle says {storages[key].count}", at
            )
        stream.seek(end)
    return begins


def _state_dict(described: object, at: str) -> dict[str, View]:
    """Keep the tensors of a flat dict; numbers, strings and `_metadata` beside them are let go."""
    if not isinstance(described, dict):
        raise CheckpointError(
            f"holds a {_kind(described)}, not a dict of tensors", at=at, remedy=RESAVE
        )
    views = {}
    for key, value in described.items():
        if isinstance(value, View) and isinstance(key, str):
            views[key] = value
        elif key != "_metadata" and isinstance(value, dict | list | tuple | View | Storage):
            raise CheckpointError(
                f"holds a {_kind(value)} under {key!r}, not only tensors by name",
                at=at,
                remedy="save the state dict alone, or use save_pretrained",
            )
    if not views:
        raise CheckpointError(
            "holds no tensors", at=at, remedy="is this the file with the weights?"
        )
    return views


def _kind(value: object) -> str:
    if isinstance(value, dict) and any(isinstance(item, View) for item in value.values()):
        return "dict of tensors"
    return "tensor" if isinstance(value, View) else type(value).__name__


def _locate(name: str, view: View, place: _Place, file: str, at: str) -> StoredTensor:
    where = f"{at} tensor {name!r}"
    item_bytes = ELEMENT_TYPES[view.dtype].size_bytes
    if len(view.shape) != len(view.strides) or view.offset < 0:
        raise _damaged("shape, strides and offset disagree", where)
    count = math.prod(view.shape)
    span = (
        1 + sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True))
        if count
        else 0
    )
    if (view.offset + span) * item_bytes > view.storage.size_bytes:
        raise _damaged("tensor reaches past its storage", where)
    begin = place(view.storage) + view.offset * item_bytes
    strides = view.strides if count and not _in_row_order(view) else None
    return StoredTensor(
        name, view.dtype, view.shape, file, begin, begin + span * item_bytes, strides
    )


def _in_row_order(view: View) -> bool:
    step = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
