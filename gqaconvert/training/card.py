"""The model card of a trained checkpoint: what was trained on what, and what it brought."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gqaconvert.surgery.card import UNTOUCHED, split_front_matter
from gqaconvert.units import format_count, format_duration

_WARNING = "Pooling alone changes what the model computes."


def trained_card(card: str, facts: Mapping[str, Any]) -> str:
    """Return the card of a checkpoint after training.

    Args:
        card: that of the checkpoint that was trained.
        facts: see `summary.facts_of_training`.
    """
    paragraphs = card.split("\n\n")
    # What the conversion says about an untrained model no longer holds.
    kept = [each for each in paragraphs if not each.startswith(_WARNING)]
    text = "\n\n".join(kept)
    section = "\n".join(_section(facts))
    _, body = split_front_matter(text)
    front = text[: len(text) - len(body)]
    head, divider, source_card = body.partition("## Card of the source model")
    head = head.replace(UNTOUCHED, "")
    return f"{front}{head.rstrip()}\n\n{section}\n\n{divider}{source_card}".rstrip() + "\n"


def _section(facts: Mapping[str, Any]) -> list[str]:
    losses = [
        ("source", facts.get("source_loss")),
        ("before training", facts.get("first_loss")),
        ("after training", facts.get("last_loss")),
    ]
    lines = [
        "## Uptraining",
        "",
        f"Trained after the conversion on {format_count(facts['tokens'])} tokens"
        f" ({facts['steps']} steps of {facts['batch_tokens']} tokens, {facts['objective']}),"
        f" in {format_duration(facts['seconds'])} on {facts['devices']}.",
        "",
        "| data | weight |",
        "|---|---|",
        *(f"| {path} | {weight:g} |" for path, weight in facts["data"]),
        "",
    ]
    if facts.get("held_out_text"):
        lines += [
            f"Loss on held-out text ({facts['held_out_text']}, nats a token,"
            f" {facts['held_out_tokens']} tokens):",
            "",
            "| " + " | ".join(name for name, value in losses if value is not None) + " |",
            "|" + "---|" * sum(value is not None for _, value in losses),
            "| " + " | ".join(f"{value:.3f}" for _, value in losses if value is not None) + " |",
            "",
        ]
    return lines
