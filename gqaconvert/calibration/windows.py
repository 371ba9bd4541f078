"""Chooses what a calibration reads: windows of one length, spread over a text, in batches.

The text is never the one that models are measured on: "bundled" means its training split here, and
a data set without a split its training split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gqaconvert.bundled.text import bundled_documents
from gqaconvert.corpus.text import BUNDLED, Text, load_text, make_text
from gqaconvert.corpus.windows import Window, leading_tokens, spread, strided_windows
from gqaconvert.errors import UsageError

_DATASET = "dataset:"
_CHARACTERS = 12
"""Of text for each token wanted, from which on only pieces of it are tokenised."""


def calibration_text(spec: str) -> Text:
    """Read the text to calibrate on.

    Args:
        spec: as in `load_text`, but "bundled" is the training split of the bundled text, and data
            sets give their training split unless another is named.

    Raises:
        UsageError: no such text, or nothing in it.
    """
    if spec == BUNDLED:
        documents = (document.text for document in bundled_documents("train"))
        return make_text(f"{BUNDLED}:train", documents)
    if spec.startswith(_DATASET) and spec.count(":") < 3:
        name, _, config = spec.removeprefix(_DATASET).partition(":")
        return load_text(f"{_DATASET}{name}:{config}:train")
    return load_text(spec)


def spread_windows(
    tokenizer: Any,  # noqa: ANN401
    text: Text,
    *,
    tokens: int,
    context: int,
) -> list[Window]:
    """Choose windows of `context` tokens, evenly spread over a text.

    Args:
        tokenizer: of transformers.
        text: of which a long one is tokenised in pieces, not whole.
        tokens: in all windows together, at most.
        context: tokens a window, what the tokenizer puts before a text included.

    Raises:
        UsageError: counts that make no sense, or a text shorter than one window.
    """
    if tokens < context:
        raise UsageError(
            f"{tokens} tokens are less than a window of {context}", remedy="--tokens 131072"
        )
    if len(text.text) > _CHARACTERS * tokens:
        whole = _from_pieces(tokenizer, text.text, tokens // context, context)
    else:
        cut = strided_windows(tokenizer, text, length=context)
        whole = [window for window in cut if len(window.token_ids) == context]
    if not whole:
        raise UsageError(
            f"the text has less than {context} tokens",
            at=text.name,
            remedy="a longer text, or a smaller --context",
        )
    return spread(whole, tokens // context)


def token_batches(windows: Sequence[Window], size: int) -> list[torch.Tensor]:
    """Stack windows of one length into token ids (B, T), B at most `size`."""
    return [
        torch.tensor([window.token_ids for window in windows[begin : begin + size]])
        for begin in range(0, len(windows), size)
    ]


def _from_pieces(
    tokenizer: Any,  # noqa: ANN401
    text: str,
    count: int,
    context: int,
) -> list[Window]:
    """Tokenise one piece for each window; those that come out too short are left out."""
    prefix = leading_tokens(tokenizer)
    room = context - len(prefix)
    windows = []
    for number in range(count):
        begin, end = number * len(text) // count, (number + 1) * len(text) // count
        space = text.find(" ", begin, end)
        begin = space if number and space >= 0 else begin  # not in the middle of a word
        piece = text[begin : min(end, begin + _CHARACTERS * context)]
        ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"][:room]
        if len(ids) == room:
            windows.append(Window([*prefix, *ids], len(prefix) or 1, len(piece.encode())))
    return windows
