"""The needle: hidden where it says, and found by who looks."""

from __future__ import annotations

import pytest
import torch

from gqaconvert.corpus.text import load_text
from gqaconvert.errors import UsageError
from gqaconvert.evaluation.needle import CHANCE, is_chance, measure_needle
from gqaconvert.modelling.models import load_model

DEPTHS = (0.0, 0.5, 1.0)


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", dtype="float32")


@pytest.fixture(scope="module")
def text():
    return load_text()


class Oracle:
    """Answers like a model that sees the answers, or like one that never does."""

    def __init__(self, tokenizer, *, right=True):
        self.tokenizer, self.right, self.windows = tokenizer, right, []

    def read(self, windows):
        (window,) = windows
        self.windows.append(window)
        key = window.token_ids[window.first_scored :]
        logits = torch.zeros(len(key), 2048)
        logits[range(len(key)), key] = 1.0 if self.right else -1.0
        yield logits


def _measure(tiny, text, reader=None, **more):
    options = {"lengths": (128, 256), "depths": DEPTHS, "repeats": 3, "settings": {}} | more
    return measure_needle(tiny, text, reader=reader, **options)


def test_who_knows_is_right_and_who_does_not_is_wrong(tiny, text):
    knows = _measure(tiny, text, Oracle(tiny.tokenizer))
    assert (knows.value, knows.detail["choice_accuracy"], knows.n) == (1, 1, 18)
    assert not knows.detail["at_chance"]
    never = _measure(tiny, text, Oracle(tiny.tokenizer, right=False))
    assert (never.value, never.detail["choice_accuracy"]) == (0, 0)
    assert never.detail["at_chance"]


def test_key_is_told_at_its_depth_and_asked_for_at_the_end(tiny, text):
    oracle = Oracle(tiny.tokenizer)
    found = _measure(tiny, text, oracle)
    cells = [(cell["length"], cell["depth"]) for cell in found.detail["cells"]]
    assert cells == [(length, depth) for length in (128, 256) for depth in DEPTHS]
    kinds = [cell for cell in cells for _ in range(3)]
    for (length, depth), window in zip(kinds, oracle.windows, strict=True):
        assert len(window.token_ids) == length
        prompt = tiny.tokenizer.decode(window.token_ids[: window.first_scored])
        key = tiny.tokenizer.decode(window.token_ids[window.first_scored :]).strip()
        assert len(key) == 5
        assert prompt.endswith("What is the pass key? The pass key is")
        told = f"The pass key is {key}. Remember it: the pass key is {key}."
        assert prompt.count(told) == 1
        before, _, after = prompt.partition(told)
        after = after.removesuffix("What is the pass key? The pass key is")
        share = len(before.strip()) / (len(before.strip()) + len(after.strip()) or 1)
        assert share == pytest.approx(depth, abs=0.25)


def test_questions_are_the_same_each_time(tiny, text):
    first, second = Oracle(tiny.tokenizer), Oracle(tiny.tokenizer)
    _measure(tiny, text, first)
    _measure(tiny, text, second)
    assert first.windows == second.windows
    assert len({tuple(window.token_ids) for window in first.windows}) == 18


def test_the_bundled_model_is_too_small_and_said_so(tiny, text):
    found = _measure(tiny, text)
    assert found.value == 0
    assert found.detail["at_chance"] == (found.detail["choice_accuracy"] <= CHANCE + 0.2042)


def test_lengths_beyond_the_model_are_left_out(tiny, text):
    found = _measure(tiny, text, Oracle(tiny.tokenizer), lengths=(128, 4096), repeats=1)
    assert found.detail["lengths_left_out"] == [4096]
    assert {cell["length"] for cell in found.detail["cells"]} == {128}
    with pytest.raises(UsageError, match="1024 tokens at most"):
        _measure(tiny, text, lengths=(4096,))


def test_too_little_room_is_refused(tiny, text):
    with pytest.raises(UsageError, match="no needle in 16 tokens"):
        _measure(tiny, text, lengths=(16,))


@pytest.mark.parametrize(("right", "of", "chance"), [(5, 20, True), (8, 20, True), (12, 20, False)])
def test_chance_is_two_deviations_wide(right, of, chance):
    assert is_chance([True] * right + [False] * (of - right)) == chance
