"""Finds the decoder layers of a loaded model, and in each the attention that can be pooled.

Layers are found by the names of their lists, attention by `attention.recognise` on the parameters;
a class that cannot be pooled can still be walked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gqaconvert.attention.blocks import layer_number
from gqaconvert.attention.geometry import AttentionBlock
from gqaconvert.attention.recognise import recognise
from gqaconvert.checkpoint.tensors import StoredTensor
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.kv_cache.model_config import parse_config

_ELEMENT_TAGS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one decoder layer in memory.

    Attributes:
        block: what it looks like; names are those of parameters in memory.
        path: of its module, from the model.
        module: its module.
        projection: the module whose input is the attention's input: that of the keys, or the fused
            one.
        width: of that input, M.
    """

    block: AttentionBlock
    path: str
    module: torch.nn.Module
    projection: torch.nn.Module
    width: int


def text_body(model: Any) -> Any:  # noqa: ANN401
    """Return the module that turns token ids into hidden states, without the head."""
    return model.base_model


def find_attention(model: Any) -> dict[int, LayerAttention]:  # noqa: ANN401
    """Return the poolable attention of a model by number of layer.

    Raises:
        UnsupportedModelError: the class cannot be pooled, or has two attention blocks in a layer.
    """
    tensors = {
        name: StoredTensor(
            name, _ELEMENT_TAGS.get(tensor.dtype, "I64"), tuple(tensor.shape), "memory", 0, 0
        )
        for name, tensor in model.state_dict().items()
    }
    config = parse_config(model.config.to_dict(), f"{type(model).__name__}.config")
    found: dict[int, LayerAttention] = {}
    for place, block in enumerate(recognise(tensors, config).blocks):
        number = layer_number(block.module)
        number = place if number is None else number
        if number in found:
            raise UnsupportedModelError(
                "two attention blocks in one layer", at=f"{found[number].path} and {block.module}"
            )
        name = next(t.name for t in block.head_tensors if t.role in ("key", "fused"))
        found[number] = LayerAttention(
            block,
            block.module,
            model.get_submodule(block.module),
            model.get_submodule(name.rpartition(".")[0]),
            tensors[f"{name.rpartition('.')[0]}.weight"].shape[-1],
        )
    return found
