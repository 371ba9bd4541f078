"""Which weights train: everything, attention only, or K and V with the norms around them.

A recipe's stages name one of the three; a weight that does not train gets no gradient, and the
optimiser passes it over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from gqaconvert.attention.geometry import Attention, AttentionBlock
from gqaconvert.attention.specs import layout_for, naming
from gqaconvert.modelling.loaded_attention import recognise_model
from gqaconvert.settings.uptrain import StageSettings

Train = Literal["all", "attention", "kv"]

_NOT_BEFORE_ATTENTION = ("post", "feedforward", "feed_forward", "mlp", "ffn", "ff_norm")
"""Parts of names of norms in a decoder layer that stand elsewhere than before its attention."""


def trainable_names(model: torch.nn.Module, kind: Train) -> set[str]:
    """Return the names of the parameters that train, as `named_parameters` gives them.

    Towers beside the language model and draft layers never train: text alone gives them no
    gradient.

    Args:
        model: a transformers model, without wrappers or adapters.
        kind: "all"; "attention": whatever belongs to attention modules: q, k, v, o, their biases
            and norms; "kv": k and v (a fused projection as a whole), their biases and norms, and
            the norm before the attention block where the class has one.

    Raises:
        UnsupportedModelError: a kind other than "all" of a model whose attention is not recognised.
    """
    apart = naming().towers | naming().draft_layers
    names = {name for name, _ in model.named_parameters() if not apart & set(name.split("."))}
    if kind == "all":
        return names
    attention = recognise_model(model)
    if kind == "attention":
        modules = tuple(f"{block.module}." for block in attention.blocks)
        wanted = {name for name in _aliases(model) if name.startswith(modules)}
        wanted = {name for name in wanted if not naming().indexers & set(name.split("."))}
    else:
        wanted = set()
        for block in attention.blocks:
            wanted |= kv_names(model, attention, block) | set(_input_norm(model, block))
    parameters = {id(each) for name, each in _aliases(model).items() if name in wanted}
    return {name for name, each in model.named_parameters() if id(each) in parameters} & names


def set_trainable(model: torch.nn.Module, kind: Train) -> set[str]:
    """Let the parameters of a kind require gradients, and no others; return their names.

    Gradients left over on those that no longer train are dropped. A tied parameter trains when any
    of its names does.
    """
    names = trainable_names(model, kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names and parameter.is_floating_point())
        if name not in names:
            parameter.grad = None
    return names


def stage_at(
    stages: Sequence[StageSettings], step: int, total_steps: int
) -> tuple[int, StageSettings]:
    """Return the stage that a step belongs to, and its number.

    Args:
        stages: in order; their shares add up to 1.
        step: from 0.
        total_steps: of the budget. Steps past it belong to the last stage.
    """
    share = 0.0
    for number, stage in enumerate(stages[:-1]):
        share += stage.share
        if step < round(share * total_steps):
            return number, stage
    return len(stages) - 1, stages[-1]


def kv_names(model: torch.nn.Module, attention: Attention, block: AttentionBlock) -> set[str]:
    """Return the names of the weights, biases and norms of k and v in one attention block."""
    names = {tensor.name for tensor in block.head_tensors}
    names |= {name for names_of_heads in block.norm_modules for name in names_of_heads}
    # A norm with one gain for all heads does not change with their number, so no block lists it.
    norms = (*layout_for(attention.model_type).key_norm, "v_norm")
    prefixes = tuple(f"{block.module}.{norm}." for norm in norms)
    return names | {name for name in _aliases(model) if name.startswith(prefixes)}


def _aliases(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """All names of all parameters, also the further ones of tied parameters."""
    return dict(model.named_parameters(remove_duplicate=False))


def _input_norm(model: torch.nn.Module, block: AttentionBlock) -> Iterator[str]:
    """Names of the parameters of the norm that attention reads through, if there is one.

    It is the first norm beside the attention module, unless it says that it comes later, as those
    of classes that normalise what a block gives (OLMo 2).
    """
    parent_path, _, own = block.module.rpartition(".")
    parent: Any = model.get_submodule(parent_path)
    for name, child in parent.named_children():
        if name == own or any(part in name for part in _NOT_BEFORE_ATTENTION):
            continue
        parameters = dict(child.named_parameters())
        if "weight" in parameters and all(each.ndim == 1 for each in parameters.values()):
            yield from (f"{parent_path}.{name}.{leaf}" for leaf in parameters)
            return
