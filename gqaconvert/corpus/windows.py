"""Cuts a text into windows of tokens: what is read, and which part of it is scored.

Windows of `length` tokens start every `stride` tokens; each scores only what no window before it
has scored, so a smaller stride gives every token more context at a higher price.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from gqaconvert.corpus.text import Text
from gqaconvert.errors import UsageError


@dataclass(frozen=True)
class Window:
    """Tokens to read at once.

    Attributes:
        token_ids: all of them, the beginning-of-text token included where the tokenizer adds one.
        first_scored: place in `token_ids` of the first token that is scored; at least 1, as the
            first token of a window has nothing before it to be predicted from.
        num_bytes: UTF-8 bytes of the text that the scored tokens stand for.
    """

    token_ids: list[int]
    first_scored: int
    num_bytes: int

    @property
    def num_scored(self) -> int:
        """Tokens scored."""
        return len(self.token_ids) - self.first_scored


def strided_windows(
    tokenizer: Any,  # noqa: ANN401
    text: Text,
    *,
    length: int,
    stride: int | None = None,
    limit: int | None = None,
) -> list[Window]:
    """Cut a text into windows.

    The text is one stream of tokens. A token that the tokenizer puts before every text, such as
    Llama's <s>, stands at the start of every window and is never scored.

    Args:
        tokenizer: of transformers.
        text: what to cut.
        length: tokens a window, at least 2 beyond the beginning-of-text token; the last window may
            be shorter.
        stride: tokens from one window to the next; `length` by default, so that none overlap.
        limit: windows to keep, the first ones; all by default.

    Raises:
        UsageError: counts that make no sense, or a text of a single token.
    """
    prefix = leading_tokens(tokenizer)
    room = length - len(prefix)
    step = room if stride is None else min(stride, room)
    if room < 2 or step < 1 or (limit is not None and limit < 1):
        raise UsageError(
            f"no windows of {length} tokens every {stride} tokens, {limit} of them",
            remedy="--context 512 --stride 512 --windows 16",
        )
    token_ids, ends = _tokenise(tokenizer, text.text)
    windows: list[Window] = []
    scored_to = 0
    for begin in range(0, len(token_ids), step):
        end = min(begin + room, len(token_ids))
        # Without a prefix the very first token of a window cannot be scored.
        first = max(scored_to, begin + (0 if prefix else 1))
        if end - first >= 1 and (limit is None or len(windows) < limit):
            num_bytes = ends[end - 1] - (ends[first - 1] if first else 0)
            windows.append(
                Window([*prefix, *token_ids[begin:end]], len(prefix) + first - begin, num_bytes)
            )
        scored_to = end
        if end == len(token_ids) or (limit is not None and len(windows) >= limit):
            break
    if not windows:
        raise UsageError("the text is a single token", at=text.name, remedy="a longer text")
    return windows


def spread(windows: Sequence[Window], count: int) -> list[Window]:
    """Choose `count` windows at even distances; all where there are fewer."""
    if count >= len(windows):
        return list(windows)
    return [windows[number * len(windows) // count] for number in range(count)]


def chosen_windows(
    tokenizer: Any,  # noqa: ANN401
    text: Text,
    *,
    length: int,
    stride: int | None = None,
    count: int | None = None,
    spread_out: bool = False,
) -> list[Window]:
    """Cut a text and take the first windows, or windows evenly spread over all of it.

    Args:
        tokenizer: of transformers.
        text: to cut.
        length: tokens of a window.
        stride: tokens from one window to the next; None for `length`.
        count: windows; None for all.
        spread_out: take them over the whole text.

    Raises:
        UsageError: as `strided_windows`.
    """
    if not spread_out or count is None:
        return strided_windows(tokenizer, text, length=length, stride=stride, limit=count)
    return spread(strided_windows(tokenizer, text, length=length, stride=stride), count)


def batches(windows: Sequence[Window], size: int) -> Iterator[list[Window]]:
    """Group neighbours that can be read together without padding: at most `size`, all alike."""
    for _, alike in groupby(windows, key=lambda each: (len(each.token_ids), each.first_scored)):
        run = list(alike)
        for begin in range(0, len(run), size):
            yield run[begin : begin + size]


def fingerprint_windows(windows: Sequence[Window]) -> str:
    """SHA-256 of what is read and what is scored, to prove that two models saw the same."""
    digest = hashlib.sha256()
    for window in windows:
        digest.update(f"{window.first_scored} {window.token_ids}\n".encode())
    return digest.hexdigest()


def leading_tokens(tokenizer: Any) -> list[int]:  # noqa: ANN401
    """Return what a tokenizer puts before every text: with special tokens, and not without."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a", add_special_tokens=True)["input_ids"]
    for begin in range(len(whole) - len(plain) + 1):
        if whole[begin : begin + len(plain)] == plain:
            return list(whole[:begin])
    return []


def _tokenise(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:  # noqa: ANN401
    """Return tokens, and for each the number of bytes of text up to its end."""
    if not getattr(tokenizer, "is_fast", False):
        return _tokenise_slowly(tokenizer, text)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends, reached, size_bytes = [], 0, 0
    for _, end in encoded["offset_mapping"]:
        if end > reached:
            size_bytes += len(text[reached:end].encode(errors="surrogatepass"))
            reached = end
        ends.append(size_bytes)
    return list(encoded["input_ids"]), ends


def _tokenise_slowly(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:  # noqa: ANN401
    """Tokenizers in Python give no offsets: share the bytes out evenly, exact over the whole."""
    token_ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    size_bytes, count = len(text.encode(errors="surrogatepass")), len(token_ids)
    return token_ids, [size_bytes * (place + 1) // count for place in range(count)]
