"""The card of a trained checkpoint says what was trained, and nothing that holds no longer."""

import pytest

from gqaconvert.training.card import trained_card

CONVERTED = """---
tags: [gqaconvert]
---

# tiny with 2 KV heads

Made from `tiny`. Its heads were averaged. Every other weight is byte for byte the source's.

| | source | this checkpoint |
|---|---|---|
| KV cache a token | 4 KiB | 1 KiB |

Pooling alone changes what the model computes. Unless it was trained further, expect worse text.

## Card of the source model

Its own words: Every other weight is byte for byte the source's.
"""
FACTS = {
    "tokens": 327680, "steps": 40, "batch_tokens": 8192, "objective": "next-token loss",
    "seconds": 56.0, "devices": "one process, 2 CPU threads", "data": [["bundled", 1.0]],
    "held_out_text": "bundled", "held_out_tokens": 8184, "source_loss": 2.846,
    "first_loss": 3.063, "last_loss": 2.979,
}  # fmt: skip


@pytest.fixture(scope="module")
def card() -> str:
    return trained_card(CONVERTED, FACTS)


def test_what_held_before_training_is_gone(card):
    ours, _, source = card.partition("## Card of the source model")
    assert "byte for byte" not in ours
    assert "Pooling alone" not in ours
    assert "Its own words: Every other weight is byte for byte the source's." in source


def test_the_training_stands_before_the_card_of_the_source(card):
    ours = card.partition("## Card of the source model")[0]
    assert "328k tokens (40 steps of 8192 tokens, next-token loss), in 56 s on one process" in ours
    assert "| 2.846 | 3.063 | 2.979 |" in ours
    assert ours.startswith("---\ntags: [gqaconvert]\n---\n")
