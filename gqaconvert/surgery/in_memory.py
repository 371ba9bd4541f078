"""Converts a loaded transformers model, with the plan and arithmetic of the one on disk."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

from gqaconvert.attention.recognise import recognise
from gqaconvert.checkpoint.reader import Array
from gqaconvert.checkpoint.tensors import CheckpointIndex, StoredFile, StoredTensor
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.kv_cache.model_config import parse_config
from gqaconvert.surgery.layer_heads import LayerStatistics
from gqaconvert.surgery.layer_pooling import Calibration, make_layer
from gqaconvert.surgery.options import CALIBRATED, REPEAT, ConversionOptions
from gqaconvert.surgery.plan import ConversionPlan, PlannedTensor
from gqaconvert.surgery.planning import plan_conversion
from gqaconvert.surgery.pooling import changed_blocks
from gqaconvert.surgery.statistics import StatisticsFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ELEMENT_TAGS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def convert_model(
    model: PreTrainedModel,
    *,
    num_kv_heads: int,
    method: str | None = None,
    seed: int = 0,
    statistics: Mapping[int, LayerStatistics] | None = None,
    grouping: str = "adjacent",
    metric: str | None = None,
) -> PreTrainedModel:
    """Return a model of the same class with fewer (or repeated) KV heads.

    The result shares every untouched parameter with `model`, which itself is left as it is.

    Args:
        model: a loaded transformers model on one device.
        num_kv_heads: KV heads wanted; more than the model has means repeating them.
        method: "mean", "first" or "random", "procrustes" or "svd"; "svd" with `statistics`, else
            "mean".
        seed: for "random", which draws by tensor name: classes whose names differ on disk get other
            numbers there.
        statistics: layer number → second moments of its inputs, such as a `StatisticsFile`; whether
            they are of this model is not checked.
        grouping: which KV heads share, for "procrustes" and "svd": "adjacent" or "similarity".
        metric: as in `convert`.

    Raises:
        UnsupportedModelError: a model that cannot be converted, or one spread over devices by
            hooks.
        UsageError: heads that cannot be pooled or repeated into that many.
    """
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UnsupportedModelError(
            "the model is spread over several devices by hooks, which a new model would lack",
            remedy="convert the checkpoint folder, or load the model on one device",
        )
    state = model.state_dict()
    config = parse_config(model.config.to_dict(), f"{type(model).__name__}.config")
    index = memory_index(state)
    attention = recognise(index.tensors, config)
    if num_kv_heads == attention.num_kv_heads:
        return model
    if num_kv_heads > attention.num_kv_heads:
        method = REPEAT
    method = method or ("mean" if statistics is None else "svd")
    options = ConversionOptions(
        num_kv_heads,
        method,
        seed,
        grouping=grouping,
        metric=metric,
        statistics_digest=_digest(statistics) if method in CALIBRATED else None,
    )
    plan = plan_conversion(index, config, attention, options)
    return _rebuild(model, plan, state, Calibration(statistics))


def _digest(statistics: Mapping[int, LayerStatistics] | None) -> str | None:
    if isinstance(statistics, StatisticsFile):
        return statistics.digest
    return None if statistics is None else "memory"


def _rebuild(
    model: PreTrainedModel,
    plan: ConversionPlan,
    state: dict[str, torch.Tensor],
    calibration: Calibration,
) -> PreTrainedModel:
    converted = empty_converted(model, plan)
    whole = plan.whole
    changed = {t.output.name: t for t in plan.changed() if t.output.name not in whole}
    removed = {source.name for tensor in changed.values() for source in tensor.sources} | whole
    weights = {name: tensor for name, tensor in state.items() if name not in removed}
    weights |= {name: _changed(plan, tensor, state) for name, tensor in changed.items()}
    for layer in plan.layers:
        made = make_layer(plan, layer, lambda name: to_numpy(state[name]), calibration)
        for name, array in made.tensors.items():
            weights[name] = _to_torch(array, state[name].dtype).to(state[name].device)
    converted.load_state_dict(weights, assign=True, strict=True)
    # Buffers that are not saved, such as RoPE frequencies, do not depend on the number of KV heads.
    modules = dict(converted.named_modules())
    for name, buffer in model.named_buffers():
        if name not in state:
            path, _, leaf = name.rpartition(".")
            modules[path].register_buffer(leaf, buffer, persistent=False)
    converted.tie_weights()
    converted.generation_config = copy.deepcopy(model.generation_config)
    originals = dict(model.named_parameters())
    for name, parameter in converted.named_parameters():
        if name in originals:  # of a norm that is one module a head, expanding makes more
            parameter.requires_grad_(originals[name].requires_grad)
    converted.train(model.training)
    return converted


def empty_converted(model: PreTrainedModel, plan: ConversionPlan) -> PreTrainedModel:
    """Return a model as planned, without values: on the meta device."""
    config = copy.deepcopy(model.config)
    for edit in plan.config_edits:
        section: Any = config
        for key in edit.path[:-1]:
            section = section[key] if isinstance(section, dict) else getattr(section, key)
        if isinstance(section, dict):
            section[edit.path[-1]] = edit.after
        else:
            setattr(section, edit.path[-1], edit.after)
    with torch.device("meta"):
        return type(model)(config)


def _changed(
    plan: ConversionPlan, tensor: PlannedTensor, state: dict[str, torch.Tensor]
) -> torch.Tensor:
    arrays = [to_numpy(state[source.name]) for source in tensor.sources]
    blocks = changed_blocks(plan, tensor, lambda number, begin, end: arrays[number][begin:end])
    pooled = np.concatenate(list(blocks))
    like = state[tensor.sources[0].name]
    return _to_torch(pooled, like.dtype).to(like.device)


def memory_index(state: dict[str, torch.Tensor]) -> CheckpointIndex:
    """Return an index of tensors in memory, which may be without values.

    Raises:
        UnsupportedModelError: a type that no checkpoint holds.
    """
    tensors, position = {}, 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        tag = _ELEMENT_TAGS.get(tensor.dtype)
        if tag is None:
            raise UnsupportedModelError(
                f"element type {tensor.dtype} cannot be pooled",
                at=name,
                remedy="load the unquantised checkpoint",
            )
        tensors[name] = StoredTensor(
            name, tag, tuple(tensor.shape), "memory", position, position + size
        )
        position += size
    return CheckpointIndex(None, tensors, (StoredFile("memory", position, ""),), "safetensors")


def to_numpy(tensor: torch.Tensor) -> Array:
    """Return a tensor's content as an array of the same type."""
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return plain.numpy()


def _to_torch(array: Array, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))
