"""Perplexity equals a plain loop, whatever the batch, the chunks and the class of the model."""

from __future__ import annotations

import math
import random
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from zoo import MHA_ONLY, ZOO, build, text_model

from gqaconvert.corpus.text import load_text
from gqaconvert.corpus.windows import Window, strided_windows
from gqaconvert.errors import GqaconvertError, UnsupportedModelError
from gqaconvert.evaluation.perplexity import measure_perplexity
from gqaconvert.evaluation.scoring import CHUNK_TOKENS, Reader, score
from gqaconvert.modelling.models import LoadedModel, load_model

ENCODER_DECODERS = {"t5", "bart", "whisper"}


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny", dtype="float32")


@pytest.fixture(scope="module")
def text():
    return load_text("bundled")


def _losses(model, window):
    """The plain loop that everybody writes."""
    token_ids = torch.tensor([window.token_ids])
    with torch.no_grad():
        logits = model(input_ids=token_ids, use_cache=False).logits[0, :-1].float()
    nll = -logits.log_softmax(-1).gather(-1, token_ids[0, 1:, None])[:, 0]
    return nll[window.first_scored - 1 :]


@pytest.mark.parametrize("stride", [128, 48])
def test_equal_to_a_plain_loop(tiny, text, stride):
    windows = strided_windows(tiny.tokenizer, text, length=128, stride=stride, limit=6)
    expected = torch.cat([_losses(tiny.model, window) for window in windows]).double()
    found = measure_perplexity(tiny, windows, settings={"a": 1})
    assert found.value == pytest.approx(math.exp(expected.mean()), rel=1e-5)
    assert found.detail["tokens"] == len(expected)
    bits = float(expected.sum()) / math.log(2) / sum(window.num_bytes for window in windows)
    assert found.detail["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert (found.metric, found.n, found.settings) == ("perplexity", 6, {"a": 1})
    assert found.weights_sha256 == tiny.weights_sha256
    assert 10 < found.value < 60  # what the bundled model is known for


@pytest.mark.parametrize("batch_size", [2, 5, 16])
def test_independent_of_batch_size(tiny, text, batch_size):
    windows = strided_windows(tiny.tokenizer, text, length=96, stride=80, limit=9)
    alone = measure_perplexity(tiny, windows, settings={})
    together = measure_perplexity(tiny, windows, settings={}, batch_size=batch_size)
    assert together.value == pytest.approx(alone.value, rel=1e-4)
    assert together.stderr == pytest.approx(alone.stderr, rel=1e-3)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary(text):
    blank = load_model("tiny", dtype="float32")
    with torch.no_grad():
        blank.model.get_output_embeddings().weight.zero_()
    windows = strided_windows(blank.tokenizer, text, length=64, limit=2)
    found = measure_perplexity(blank, windows, settings={})
    assert found.value == pytest.approx(2048)
    assert found.stderr == pytest.approx(0, abs=1e-3)


def test_positions_cover_all_tokens_and_context_helps(tiny, text):
    windows = strided_windows(tiny.tokenizer, text, length=200, limit=8)
    positions = measure_perplexity(tiny, windows, settings={}).detail["by_position"]
    assert [each["first"] for each in positions] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert positions[-1]["last"] == 199
    assert sum(each["tokens"] for each in positions) == 8 * 199
    assert positions[0]["perplexity"] > 2 * positions[-1]["perplexity"]


def test_logits_are_held_for_one_chunk_at_a_time(tiny, text):
    windows = strided_windows(tiny.tokenizer, text, length=700, limit=4)
    held, most, rows = [], 0, []

    def watch(_module, _inputs, output):
        nonlocal most
        rows.append(output.shape[:-1].numel())
        held.append(weakref.ref(output))
        most = max(most, sum(each() is not None for each in held))

    reader = Reader(tiny)
    hook = tiny.model.get_output_embeddings().register_forward_hook(watch)
    try:
        measure_perplexity(tiny, windows, settings={}, batch_size=2, reader=reader)
    finally:
        hook.remove()
    assert reader.in_chunks
    assert max(rows) <= CHUNK_TOKENS["cpu"]
    assert sum(rows) == 4 * 699
    assert most <= 2  # the one being made, and the one before it


def test_memory_does_not_grow_with_the_number_of_windows(tiny, text):
    process = psutil.Process()

    def peak(count):
        windows = strided_windows(tiny.tokenizer, text, length=256, limit=count)
        assert len(windows) == count
        seen = []
        measure_perplexity(
            tiny, windows, settings={}, progress=lambda *_: seen.append(process.memory_info().rss)
        )
        return max(seen)

    peak(4)  # what is allocated once
    few, many = peak(4), peak(60)
    # The logits of 60 windows would take 125 MB, hidden states of all 16 MB.
    assert many - few < 12e6


def test_a_class_whose_head_looks_at_more_is_read_with_all_logits(text):
    odd = load_model("tiny", dtype="float32")
    forward = odd.model.forward

    def with_input(input_ids, **options):
        output = forward(input_ids=input_ids, **options)
        output.logits = output.logits.scatter_add(
            -1, input_ids[..., None], torch.full((*input_ids.shape, 1), -5.0)
        )
        return output

    odd.model.forward = with_input
    windows = strided_windows(odd.tokenizer, text, length=300, limit=2)
    assert not Reader(odd).in_chunks
    expected = torch.cat([_losses(odd.model, window) for window in windows])
    found = torch.cat([each.nll for each in score(odd, windows, batch_size=2)])
    assert torch.allclose(found, expected, atol=1e-4)


def test_nan_is_no_perplexity(text):
    broken = load_model("tiny", dtype="float32")
    with torch.no_grad():
        broken.model.model.norm.weight[0] = float("nan")
    windows = strided_windows(broken.tokenizer, text, length=64, limit=2)
    with pytest.raises(GqaconvertError, match="not numbers"):
        measure_perplexity(broken, windows, settings={})


@pytest.mark.parametrize("name", [*ZOO, *MHA_ONLY])
def test_every_class_is_scored_as_by_its_own_logits(name):
    model = text_model(build(name))
    loaded = LoadedModel(name, Path(name), model, None, "float32", "cpu", "eager", "", 0, 0)
    if name in ENCODER_DECODERS:
        with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
            Reader(loaded)
        return
    reader = Reader(loaded, chunk_tokens=5)
    assert reader.in_chunks
    chooser = random.Random(0)
    windows = [
        Window([chooser.randrange(7, 90) for _ in range(length)], first, 1)
        for length, first in ((11, 1), (11, 1), (11, 1), (9, 4))
    ]
    for found in score(loaded, windows, batch_size=2, reader=reader):
        expected = _losses(model, found.window)
        assert torch.allclose(found.nll, expected, atol=1e-4)
