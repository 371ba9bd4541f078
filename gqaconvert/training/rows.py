"""Rows with a text or a chat in them: of .jsonl files, and of tables that `datasets` reads."""

from __future__ import annotations

import glob
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from gqaconvert.corpus.text import text_field
from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.settings.uptrain import DatasetSettings

Chat = list[dict[str, Any]]
"""Messages, each with at least a `role`."""

Content = str | Chat
"""What a document holds."""


def column(settings: DatasetSettings) -> str:
    """Return the key of a row that is read."""
    return settings.messages or settings.field


def content_of(row: Any, settings: DatasetSettings, at: str) -> Content:  # noqa: ANN401
    """Return the text or the chat of a row; null in a table is an empty text.

    Raises:
        UsageError: it has none.
    """
    if settings.messages is None:
        if isinstance(row, dict) and row.get(settings.field, "") is None:
            return ""
        return text_field(row, at, settings.field)
    chat = row.get(settings.messages) if isinstance(row, dict) else None
    if not isinstance(chat, list) or not all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in chat
    ):
        raise UsageError(
            f"no list of messages called {settings.messages!r}",
            at=at,
            remedy=f'rows such as {{"{settings.messages}": [{{"role": "user", "content": "Hi"}}]}}',
        )
    return chat


class Rows:
    """A `Dataset`, mapped into memory: rows of one or more files after one another."""

    def __init__(
        self,
        rows: Any,  # noqa: ANN401
        settings: DatasetSettings,
        names: Sequence[str],
        counts: Sequence[int],
    ) -> None:
        self._rows = rows
        self._settings = settings
        self._names = names
        self._counts = list(counts)
        self._begins = [0, *accumulate(counts)]

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, number: int) -> str:
        """Return file and row, for errors."""
        file = bisect_right(self._begins, number) - 1
        return f"{self._names[file]} row {number - self._begins[file] + 1}"

    def num_pieces(self, number: int) -> int:
        """A row is read whole."""
        return 1

    def read(self, number: int, piece: int) -> Content:
        """Read one row."""
        return content_of(self._rows[number], self._settings, self.at(number))

    def identity(self) -> object:
        """Return names and counts of rows."""
        return [[Path(name).name, n] for name, n in zip(self._names, self._counts, strict=True)]


def check_tables(paths: Sequence[Path], settings: DatasetSettings) -> list[int]:
    """Return the rows of each .parquet file.

    Raises:
        UsageError: one is damaged or has no such column.
    """
    from pyarrow import parquet  # comes with datasets

    counts = []
    for path in paths:
        try:
            file = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"not a parquet file: {error}", at=str(path)) from error
        names = file.schema_arrow.names
        if column(settings) not in names:
            raise UsageError(
                f"no column {column(settings)!r} among {', '.join(names)}", at=str(path)
            )
        counts.append(file.metadata.num_rows)
    return counts


def load_tables(paths: Sequence[Path], settings: DatasetSettings, *, streaming: bool) -> Any:  # noqa: ANN401
    """Open .parquet files with `datasets`, one column of them.

    Unless they are streamed, it keeps a copy in its cache, mapped into memory.

    Raises:
        GqaconvertError: `datasets` cannot load them.
    """
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(
            "parquet",
            # A bracket in a name is no pattern.
            data_files=[glob.escape(str(path.resolve())) for path in paths],
            split="train",
            columns=[column(settings)],
            streaming=streaming,
        )
    except (OSError, ValueError, DatasetsError) as error:
        cause = error.__cause__ or error
        raise GqaconvertError(
            f"datasets cannot load it: {str(cause).splitlines()[0]}", at=settings.path
        ) from error


def open_tables(paths: Sequence[Path], settings: DatasetSettings) -> Rows:
    """Open .parquet files, so that their rows can be read in any order.

    Raises:
        UsageError: one is damaged or has no such column.
    """
    counts = check_tables(paths, settings)
    rows = load_tables(paths, settings, streaming=False)
    return Rows(rows, settings, [str(path) for path in paths], counts)
