"""Bytes of the KV cache, by the formula and measured on the tensors of a running model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gqaconvert.errors import UnsupportedModelError
from gqaconvert.evaluation.cache_bytes import cache_bytes as measured_bytes
from gqaconvert.evaluation.results import Measurement, library_versions
from gqaconvert.kv_cache.element_types import storage_type
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.kv_cache.sizes import cache_bytes, cached_layers, token_bytes
from gqaconvert.modelling.models import LoadedModel

METRIC = "kv_cache"


def measure_kv_bytes(
    loaded: LoadedModel, contexts: Sequence[int], *, settings: Mapping[str, Any]
) -> Measurement:
    """Fill a cache to several lengths and compare with the formula.

    Args:
        loaded: the model.
        contexts: tokens; lengths beyond what the model was made for are left out.
        settings: recorded as they are.

    Raises:
        UnsupportedModelError: bytes do not follow from the config, or the class gives no cache.
    """
    config = read_config(loaded.folder)
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            "the cache of an encoder-decoder depends on what the encoder read, too",
            at=str(loaded.folder),
            remedy="gqaconvert estimate --source-tokens",
        )
    element = storage_type(loaded.dtype)
    layers = cached_layers(config)
    as_cached = cached_layers(config, as_transformers=True)
    limit = config.max_position_embeddings
    rows = []
    for tokens in contexts:
        if limit is not None and tokens > limit:
            continue
        rows.append(
            {
                "tokens": tokens,
                "formula_bytes": cache_bytes(as_cached, tokens, element),
                "measured_bytes": measured_bytes(_fill_cache(loaded, tokens), states=False),
            }
        )
    return Measurement(
        metric=METRIC,
        value=token_bytes(layers, element),
        stderr=None,
        n=len(rows),
        unit="bytes a token",
        settings=dict(settings),
        versions=library_versions(),
        weights_sha256=loaded.weights_sha256,
        detail={
            "contexts": rows,
            "measured_bytes_per_token": (
                rows[-1]["measured_bytes"] / rows[-1]["tokens"] if rows else None
            ),
            "element": element.name,
            "parameters": loaded.parameters,
            "disk_bytes": loaded.disk_bytes,
        },
    )


def _fill_cache(loaded: LoadedModel, tokens: int) -> Any:  # noqa: ANN401
    """Read all tokens but one at once and then that one.

    After a long read a sliding layer holds a view of a longer tensor, after a step its window.
    """
    vocabulary = int(loaded.model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, tokens), generator=generator).to(loaded.device)
    options: dict[str, Any] = {}
    with torch.inference_mode():
        for part in (ids[:, :-1], ids[:, -1:]):
            if part.shape[1]:
                output = loaded.model.base_model(
                    input_ids=part, use_cache=True, return_dict=True, **options
                )
                options = {"cache": getattr(output, "cache", None)}
    if options["cache"] is None:
        raise UnsupportedModelError(
            f"{type(loaded.model).__name__} keeps its state elsewhere than in a cache",
            at=str(loaded.folder),
        )
    return options["cache"]
