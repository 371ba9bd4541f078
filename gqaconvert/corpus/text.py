"""The text that models are measured on: bundled, a local file, or a data set by name.

It is identified by a hash of its content, so that figures on different texts are never mixed.
How rows of files and data sets are read is shared with training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqaconvert.bundled.text import bundled_documents
from gqaconvert.errors import GqaconvertError, UsageError

BUNDLED = "bundled"
DATASET = "dataset:"

_FIELD = "text"
_SPLITS = ("test", "validation", "train")


@dataclass(frozen=True)
class Text:
    """Documents to measure on.

    Attributes:
        name: what it was asked for by, without folders.
        text: all documents, joined by blank lines.
        documents: one by one.
        size_bytes: of `text` in UTF-8.
        sha256: of the same bytes.
    """

    name: str
    text: str
    documents: tuple[str, ...]
    size_bytes: int
    sha256: str


def load_text(spec: str = BUNDLED) -> Text:
    """Read the text to measure on.

    Args:
        spec: "bundled" for the held-out split of the text that ships with Python; a .txt or .md
            file, one document; a .jsonl or .parquet file with a field `text` in each row; or
            "dataset:NAME[:CONFIG[:SPLIT]]" through `datasets`, by default its test split.

    Raises:
        UsageError: no such text, no such field, or nothing in it.
    """
    if spec == BUNDLED:
        return make_text(BUNDLED, (document.text for document in bundled_documents("heldout")))
    if spec.startswith(DATASET):
        return make_text(spec, _read_dataset(spec))
    path = Path(spec).expanduser()
    if not path.is_file():
        raise UsageError(
            "no such text",
            at=spec,
            remedy=f"{BUNDLED}, a .txt, .md, .jsonl or .parquet file, or {DATASET}NAME:CONFIG",
        )
    return make_text(path.name, _read_file(path))


def make_text(name: str, documents: Iterable[str]) -> Text:
    """Join documents by blank lines; those without any letter are left out.

    Raises:
        UsageError: none is left.
    """
    kept = tuple(document for document in documents if document.strip())
    if not kept:
        raise UsageError("the text is empty", at=name)
    text = "\n\n".join(kept)
    encoded = text.encode(errors="surrogatepass")
    return Text(name, text, kept, len(encoded), hashlib.sha256(encoded).hexdigest())


def _read_file(path: Path) -> Iterator[str]:
    if path.suffix == ".parquet":
        yield from _read_parquet(path)
        return
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text: {error}", at=str(path)) from error
    if path.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield text_field(json_row(line, f"{path} line {number}"), f"{path} line {number}")


def json_row(line: str | bytes, at: str) -> Any:  # noqa: ANN401
    """Parse a line of a .jsonl file.

    Args:
        line: without its end; bytes are UTF-8.
        at: file and line, for the error.

    Raises:
        UsageError: it is not UTF-8 or not JSON.
    """
    try:
        return json.loads(line if isinstance(line, str) else line.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text: {error}", at=at) from error
    except ValueError as error:
        raise UsageError(f"not JSON: {error}", at=at) from error


def text_field(row: Any, at: str, field: str = _FIELD) -> str:  # noqa: ANN401
    """Return the text of a row of a .jsonl file.

    Raises:
        UsageError: the row is no object, or has no such string.
    """
    value = row.get(field) if isinstance(row, dict) else None
    if not isinstance(value, str):
        raise UsageError(
            f"no string called {field!r}",
            at=at,
            remedy=f'one object a line, such as {{"{field}": "Once upon a time"}}',
        )
    return value


def _read_parquet(path: Path) -> Iterator[str]:
    import pyarrow.parquet as parquet  # comes with datasets

    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"not a parquet file: {error}", at=str(path)) from error
    columns = file.schema_arrow.names
    if _FIELD not in columns:
        raise UsageError(f"no column {_FIELD!r} among {', '.join(columns)}", at=str(path))
    for batch in file.iter_batches(columns=[_FIELD]):
        yield from (value for value in batch.column(0).to_pylist() if value is not None)


def _read_dataset(spec: str) -> Iterator[str]:
    yield from open_dataset(spec, _SPLITS, column=_FIELD)[_FIELD]


def open_dataset(spec: str, splits: Sequence[str], *, column: str, streaming: bool = False) -> Any:  # noqa: ANN401
    """Open a data set of `datasets` with one column.

    Args:
        spec: "dataset:NAME[:CONFIG[:SPLIT]]".
        splits: which split to take when none is named, most wanted first; any, if it has none.
        column: the only one that is read.
        streaming: read it as it comes, instead of downloading it whole.

    Returns:
        A `Dataset`, or with `streaming` an `IterableDataset`, which may name no columns.

    Raises:
        UsageError: it has no such column.
        GqaconvertError: `datasets` cannot load it.
    """
    from datasets import get_dataset_split_names, load_dataset
    from datasets.exceptions import DatasetsError

    name, config, split = (*spec.removeprefix(DATASET).split(":"), "", "")[:3]
    try:
        if not split:
            known = get_dataset_split_names(name, config or None)
            split = next((each for each in splits if each in known), known[0])
        rows: Any = load_dataset(name, config or None, split=split, streaming=streaming)
    except (OSError, ValueError, DatasetsError) as error:
        raise GqaconvertError(
            f"datasets cannot load it: {str(error).splitlines()[0]}",
            at=spec,
            remedy=f"{DATASET}NAME:CONFIG:SPLIT, or a local file where there is no network",
        ) from error
    if rows.column_names is None:
        return rows
    if column not in rows.column_names:
        raise UsageError(f"no column {column!r} among {', '.join(rows.column_names)}", at=spec)
    return rows.select_columns([column])
