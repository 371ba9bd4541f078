"""Documents that can be read in any order: bundled text, local files, downloaded data sets.

A document is a text or a chat. Nothing is read before it is asked for, except where the lines of
a .jsonl file begin; reading is safe from several threads.
"""

from __future__ import annotations

import glob
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gqaconvert.bundled.text import bundled_documents, fingerprint
from gqaconvert.corpus.text import BUNDLED, DATASET, json_row, open_dataset, text_field
from gqaconvert.errors import UsageError
from gqaconvert.settings.uptrain import DatasetSettings
from gqaconvert.training.rows import Content, Rows, column, content_of, open_tables

PIECE_BYTES = 1 << 18
"""A larger text file is read and tokenised in pieces of about this size."""

SPLITS = ("train", "validation", "test")
"""Of a data set, when none is named."""

_LINE_END_BYTES = 1 << 14
_SCAN_BYTES = 1 << 24
_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")


class Documents(Protocol):
    """A fixed number of documents, read by number."""

    def __len__(self) -> int:
        """Return how many there are, empty ones included."""

    def at(self, number: int) -> str:
        """Return where one is, for errors."""

    def num_pieces(self, number: int) -> int:
        """Return in how many pieces one is read."""

    def read(self, number: int, piece: int) -> Content:
        """Read one piece of one document."""

    def identity(self) -> object:
        """Return plain JSON values that change when the documents do."""


def open_documents(settings: DatasetSettings) -> Documents:
    """Open a source whose documents can be read in any order.

    Raises:
        UsageError: no such files, of another kind, without the field wanted, or none in them.
        GqaconvertError: `datasets` cannot load it.
    """
    if settings.path == BUNDLED:
        return _Bundled(settings)
    if settings.path.startswith(DATASET):
        rows = open_dataset(settings.path, SPLITS, column=column(settings))
        return _not_empty(Rows(rows, settings, [settings.path], [len(rows)]), settings.path)
    files = find_files(settings.path)
    parts: list[Documents] = []
    texts = [path for path in files if path.suffix in (".txt", ".md")]
    if texts:
        parts.append(_TextFiles(texts, settings))
    parts += [_JsonLines(path, settings) for path in files if path.suffix == ".jsonl"]
    tables = [path for path in files if path.suffix == ".parquet"]
    if tables:
        parts.append(open_tables(tables, settings))
    return _not_empty(parts[0] if len(parts) == 1 else _Joined(parts), settings.path)


def find_files(path: str) -> list[Path]:
    """Find the files that a path names: itself, those below a folder, or those of a pattern.

    Returns:
        Files of the kinds that can be read, in the order of their names.

    Raises:
        UsageError: there are none.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        found = [
            each
            for each in place.rglob("*")
            if not any(part.startswith(".") for part in each.relative_to(place).parts)
        ]
    elif place.exists():
        found = [place]
    else:
        found = [Path(each) for each in glob.glob(str(place), recursive=True)]  # noqa: PTH207
    files = sorted(
        (each for each in found if each.suffix in _SUFFIXES and each.is_file()),
        key=lambda each: each.as_posix(),
    )
    if not files:
        raise UsageError(
            "no such text" if not found else f"no {', '.join(_SUFFIXES[:-1])} or .parquet file",
            at=path,
            remedy=f"{BUNDLED}, a file, a folder or a pattern such as 'texts/*.jsonl',"
            f" or {DATASET}NAME:CONFIG:SPLIT",
        )
    return files


class _Bundled:
    """The training split of the text that ships with Python."""

    def __init__(self, settings: DatasetSettings) -> None:
        _refuse_chats(settings, "the bundled text")
        self._documents = bundled_documents("train")

    def __len__(self) -> int:
        return len(self._documents)

    def at(self, number: int) -> str:
        return self._documents[number].name

    def num_pieces(self, number: int) -> int:
        return 1

    def read(self, number: int, piece: int) -> Content:
        return self._documents[number].text

    def identity(self) -> object:
        return fingerprint(self._documents)


class _TextFiles:
    """Files of one document each."""

    def __init__(self, paths: Sequence[Path], settings: DatasetSettings) -> None:
        _refuse_chats(settings, str(paths[0]))
        self._paths = paths
        self._sizes = [path.stat().st_size for path in paths]

    def __len__(self) -> int:
        return len(self._paths)

    def at(self, number: int) -> str:
        return str(self._paths[number])

    def num_pieces(self, number: int) -> int:
        return max(1, -(-self._sizes[number] // PIECE_BYTES))

    def read(self, number: int, piece: int) -> Content:
        path, size = self._paths[number], self._sizes[number]
        with path.open("rb") as file:
            begin, end = (_cut(file, place, size) for place in (piece, piece + 1))
            file.seek(begin)
            encoded = file.read(end - begin)
        try:
            text = encoded.decode()
        except UnicodeDecodeError as error:
            line = _line_at(path, begin + error.start)
            raise UsageError(f"not UTF-8 text: {error.reason}", at=f"{path} line {line}") from error
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def identity(self) -> object:
        return [[path.name, size] for path, size in zip(self._paths, self._sizes, strict=True)]


class _JsonLines:
    """A file with a document a line.

    `datasets` would copy the file first, guess a type for every key, and know no line numbers.
    """

    def __init__(self, path: Path, settings: DatasetSettings) -> None:
        self._path = path
        self._settings = settings
        self._begins = _line_begins(path)

    def __len__(self) -> int:
        return len(self._begins) - 1

    def at(self, number: int) -> str:
        return f"{self._path} line {number + 1}"

    def num_pieces(self, number: int) -> int:
        return 1

    def read(self, number: int, piece: int) -> Content:
        begin, end = int(self._begins[number]), int(self._begins[number + 1])
        with self._path.open("rb") as file:
            file.seek(begin)
            line = file.read(end - begin)
        if not line.strip():
            return ""
        row = json_row(line, self.at(number))
        if self._settings.messages is None:
            return text_field(row, self.at(number), self._settings.field)
        return content_of(row, self._settings, self.at(number))

    def identity(self) -> object:
        return [self._path.name, int(self._begins[-1])]


class _Joined:
    """Several of the above after one another."""

    def __init__(self, parts: Sequence[Documents]) -> None:
        self._parts = parts
        self._begins = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._begins[-1]

    def _find(self, number: int) -> tuple[Documents, int]:
        part = bisect_right(self._begins, number) - 1
        return self._parts[part], number - self._begins[part]

    def at(self, number: int) -> str:
        part, inside = self._find(number)
        return part.at(inside)

    def num_pieces(self, number: int) -> int:
        part, inside = self._find(number)
        return part.num_pieces(inside)

    def read(self, number: int, piece: int) -> Content:
        part, inside = self._find(number)
        return part.read(inside, piece)

    def identity(self) -> object:
        return [part.identity() for part in self._parts]


def _refuse_chats(settings: DatasetSettings, what: str) -> None:
    if settings.messages is not None:
        raise UsageError(
            f"{what} holds no chats", at=settings.path, remedy="leave `messages` out, or use .jsonl"
        )


def _not_empty(documents: Documents, path: str) -> Documents:
    if not len(documents):
        raise UsageError("there are no documents in it", at=path)
    return documents


def _line_begins(path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where the lines of a file begin, and its end."""
    found, begin = [np.zeros(1, np.int64)], 0
    with path.open("rb") as file:
        while block := file.read(_SCAN_BYTES):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            found.append(ends.astype(np.int64) + begin + 1)
            begin += len(block)
    begins = np.concatenate(found)
    return begins if begins[-1] == begin else np.append(begins, begin)


def _line_at(path: Path, place: int) -> int:
    """Line, from 1, in which a byte is."""
    lines = 1
    with path.open("rb") as file:
        while place > 0 and (block := file.read(min(place, _SCAN_BYTES))):
            lines += block.count(b"\n")
            place -= len(block)
    return lines


def _cut(file: Any, piece: int, size: int) -> int:  # noqa: ANN401
    """Byte at which a piece begins: after a line where one ends soon, never inside a character.

    A function of the content near it alone, so that a piece is found without reading those before.
    Tokens beside a cut may differ from those of the whole text; a line's end keeps most the same.
    """
    place = piece * PIECE_BYTES
    if place == 0 or place >= size:
        return min(place, size)
    file.seek(place)
    near: bytes = file.read(_LINE_END_BYTES)
    line = near.find(b"\n")
    if line >= 0:
        return place + line + 1
    inside = next((n for n, byte in enumerate(near) if byte & 0xC0 != 0x80), len(near))
    return place + inside
