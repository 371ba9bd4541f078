"""Windows: every token is scored once, with as much context as the stride gives."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gqaconvert.checkpoint.sources import resolve_source
from gqaconvert.corpus.text import make_text
from gqaconvert.corpus.windows import (
    Window,
    batches,
    fingerprint_windows,
    leading_tokens,
    strided_windows,
)
from gqaconvert.errors import UsageError

TEXT = make_text("story", ["Größe 😀 matters: naïve façade, ☃ snow. " * 12, "The end — 終わり。"])


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_source("tiny").folder)


@pytest.fixture(scope="module")
def with_start_token():
    """A tokenizer of single letters that puts <s> before every text, as Llama's does."""
    letters = sorted(set(TEXT.text) | {"a"})
    vocabulary = {letter: number for number, letter in enumerate(["<s>", "<unk>", *letters])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<unk>")


def _tokens(tokenizer, text):
    return tokenizer(text.text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("stride", [1, 7, 15, 16])
def test_overlapping_windows_score_every_token_once(tokenizer, stride):
    tokens = _tokens(tokenizer, TEXT)
    windows = strided_windows(tokenizer, TEXT, length=17, stride=stride)
    scored = [token for w in windows for token in w.token_ids[w.first_scored :]]
    assert scored == tokens[1:]
    assert all(window.first_scored == 17 - stride for window in windows[1:-1])


def test_windows_beside_each_other_lose_the_first_token_of_each(tokenizer):
    tokens = _tokens(tokenizer, TEXT)
    length = next(size for size in range(14, 20) if len(tokens) % size > 1)
    windows = strided_windows(tokenizer, TEXT, length=length)
    assert [token for window in windows for token in window.token_ids] == tokens
    assert {window.first_scored for window in windows} == {1}
    assert len(windows[-1].token_ids) == len(tokens) % length


def test_last_window_of_one_token_is_left_out(tokenizer):
    tokens = _tokens(tokenizer, TEXT)
    windows = strided_windows(tokenizer, TEXT, length=len(tokens) - 1)
    assert [len(window.token_ids) for window in windows] == [len(tokens) - 1]


@pytest.mark.parametrize("stride", [5, 16])
def test_bytes_are_those_of_the_scored_text(tokenizer, stride):
    windows = strided_windows(tokenizer, TEXT, length=17, stride=stride)
    first = len(tokenizer.decode(_tokens(tokenizer, TEXT)[:1]).encode())
    assert sum(window.num_bytes for window in windows) == TEXT.size_bytes - first


def test_bytes_of_separate_windows_leave_out_what_is_not_scored(tokenizer):
    plain = make_text("ascii", ["plain words only, " * 30])
    for window in strided_windows(tokenizer, plain, length=16):
        scored = tokenizer.decode(window.token_ids[window.first_scored :])
        assert window.num_bytes == len(scored)


def test_start_token_leads_every_window_and_is_never_scored(with_start_token):
    assert leading_tokens(with_start_token) == [0]
    windows = strided_windows(with_start_token, TEXT, length=17, stride=8)
    assert all(window.token_ids[0] == 0 for window in windows)
    assert max(len(window.token_ids) for window in windows) == 17
    scored = [token for w in windows for token in w.token_ids[w.first_scored :]]
    assert scored == _tokens(with_start_token, TEXT)  # the very first too: <s> is its context
    assert sum(window.num_bytes for window in windows) == TEXT.size_bytes


def test_limit_keeps_the_first_windows(tokenizer):
    every = strided_windows(tokenizer, TEXT, length=16)
    assert strided_windows(tokenizer, TEXT, length=16, limit=3) == every[:3]


@pytest.mark.parametrize(
    "counts", [{"length": 1}, {"length": 8, "stride": 0}, {"length": 8, "limit": 0}]
)
def test_counts_that_make_no_sense_are_refused(tokenizer, counts):
    with pytest.raises(UsageError, match="no windows of"):
        strided_windows(tokenizer, TEXT, **counts)


def test_single_token_is_refused(tokenizer):
    with pytest.raises(UsageError, match="single token"):
        strided_windows(tokenizer, make_text("short", ["a"]), length=8)


def test_batches_hold_alike_windows_in_order():
    sizes = [4, 4, 4, 3, 3, 4]
    windows = [Window([1] * size, 1, size) for size in sizes]
    found = list(batches(windows, 2))
    assert [window for batch in found for window in batch] == windows
    assert [len(batch) for batch in found] == [2, 1, 2, 1]
    assert all(len({len(each.token_ids) for each in batch}) == 1 for batch in found)


def test_fingerprint_sees_tokens_and_what_is_scored():
    window = Window([1, 2, 3], 1, 3)
    others = [Window([1, 2, 4], 1, 3), Window([1, 2, 3], 2, 3)]
    assert len({fingerprint_windows([each]) for each in (window, *others)}) == 3
