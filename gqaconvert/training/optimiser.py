"""AdamW over the weights a recipe trains, with decay on matrices only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gqaconvert.settings.uptrain import UptrainSettings
from gqaconvert.training.trainable import trainable_names

_FUSED_DEVICES = frozenset({"cpu", "cuda"})


def parameter_groups(
    model: torch.nn.Module, weight_decay: float, names: set[str] | None = None
) -> list[dict[str, Any]]:
    """Divide parameters into those that decay and those that do not; empty groups are left out.

    Weights of projections decay, stacked experts and an output head of its own too. Biases, norms
    (also those with a gain for each head), and embeddings do not: rows of rare tokens get hardly
    any gradient and would shrink to nothing. A head tied to the embeddings is one of them.

    Args:
        model: whose parameters these are; each comes once, however often it is tied.
        weight_decay: of the first group.
        names: parameters to take; by default those that require a gradient.
    """
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    decaying, constant = [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad if names is None else name not in names:
            continue
        owner = name.rpartition(".")[0].lower()
        is_norm = "norm" in owner.rpartition(".")[2] or ".norms." in owner
        if parameter.ndim >= 2 and id(parameter) not in embeddings and not is_norm:
            decaying.append(parameter)
        else:
            constant.append(parameter)
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": constant, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimiser(model: torch.nn.Module, settings: UptrainSettings) -> torch.optim.AdamW:
    """Make AdamW over everything that trains in any stage.

    All of it is there from the start, so that checkpoints keep one shape; what a stage does not
    train has no gradient and is passed over, without decay. Nothing is kept for it until it first
    trains.

    Args:
        model: a transformers model, with its adapters when the recipe has any.
        settings: learning rate, betas, eps, decay and stages.
    """
    names = None if settings.lora else set(_trained_in_any_stage(model, settings))
    groups = parameter_groups(model, settings.weight_decay, names)
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    return torch.optim.AdamW(
        groups,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=0.0,
        fused=devices <= _FUSED_DEVICES,
    )


def _trained_in_any_stage(model: torch.nn.Module, settings: UptrainSettings) -> Iterator[str]:
    for kind in dict.fromkeys(stage.train for stage in settings.stages):
        yield from trainable_names(model, kind)
