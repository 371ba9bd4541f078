"""Packing: tokens of documents, cut into sequences, with what counts and where positions start."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gqaconvert.training.packing import make_batch, pack
from gqaconvert.training.sources import Draw
from gqaconvert.training.tokens import Piece, Tokens


def _tokens(sizes, *, masks=None, skip=0):
    """Documents of these sizes, whose tokens are numbered throughout."""
    begin, found = 0, []
    for number, size in enumerate(sizes):
        draw = Draw(0, str(number), 1, lambda piece: "")
        piece = Piece(0, draw, 0, {"draws": number}, skip if number == 0 else 0)
        counted = None if masks is None else np.asarray(masks[number], bool)
        found.append(Tokens(piece, np.arange(begin, begin + size, dtype=np.int32), counted))
        begin += size
    return found


def _batch(found, context, *, separate=False):
    sequences = list(pack(found, context))
    return make_batch(sequences, separate_documents=separate, cursor={})


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(2, 12), st.data())
def test_every_token_is_packed_once_and_any_place_can_be_taken_up(sizes, context, choice):
    total = sum(sizes)
    sequences = list(pack(_tokens(sizes), context))
    packed = [int(token) for each in sequences for token in each.token_ids]
    assert packed == list(range(total // context * context))
    assert [each.number for each in sequences] == list(range(total // context))
    if not sequences:
        return
    done = choice.draw(st.integers(1, len(sequences)))
    place = sequences[done - 1].place
    first = place["mixture"]["draws"]
    rest = _tokens(sizes[first:], skip=place["tokens"])
    again = [token for each in pack(rest, context) for token in each.token_ids]
    offset = sum(sizes[:first])
    assert [token + offset for token in again] == packed[done * context :]


def test_without_separation_all_but_the_first_column_counts():
    batch = _batch(_tokens([3, 2, 7]), 4)
    assert batch.counted.tolist() == [[False, True, True, True]] * 3
    assert batch.position_ids is None
    assert batch.num_counted == 9


def test_separate_documents_start_at_position_0_and_do_not_count_their_first_token():
    batch = _batch(_tokens([3, 2, 7]), 4, separate=True)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 2, 3]]
    assert batch.counted.tolist() == [
        [False, True, True, False],
        [False, False, True, True],
        [False, True, True, True],
    ]


def test_pieces_of_one_document_are_not_kept_apart():
    draw = Draw(0, "long", 2, lambda piece: "")
    found = [Tokens(Piece(0, draw, n, {}), np.arange(3, dtype=np.int32), None) for n in (0, 1)]
    batch = _batch(found, 6, separate=True)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert batch.counted.tolist() == [[False, True, True, True, True, True]]


def test_only_tokens_of_replies_count():
    masks = [[0, 1, 1], [0, 0, 1, 1, 0]]
    batch = _batch(_tokens([3, 5], masks=masks), 8)
    assert batch.counted.int().tolist() == [[0, 1, 1, 0, 0, 1, 1, 0]]
    cut = _batch(_tokens([3, 5], masks=[[1, 1, 1], [1, 0, 1, 1, 0]]), 4, separate=True)
    assert cut.counted.int().tolist() == [[0, 1, 1, 0], [0, 1, 1, 0]]
    cut = _batch(_tokens([2, 7], masks=[[1, 1], [1, 0, 1, 1, 1, 1, 0]]), 3)
    assert cut.counted.int().tolist() == [[0, 1, 1], [0, 1, 1], [0, 1, 0]]
    assert masks == [[0, 1, 1], [0, 0, 1, 1, 0]]
