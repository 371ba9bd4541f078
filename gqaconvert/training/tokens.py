"""Documents to tokens, ahead of the packing: in threads, in the order in which they were drawn.

Threads, not processes: the tokenizers release Python's lock while they work (the longest stop of
another thread was 19 ms during 300 ms of tokenising), and reach some 600,000 tokens a second on
one core. A process would first spend seconds importing transformers, on every device, and could
outlive its parent.
"""

from __future__ import annotations

import copy
import queue
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from gqaconvert.corpus.windows import leading_tokens
from gqaconvert.errors import UsageError
from gqaconvert.settings.uptrain import DatasetSettings
from gqaconvert.training.chats import Ids, Mask, encode_chat
from gqaconvert.training.mixture import Mixture
from gqaconvert.training.sources import Draw, Place

_PIECES_A_TASK = 16


@dataclass(frozen=True)
class Piece:
    """A document, or one piece of a large one, not read yet.

    Attributes:
        source: number of its source in the mixture.
        draw: the document.
        number: of the piece in it.
        place: of the mixture before the document was drawn.
        skip_tokens: tokens of the piece that were packed before.
    """

    source: int
    draw: Draw
    number: int
    place: Place
    skip_tokens: int = 0

    @property
    def opens(self) -> bool:
        """Whether the document begins here."""
        return self.number == 0

    @property
    def closes(self) -> bool:
        """Whether the document ends here."""
        return self.number == self.draw.num_pieces - 1


@dataclass(frozen=True)
class Tokens:
    """A piece and its tokens.

    Attributes:
        piece: what was tokenised.
        ids: all of its tokens, those to skip included; none of an empty document.
        counted: which of them may count as targets; None for all.
    """

    piece: Piece
    ids: Ids
    counted: Mask | None


class Encoder:
    """Turns pieces into tokens, in one thread at a time.

    Args:
        tokenizer: of transformers; it is copied, since one that pads or cuts in another thread
            would change how this one works.
        settings: of each source.
    """

    def __init__(self, tokenizer: Any, settings: Sequence[DatasetSettings]) -> None:  # noqa: ANN401
        self._tokenizer = copy.deepcopy(tokenizer)
        self._settings = settings
        self._begin = np.asarray(leading_tokens(tokenizer), np.int32)
        end = getattr(tokenizer, "eos_token_id", None)
        self._end = np.asarray([] if end is None else [end], np.int32)

    def encode(self, piece: Piece) -> Tokens:
        """Read and tokenise one piece.

        Raises:
            UsageError: it cannot be read.
        """
        content = piece.draw.read(piece.number)
        if not isinstance(content, str):
            loss_on = self._settings[piece.source].loss_on
            ids, counted = encode_chat(self._tokenizer, content, loss_on, piece.draw.at)
            return Tokens(piece, ids, counted)
        if not content.strip() and piece.draw.num_pieces == 1:
            return Tokens(piece, np.zeros(0, np.int32), None)
        found = self._tokenizer(
            _without_lone_surrogates(content),
            add_special_tokens=False,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        parts = [np.asarray(found, np.int32)]
        if piece.opens:
            parts.insert(0, self._begin)
        if piece.closes:
            parts.append(self._end)
        return Tokens(piece, np.concatenate(parts), None)


def pieces(mixture: Mixture, *, first_piece: int = 0, skip_tokens: int = 0) -> Iterator[Piece]:
    """Draw documents without end, piece by piece.

    Args:
        mixture: what to draw from.
        first_piece: of the first document, those before it were packed already.
        skip_tokens: tokens of that piece that were packed already.
    """
    while True:
        place = mixture.place
        source, draw = mixture.draw()
        for number in range(first_piece, draw.num_pieces):
            yield Piece(source, draw, number, place, skip_tokens)
            skip_tokens = 0
        first_piece = 0


def tokenise(
    drawn: Iterator[Piece], encoders: Sequence[Encoder], threads: int
) -> Generator[Tokens, None, None]:
    """Tokenise pieces in order.

    Args:
        drawn: the pieces.
        encoders: one for each thread, or one.
        threads: that work ahead; 0 for none.

    Raises:
        UsageError: a piece that cannot be read.
    """
    if not threads:
        yield from map(encoders[0].encode, drawn)
        return
    free: queue.SimpleQueue[Encoder] = queue.SimpleQueue()
    for encoder in encoders:
        free.put(encoder)

    def encode(task: list[Piece]) -> list[Tokens]:
        encoder = free.get()
        try:
            return [encoder.encode(piece) for piece in task]
        finally:
            free.put(encoder)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenise")
    waiting: deque[Future[list[Tokens]]] = deque()
    try:
        for task in _tasks(drawn):
            waiting.append(pool.submit(encode, task))
            if len(waiting) > 2 * threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def refuse_empty_sources(found: Iterator[Tokens], names: Sequence[str]) -> Iterator[Tokens]:
    """Leave empty documents out, and stop at a source that holds nothing else.

    Raises:
        UsageError: a whole epoch of a source gave no tokens.
    """
    latest: dict[int, int] = {}
    for tokens in found:
        source, epoch = tokens.piece.source, tokens.piece.draw.epoch
        if len(tokens.ids):
            latest[source] = epoch
            yield tokens
        # The first epoch may have been taken up in its middle.
        elif epoch >= latest.setdefault(source, epoch) + 2:
            raise UsageError(
                "nothing to learn from is in it: all documents are empty",
                at=names[source],
                remedy="other data; of chats with loss_on: replies, turns of the role assistant",
            )


def _tasks(drawn: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group small documents, so that handing them over costs little; pieces of large ones stay."""
    task: list[Piece] = []
    for piece in drawn:
        task.append(piece)
        if len(task) == _PIECES_A_TASK or piece.draw.num_pieces > 1:
            yield task
            task = []
    if task:
        yield task


def _without_lone_surrogates(text: str) -> str:
    """Half of a character, as a JSON escape can write it, is no text to a tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="replace").decode()
    return text
