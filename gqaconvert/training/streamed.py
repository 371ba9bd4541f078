"""A data set read as it comes, over the network, in an order that can be taken up exactly.

`datasets` can save its place in a stream, but loses what its shuffle buffer holds. Here the rows
are shuffled in blocks instead: the place is that of the block's beginning and how many of its
rows were drawn, and taking it up again reads at most one block twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gqaconvert.corpus.text import DATASET, open_dataset
from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.settings.uptrain import DatasetSettings
from gqaconvert.training.documents import SPLITS, find_files
from gqaconvert.training.order import hash_counts, permutation
from gqaconvert.training.rows import Content, check_tables, column, content_of, load_tables
from gqaconvert.training.sources import Draw, Place

_SMALLEST_BLOCK = 64


class StreamedSource:
    """Rows of an `IterableDataset`, epoch after epoch.

    Args:
        rows: the `IterableDataset`.
        settings: what a document is.
        counts: that the order depends on.
        shuffle_buffer: rows in a block; 1 keeps the order.
        identity: plain JSON values that name the rows.
    """

    def __init__(
        self,
        rows: Any,  # noqa: ANN401
        settings: DatasetSettings,
        counts: Sequence[int],
        shuffle_buffer: int,
        identity: object,
    ) -> None:
        self._rows = rows
        self._settings = settings
        self._counts = counts
        self._keep_order = shuffle_buffer == 1
        self._block_rows = max(shuffle_buffer, _SMALLEST_BLOCK if self._keep_order else 1)
        self._identity = identity
        self._go_to(0, 0, None, 0)

    @property
    def place(self) -> Place:
        """The block the next document is in, and how many of it were drawn before."""
        return {
            "epoch": self._epoch,
            "block": self._block,
            "stream": self._stream,
            "taken": self._taken,
        }

    def draw(self) -> Draw:
        """Return the next document and move on.

        Raises:
            UsageError: a row without what is read of it, or no rows at all.
            GqaconvertError: the stream broke off.
        """
        if self._reader is None:
            self._open()
        elif self._taken == len(self._drawn_from):
            self._next_block(self._reader)
        content, at = self._drawn_from[self._taken]
        self._taken += 1
        return Draw(self._epoch, at, 1, lambda piece: content)

    def go_to(self, place: Place) -> None:
        """Make the next document that of a place."""
        self._go_to(place["epoch"], place["block"], place["stream"], place["taken"])

    def identity(self) -> object:
        """Return plain JSON values that name the rows."""
        return self._identity

    def _go_to(self, epoch: int, block: int, stream: Any, taken: int) -> None:  # noqa: ANN401
        self._epoch, self._block, self._stream, self._taken = epoch, block, stream, taken
        self._reader: Iterator[Any] | None = None
        self._drawn_from: list[tuple[Content, str]] = []

    def _open(self) -> None:
        """Begin to read at the block that `place` names."""
        if not self._keep_order:  # the files of a data set change places, epoch by epoch
            self._rows.set_epoch(1 + hash_counts(*self._counts, self._epoch) % (2**31 - 1))
        self._rows.load_state_dict(self._stream)
        self._reader = iter(self._rows)
        self._fill(self._reader)
        if self._taken >= len(self._drawn_from):
            self._next_block(self._reader)

    def _next_block(self, reader: Iterator[Any]) -> None:
        if self._drawn_from:
            stream, self._taken = self._rows.state_dict(), 0
            self._stream, self._block = stream, self._block + 1
            self._fill(reader)
        if not self._drawn_from:
            if self._stream is None:
                raise UsageError("there are no documents in it", at=self._settings.path)
            self._go_to(self._epoch + 1, 0, None, 0)
            self._open()

    def _fill(self, reader: Iterator[Any]) -> None:
        read: list[Any] = []
        try:
            while len(read) < self._block_rows and (row := next(reader, None)) is not None:
                read.append(row)
        except (OSError, ValueError) as error:
            raise GqaconvertError(
                f"the stream broke off: {str(error).splitlines()[0]}",
                at=self._settings.path,
                remedy="resume the run once it can be read again",
            ) from error
        at = f"{self._settings.path} epoch {self._epoch} block {self._block}"
        contents = [
            (content_of(row, self._settings, f"{at} row {number}"), f"{at} row {number}")
            for number, row in enumerate(read, start=1)
        ]
        if self._keep_order:
            self._drawn_from = contents
        else:
            order = permutation(len(contents), *self._counts, self._epoch, self._block)
            self._drawn_from = [contents[number] for number in order]


def open_streamed(
    settings: DatasetSettings, counts: Sequence[int], shuffle_buffer: int
) -> StreamedSource:
    """Open a data set, or local .parquet files, as a stream.

    Raises:
        UsageError: it cannot be streamed, or has no such column.
        GqaconvertError: `datasets` cannot load it.
    """
    if settings.path.startswith(DATASET):
        rows = open_dataset(settings.path, SPLITS, column=column(settings), streaming=True)
        return StreamedSource(rows, settings, counts, shuffle_buffer, settings.path)
    files = [] if settings.path == "bundled" else find_files(settings.path)
    if not files or any(path.suffix != ".parquet" for path in files):
        raise UsageError(
            "only data sets and .parquet files are streamed",
            at=settings.path,
            remedy="leave `streaming` out: text and .jsonl files are read in place anyway",
        )
    sizes = check_tables(files, settings)
    rows = load_tables(files, settings, streaming=True)
    names = [[path.name, size] for path, size in zip(files, sizes, strict=True)]
    return StreamedSource(rows, settings, counts, shuffle_buffer, names)
