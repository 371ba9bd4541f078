"""Where the decoder layers of a loaded model are."""

from __future__ import annotations

from typing import Any

import torch

from gqaconvert.attention.specs import naming
from gqaconvert.errors import UnsupportedModelError


def find_layers(model: Any) -> tuple[str, list[torch.nn.Module]]:  # noqa: ANN401
    """Return the path of a model's list of decoder layers, and the layers.

    Raises:
        UnsupportedModelError: none, or more than one that could be it.
    """
    expected = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    found = [
        (path, list(module))
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and path.rpartition(".")[2] in naming().layer_lists
        and len(module) == expected
        and not set(path.split(".")) & set(naming().towers)
    ]
    decoder = model.get_decoder()
    if len(found) > 1 and decoder is not model:
        inside = {id(module) for module in decoder.modules()}
        found = [(path, layers) for path, layers in found if id(layers[0]) in inside]
    outer = [
        (path, layers)
        for path, layers in found
        if not any(path.startswith(f"{other}.") for other, _ in found)
    ]
    if len(outer) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(outer)} lists of {expected} decoder layers, not one"
        )
    return outer[0]
