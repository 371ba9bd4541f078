"""Recognises the attention of a model in memory, as `attention.recognise` does of one on disk."""

from __future__ import annotations

from typing import Any

from gqaconvert.attention.geometry import Attention
from gqaconvert.attention.recognise import recognise
from gqaconvert.checkpoint.tensors import StoredTensor
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.kv_cache.model_config import parse_config
from gqaconvert.units import ELEMENT_TYPES

_TAGS = {kind.config_name: tag for tag, kind in ELEMENT_TYPES.items()}


def recognise_model(model: Any) -> Attention:  # noqa: ANN401
    """Understand the attention of a loaded transformers model; names are those of its state.

    Args:
        model: as its class builds it, without wrappers or adapters.

    Raises:
        UnsupportedModelError: its attention is of no known layout.
        CheckpointError: tensors and config contradict each other.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        tag = _TAGS.get(str(tensor.dtype).removeprefix("torch."))
        if tag is None:
            raise UnsupportedModelError(
                f"element type {tensor.dtype} is not one that weights are kept in",
                at=name,
                remedy="load the unquantised checkpoint",
            )
        tensors[name] = StoredTensor(name, tag, tuple(tensor.shape), "memory", 0, 0)
    return recognise(
        tensors, parse_config(model.config.to_dict(), f"{type(model).__name__}.config")
    )
