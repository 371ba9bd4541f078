"""A long-context probe that runs offline: is a key that was told far back still found?

A five-digit key is hidden in ordinary text at several depths; at the end the model is asked for it.
`exact` is whether every token of the key is the likeliest one, as greedy decoding would write it;
`choice` whether the right key beats three others where they first differ, which shows ability in
models too small to be exact, and is right one time in four by chance.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gqaconvert.corpus.text import Text
from gqaconvert.corpus.windows import Window, leading_tokens
from gqaconvert.errors import UsageError
from gqaconvert.evaluation.results import Measurement, library_versions
from gqaconvert.evaluation.scoring import Reader
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.modelling.models import LoadedModel

METRIC = "needle"
CHANCE = 0.25

_KEYS = round(1 / CHANCE)
_TOLD = "\n\nThe pass key is {key}. Remember it: the pass key is {key}.\n\n"
_ASKED = "\n\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class _Trial:
    """One question.

    Attributes:
        length: tokens of prompt and answer.
        depth: where the key was told, 0 for the beginning.
        window: the prompt, and the right key, which is scored.
        differ_at: place within the key where the candidates first differ.
        candidates: their tokens there, the right one first.
    """

    length: int
    depth: float
    window: Window
    differ_at: int
    candidates: list[int]


def measure_needle(
    loaded: LoadedModel,
    text: Text,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    repeats: int,
    settings: Mapping[str, Any],
    reader: Reader | None = None,
) -> Measurement:
    """Ask for a key at every length and depth.

    Args:
        loaded: the model.
        text: what the key is hidden in.
        lengths: tokens in all; those beyond what the model was made for are left out.
        depths: from 0, the beginning, to 1, just before the question.
        repeats: questions of each kind, with other keys and other text.
        settings: recorded as they are.
        reader: of the same model, to use it again.

    Raises:
        UsageError: no length is left, or the text is too short.
    """
    limit = read_config(loaded.folder).max_position_embeddings
    possible = [length for length in lengths if limit is None or length <= limit]
    if not possible:
        raise UsageError(f"the model reads {limit} tokens at most", at=f"needle lengths {lengths}")
    reader = reader or Reader(loaded)
    cells: dict[tuple[int, float], list[tuple[bool, bool]]] = {}
    for trial in _trials(loaded.tokenizer, text, possible, depths, repeats):
        cells.setdefault((trial.length, trial.depth), []).append(_ask(reader, trial))
    answers = [answer for cell in cells.values() for answer in cell]
    exact = [right for right, _ in answers]
    choice = [right for _, right in answers]
    return Measurement(
        metric=METRIC,
        value=_share(exact),
        stderr=_stderr(exact),
        n=len(answers),
        unit="",
        settings=dict(settings),
        versions=library_versions(),
        weights_sha256=loaded.weights_sha256,
        detail={
            "choice_accuracy": _share(choice),
            "choice_stderr": _stderr(choice),
            "choice_chance": CHANCE,
            "at_chance": is_chance(choice) and not any(exact),
            "cells": [
                {
                    "length": length,
                    "depth": depth,
                    "n": len(cell),
                    "exact": _share([right for right, _ in cell]),
                    "choice": _share([right for _, right in cell]),
                }
                for (length, depth), cell in cells.items()
            ],
            "lengths_left_out": [length for length in lengths if length not in possible],
        },
    )


def is_chance(answers: Sequence[bool]) -> bool:
    """Whether so many right choices are no more than guessing gives: within two deviations."""
    deviation = math.sqrt(CHANCE * (1 - CHANCE) / len(answers))
    return _share(answers) <= CHANCE + 2 * deviation


def _ask(reader: Reader, trial: _Trial) -> tuple[bool, bool]:
    logits = torch.cat(list(reader.read([trial.window])))
    key = trial.window.token_ids[trial.window.first_scored :]
    exact = logits.argmax(-1).tolist() == key
    choice = int(logits[trial.differ_at, trial.candidates].argmax()) == 0
    return exact, choice


def _trials(
    tokenizer: Any,  # noqa: ANN401
    text: Text,
    lengths: Sequence[int],
    depths: Sequence[float],
    repeats: int,
) -> Iterator[_Trial]:
    def tokenise(piece: str) -> list[int]:
        return list(tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"])

    hay, asked, leading = tokenise(text.text), tokenise(_ASKED), leading_tokens(tokenizer)
    chooser = random.Random(0)
    for length in lengths:
        for depth in depths:
            for _ in range(repeats):
                keys, at = _keys(chooser, tokenise)
                told, key = tokenise(_TOLD.format(key=keys[0])), tokenise(f" {keys[0]}")
                room = length - len(leading) - len(told) - len(asked) - len(key)
                if room < 0 or room > len(hay):
                    raise UsageError(
                        f"no needle in {length} tokens of a text of {len(hay)}",
                        remedy="lengths between 64 tokens and those of the text",
                    )
                begin = chooser.randrange(len(hay) - room + 1)
                before = round(depth * room)
                prompt = [
                    *leading,
                    *hay[begin : begin + before],
                    *told,
                    *hay[begin + before : begin + room],
                    *asked,
                ]
                window = Window([*prompt, *key], len(prompt), len(keys[0]) + 1)
                candidates = [tokenise(f" {each}")[at] for each in keys]
                yield _Trial(length, depth, window, at, candidates)


def _keys(chooser: random.Random, tokenise: Any) -> tuple[list[str], int]:  # noqa: ANN401
    """Draw keys whose tokens are equal up to one place and all different there."""
    while True:
        leads = chooser.sample("123456789", _KEYS)
        keys = [f"{lead}{chooser.randrange(10_000):04}" for lead in leads]
        tokens = [tokenise(f" {key}") for key in keys]
        for at, alike in enumerate(zip(*tokens, strict=False)):
            if len(set(alike)) == _KEYS:
                return keys, at
            if len(set(alike)) > 1:
                break


def _share(answers: Sequence[bool]) -> float:
    return sum(answers) / len(answers)


def _stderr(answers: Sequence[bool]) -> float:
    share = _share(answers)
    return math.sqrt(share * (1 - share) / len(answers))
