"""The ruler: memory, concurrency and speed of a model before anyone downloads it.

Pure: from a config, what is known of the weights, and a `Question`, to rows. All bytes of a row are
those on one GPU, which are all there are unless a tensor-parallel degree is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from gqaconvert.errors import CheckpointError, UsageError
from gqaconvert.kv_cache.config_faults import config_faults
from gqaconvert.kv_cache.element_types import STORAGE_TYPES
from gqaconvert.kv_cache.estimate_notes import estimate_notes
from gqaconvert.kv_cache.estimate_rows import Row, estimate_row
from gqaconvert.kv_cache.model_config import ModelConfig
from gqaconvert.kv_cache.question import Question
from gqaconvert.kv_cache.weights import StoredWeights, Weights, weights_of

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Estimate:
    """The answer.

    Attributes:
        config: the model.
        question: with what was left open filled in.
        weights: what is known of them.
        rows: one for each combination.
        notes: what to know about the figures.
        faults: what cannot be right about the config, or contradicts the tensors beside it.
    """

    config: ModelConfig
    question: Question
    weights: Weights
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    faults: tuple[str, ...]

    def with_note(self, note: str) -> Estimate:
        """Return the answer with one more note, in front."""
        return replace(self, notes=(note, *self.notes))

    def to_json(self) -> list[dict[str, Any]]:
        """Return the rows as plain values, each with where its weights come from, and the notes."""
        beside = {
            "weights_from": self.weights.origin,
            "parameters": self.weights.parameters,
            "notes": list(self.notes),
            "faults": list(self.faults),
        }
        return [{**asdict(row), **beside} for row in self.rows]


def estimate_config(
    config: ModelConfig,
    question: Question,
    *,
    stored: StoredWeights | None = None,
    weights_bytes: int | None = None,
    faults: tuple[str, ...] = (),
) -> Estimate:
    """Answer a question about a config.

    Args:
        config: the model.
        question: what to work out.
        stored: what headers beside the config say.
        weights_bytes: of the model as it is, as the user says; wins over `stored`.
        faults: found elsewhere, to be told with those found here.

    Raises:
        UsageError: KV heads or GPUs that the model cannot be split into.
        UnsupportedModelError: its cache does not follow from its config.
        CheckpointError: counts of which nothing can be made.
    """
    faults = (*config_faults(config), *faults)
    if config.num_layers < 1 or config.head_dim < 0 or config.num_kv_heads < 0:
        raise CheckpointError("; ".join(faults), at=config.at, remedy=_RESTORE)
    if config.num_heads and (config.num_kv_heads < 1 or config.head_dim < 1):
        raise CheckpointError("; ".join(faults), at=config.at, remedy=_RESTORE)
    weights = weights_of(config, stored, weights_bytes)
    question = _filled_in(config, question, weights)
    rows = tuple(_rows(config, question, weights))
    notes = estimate_notes(config, question, weights)
    return Estimate(config, question, weights, rows, notes, faults)


_RESTORE = "restore the config.json that the model was published with"


def _filled_in(config: ModelConfig, question: Question, weights: Weights) -> Question:
    contexts = question.contexts
    made_for = config.max_position_embeddings or config.get("max_target_positions")
    if not contexts:
        longer = () if made_for is None or made_for <= DEFAULT_CONTEXT else (min(made_for, 2**17),)
        contexts = (min(made_for or DEFAULT_CONTEXT, DEFAULT_CONTEXT), *longer)
    now = config.num_kv_heads
    kv_heads = question.kv_heads
    if config.kv_lora_rank or not config.num_heads:
        if kv_heads:
            kind = "one latent for all heads" if config.kv_lora_rank else "no keys and values"
            raise UsageError(
                f"{config.model_type} caches {kind}; the number of KV heads does not change it",
                at=config.at,
                remedy="leave --kv-heads out",
            )
        kv_heads = (now,)
    elif not kv_heads:
        fewer = [n for n in (8, 1) if n < now and _is_possible(config, n)]
        kv_heads = (now, *(fewer if config.declares_kv_heads else ()))
        if config.kv_heads_key == ("multi_query",):
            kv_heads = (now,) if now == 1 else (now, 1)
    for count in kv_heads:
        if config.num_heads and not config.kv_lora_rank and not _is_possible(config, count):
            legal = [n for n in range(config.num_heads, 0, -1) if _is_possible(config, n)]
            raise UsageError(
                f"{config.num_heads} query heads cannot share {count} KV heads evenly",
                at=config.at,
                remedy="--kv-heads " + ", ".join(map(str, legal)),
            )
    own = weights.stored_as if weights.stored_as.bits >= 16 else STORAGE_TYPES["fp16"]
    return replace(
        question,
        contexts=contexts,
        kv_heads=kv_heads,
        kv_types=question.kv_types or (own,),
        source_tokens=question.source_tokens or config.get("max_source_positions"),
    )


def _is_possible(config: ModelConfig, kv_heads: int) -> bool:
    now = config.num_kv_heads
    if kv_heads < 1:
        return False
    if kv_heads == now:  # as the config says, however odd; faults are told apart
        return True
    return config.num_heads % kv_heads == 0 and all(
        layer.num_kv_heads * kv_heads % now == 0 for layer in config.layers
    )


def _rows(config: ModelConfig, question: Question, weights: Weights) -> Iterator[Row]:
    combinations = product(
        question.kv_heads, question.degrees, question.kv_types, question.contexts, question.batches
    )
    for kv_heads, gpus, kind, context, batch in combinations:
        yield estimate_row(config, question, weights, kv_heads, gpus, kind, context, batch)
