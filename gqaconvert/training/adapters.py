"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft: put in before training, merged after.

They are put into the model in place, which keeps its class, so that everything else works on it as
on a model without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gqaconvert.attention.specs import naming
from gqaconvert.errors import UsageError
from gqaconvert.modelling.loaded_attention import recognise_model
from gqaconvert.settings.uptrain import LoraSettings
from gqaconvert.training.trainable import kv_names

if TYPE_CHECKING:
    from types import ModuleType


def add_adapters(model: Any, settings: LoraSettings, seed: int = 0) -> set[str]:  # noqa: ANN401
    """Put adapters into linear layers, freeze all else, and return what trains.

    With `train_kv`, k and v carry no adapters: their own weights and biases train (a fused
    projection as a whole), so that merging leaves them as they are. A new adapter changes nothing:
    its second factor starts at 0. The output head gets none.

    Args:
        model: a transformers model; changed in place.
        settings: rank, scale, dropout and targets.
        seed: of the first factors, the same on every process.

    Raises:
        UsageError: peft is not installed, or no linear layer is there to adapt.
        UnsupportedModelError: its attention is not recognised.
    """
    peft = _peft()
    attention = recognise_model(model)
    whole: set[str] = set()
    if settings.train_kv:
        for block in attention.blocks:
            whole |= kv_names(model, attention, block)
    targets = _targets(model, settings, {block.module for block in attention.blocks}, whole)
    if not targets:
        raise UsageError(
            f"no linear layers in {type(model).__name__} that adapters could be put on",
            at="uptrain.lora",
            remedy="lora.target: all, or leave lora out",
        )
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if name in whole:
            parameter.requires_grad_(True)
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def merge_adapters(model: Any) -> Any:  # noqa: ANN401
    """Add what the adapters learnt to the weights beneath them, and take them out.

    Returns:
        The same model, of its plain class and parameter names.

    Raises:
        GqaconvertError: through peft's check, when a merged weight is not finite.
    """
    _peft()
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, BaseTunerLayer)
    ]
    for path, module in adapted:
        try:
            module.merge(safe_merge=True)
        except ValueError as error:
            raise UsageError(
                f"an adapter cannot be merged: {error}",
                at=path,
                remedy="export an earlier checkpoint",
            ) from error
        parent_path, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent_path), leaf, module.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    return model


def _targets(
    model: Any,  # noqa: ANN401
    settings: LoraSettings,
    attention_modules: set[str],
    whole: set[str],
) -> list[str]:
    apart = naming().towers | naming().draft_layers | naming().indexers
    head = model.get_output_embeddings()
    prefixes = tuple(f"{module}." for module in attention_modules)
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not head
        and not apart & set(path.split("."))
        and f"{path}.weight" not in whole
        and (settings.target == "all" or path.startswith(prefixes))
    ]


def _peft() -> ModuleType:
    try:
        import peft
    except ImportError as error:
        raise UsageError(
            "adapters need peft, which is not installed",
            at="uptrain.lora",
            remedy="pip install gqaconvert[peft]",
        ) from error
    module: ModuleType = peft  # untyped where it is not installed
    return module
