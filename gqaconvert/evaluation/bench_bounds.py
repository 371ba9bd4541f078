"""What a decoding step has to read of a model, and where its cache outgrows its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from gqaconvert.attention.geometry import attention_kind
from gqaconvert.errors import UnsupportedModelError, UsageError
from gqaconvert.kv_cache.element_types import storage_type
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.kv_cache.sizes import cache_bytes, cached_layers
from gqaconvert.kv_cache.weights import StoredWeights, weights_of
from gqaconvert.modelling.models import LoadedModel


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model of a run.

    Attributes:
        name: by which rows call it; unlike those of the other models.
        num_heads, num_kv_heads, attention: geometry.
        parameters: elements on disk.
        weights_bytes: of all parameters in memory, a tied head counted once.
        read_bytes: of these, what a decoding step reads: active experts alone, and no input
            embedding that is not the head as well, as only a row of it is looked up.
        dtype, attn, weights_sha256: as loaded.
    """

    name: str
    num_heads: int
    num_kv_heads: int
    attention: str
    parameters: int
    weights_bytes: int
    read_bytes: int
    dtype: str
    attn: str
    weights_sha256: str


def model_facts(loaded: LoadedModel, name: str | None = None) -> ModelFacts:
    """Find out what a loaded model holds and reads.

    Args:
        loaded: the model.
        name: to call it by, where its own is taken.
    """
    config = read_config(loaded.folder)
    parameters = list(loaded.model.parameters())  # torch lists a tied parameter once
    weights_bytes = sum(each.numel() * each.element_size() for each in parameters)
    stored = weights_of(config, StoredWeights(loaded.parameters, loaded.disk_bytes))
    share = stored.active_share(config.num_kv_heads)
    embedding = loaded.model.get_input_embeddings().weight
    head = loaded.model.get_output_embeddings()
    looked_up = 0
    if head is None or head.weight is not embedding:
        looked_up = embedding.numel() * embedding.element_size()
    return ModelFacts(
        name=name or loaded.name,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        attention=attention_kind(config.num_heads, config.num_kv_heads),
        parameters=loaded.parameters,
        weights_bytes=weights_bytes,
        read_bytes=round(weights_bytes * (1.0 if share is None else share)) - looked_up,
        dtype=loaded.dtype,
        attn=loaded.attn,
        weights_sha256=loaded.weights_sha256,
    )


def knee_tokens(points: Sequence[tuple[int, int]], weights_bytes: int) -> int | None:
    """Return the context at which the cache takes as many bytes as the weights that a step reads.

    There reading the cache takes as long as reading the weights; from there on it is the cache
    that decides how long a token takes.

    Args:
        points: context and measured bytes of the cache; between them and beyond the last the cache
            is taken to grow evenly, and to be empty at no context.
        weights_bytes: what a step reads of the weights.

    Returns:
        None when the cache does not grow to that size, as with a window.
    """
    line = [(0, 0), *sorted(points)]
    for (before, less), (after, more) in pairwise(line):
        if less <= weights_bytes <= more and more > less:
            return round(before + (after - before) * (weights_bytes - less) / (more - less))
    (before, less), (after, more) = line[-2:]
    if more <= less or weights_bytes < more:
        return None
    return round(after + (after - before) * (weights_bytes - more) / (more - less))


def ordinary_cache_bytes(loaded: LoadedModel, context: int, batch: int) -> int | None:
    """Return the bytes of an ordinary cache by the ruler, None where it has no formula."""
    try:
        layers = cached_layers(read_config(loaded.folder), as_transformers=True)
        kind = storage_type(loaded.dtype)
    except (UnsupportedModelError, UsageError):
        return None
    return cache_bytes(layers, context, kind, batch=batch, between_steps=True)
