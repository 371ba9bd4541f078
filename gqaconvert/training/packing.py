"""Tokens of documents, one after another, cut into sequences of equal length.

A document longer than what is left of a sequence goes on in the next: nothing is padded and
nothing thrown away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gqaconvert.training.batch import Batch
from gqaconvert.training.sources import Place
from gqaconvert.training.tokens import Tokens


@dataclass(frozen=True)
class Span:
    """Neighbouring tokens of one piece."""

    tokens: Tokens
    begin: int
    end: int

    @property
    def opens_document(self) -> bool:
        """Whether a document begins with the first of them."""
        return self.begin == 0 and self.tokens.piece.opens


@dataclass(frozen=True)
class Packed:
    """A sequence.

    Attributes:
        number: in the global order.
        spans: its tokens, in order.
    """

    number: int
    spans: tuple[Span, ...]

    @property
    def token_ids(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """(T,)."""
        return np.concatenate([span.tokens.ids[span.begin : span.end] for span in self.spans])

    @property
    def place(self) -> Place:
        """Where reading goes on after it: document, piece, and tokens of it that are done."""
        last = self.spans[-1]
        piece = last.tokens.piece
        return {"mixture": piece.place, "piece": piece.number, "tokens": last.end}


def pack(found: Iterable[Tokens], context: int, first_number: int = 0) -> Iterator[Packed]:
    """Cut tokens into sequences.

    Args:
        found: tokens of documents, in order.
        context: tokens a sequence.
        first_number: of the first sequence.
    """
    spans: list[Span] = []
    room, number = context, first_number
    for tokens in found:
        begin = tokens.piece.skip_tokens
        while begin < len(tokens.ids):
            end = min(begin + room, len(tokens.ids))
            spans.append(Span(tokens, begin, end))
            room -= end - begin
            begin = end
            if not room:
                yield Packed(number, tuple(spans))
                spans, room, number = [], context, number + 1


def make_batch(
    sequences: Sequence[Packed], *, separate_documents: bool, cursor: dict[str, Any]
) -> Batch:
    """Turn sequences into tensors.

    Args:
        sequences: of equal length.
        separate_documents: give positions that start again with each document, and do not count
            its first token.
        cursor: of the batch.
    """
    token_ids = np.stack([each.token_ids for each in sequences]).astype(np.int64)
    counted = np.stack([_counted(each, separate_documents) for each in sequences])
    positions = np.stack([_positions(each) for each in sequences]) if separate_documents else None
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        counted=torch.from_numpy(counted),
        position_ids=None if positions is None else torch.from_numpy(positions),
        sequence_numbers=torch.tensor([each.number for each in sequences]),
        cursor=cursor,
    )


def _counted(sequence: Packed, separate_documents: bool) -> np.ndarray[Any, np.dtype[np.bool_]]:
    parts = []
    for span in sequence.spans:
        mask = span.tokens.counted
        size = span.end - span.begin
        part = np.ones(size, np.bool_) if mask is None else mask[span.begin : span.end].copy()
        if span.opens_document and separate_documents:
            part[0] = False
        parts.append(part)
    parts[0][0] = False
    return np.concatenate(parts)


def _positions(sequence: Packed) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What goes on from the sequence before starts at 0 too: it sees nothing of that."""
    parts: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    begin = 0
    for span in sequence.spans:
        if span.opens_document:
            begin = 0
        end = begin + span.end - span.begin
        parts.append(np.arange(begin, end, dtype=np.int64))
        begin = end
    return np.concatenate(parts)
