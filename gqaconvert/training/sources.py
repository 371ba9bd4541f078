"""Documents without end: a source read through again and again, and its place as a few values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gqaconvert.training.documents import Documents
from gqaconvert.training.order import Numbers, permutation
from gqaconvert.training.rows import Content

Place = Mapping[str, Any]
"""Plain JSON values that say which document a source gives next."""


@dataclass(frozen=True)
class Draw:
    """One document drawn.

    Attributes:
        epoch: how many times its source was read through before.
        at: where it is, for errors.
        num_pieces: in how many pieces it is read.
        read: reads one of them; safe in any thread.
    """

    epoch: int
    at: str
    num_pieces: int
    read: Callable[[int], Content]


class Source(Protocol):
    """Documents without end, in a fixed order."""

    @property
    def place(self) -> Place:
        """What the next draw depends on."""

    def draw(self) -> Draw:
        """Return the next document and move on."""

    def go_to(self, place: Place) -> None:
        """Make the next document that of a place."""

    def identity(self) -> object:
        """Return plain JSON values that change when the documents do."""


class OrderedSource:
    """Documents that can be read in any order: each epoch in a new one.

    Args:
        documents: what is read.
        counts: that the order depends on; None to keep it.
    """

    def __init__(self, documents: Documents, counts: Sequence[int] | None) -> None:
        self._documents = documents
        self._counts = counts
        self._order: tuple[int, Numbers] | None = None
        self.place: Place = {"drawn": 0}

    def draw(self) -> Draw:
        """Return the next document and move on."""
        drawn: int = self.place["drawn"]
        epoch, position = divmod(drawn, len(self._documents))
        number = self._number(epoch, position)
        self.place = {"drawn": drawn + 1}
        documents = self._documents
        return Draw(
            epoch,
            documents.at(number),
            documents.num_pieces(number),
            lambda piece: documents.read(number, piece),
        )

    def _number(self, epoch: int, position: int) -> int:
        if self._counts is None:
            return position
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, permutation(len(self._documents), *self._counts, epoch)
        return int(self._order[1][position])

    def go_to(self, place: Place) -> None:
        """Make the next document that of a place."""
        self.place = {"drawn": int(place["drawn"])}

    def identity(self) -> object:
        """Return plain JSON values that change when the documents do."""
        return self._documents.identity()
