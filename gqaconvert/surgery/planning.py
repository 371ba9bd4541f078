"""Makes the plan of a conversion from headers, config and options; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gqaconvert.attention.blocks import fused_layout_after
from gqaconvert.attention.freedom import block_freedom
from gqaconvert.attention.geometry import Attention, AttentionBlock, HeadTensor
from gqaconvert.attention.layouts import block_rows, head_order, pooled_sources
from gqaconvert.checkpoint.shards import Shard, lay_out, shard_names, split_by_size
from gqaconvert.checkpoint.tensors import CheckpointIndex, StoredTensor
from gqaconvert.kv_cache.model_config import ModelConfig
from gqaconvert.surgery.head_counts import check_count, check_tensor_parallel
from gqaconvert.surgery.layer_tensors import tensor_names
from gqaconvert.surgery.options import ConversionOptions
from gqaconvert.surgery.plan import (
    Action,
    ConfigEdit,
    ConversionPlan,
    HeadChange,
    LayerPlan,
    PlannedTensor,
    digest_of,
)
from gqaconvert.units import ELEMENT_TYPES


def plan_conversion(
    index: CheckpointIndex, config: ModelConfig, attention: Attention, options: ConversionOptions
) -> ConversionPlan:
    """Plan a change of the number of KV heads.

    Args:
        index: the source's headers.
        config: its config.
        attention: what `recognise` made of both.
        options: what is wanted; more KV heads than the source has means repeating them.

    Raises:
        UsageError: a count that the heads cannot be pooled or repeated into, or that the degree of
            tensor parallelism does not divide.
    """
    check_count(attention, config, options.num_kv_heads)
    check_tensor_parallel(attention, options)
    aliases = _aliases(index, config)
    layers, averaged = _layers(index, config, attention, options)
    unplaced = [
        tensor
        for tensor in _planned(index, attention, options, layers)
        if tensor.output.name not in aliases
    ]
    shards = _shards(index, [tensor.output for tensor in unplaced], options)
    placed = {tensor.name: tensor for shard in shards for tensor in shard.tensors}
    by_name = {tensor.output.name: tensor for tensor in unplaced}
    return ConversionPlan(
        options=options,
        attention=attention,
        config=config,
        source_fingerprint=index.fingerprint(),
        source_config_sha256=digest_of(config.raw),
        tensors=tuple(replace(by_name[name], output=output) for name, output in placed.items()),
        shards=tuple(shards),
        config_edits=tuple(_config_edits(config, attention, options)),
        initializer_range=float(config.get("initializer_range") or 0.02),
        dropped=aliases,
        derived=index.derived,
        layers=layers,
        averaged=averaged,
    )


def _layers(
    index: CheckpointIndex, config: ModelConfig, attention: Attention, options: ConversionOptions
) -> tuple[tuple[LayerPlan, ...], dict[str, str]]:
    """Blocks that a calibrated method pools as a whole, and why the others are averaged."""
    layers: list[LayerPlan] = []
    averaged: dict[str, str] = {}
    if not options.is_calibrated:
        return (), averaged
    for block in attention.blocks:
        freedom = block_freedom(block, attention, config, index.tensors)
        if not freedom.is_calibratable:
            averaged[block.module] = freedom.reason
            continue
        outputs = tensor_names(block, index.tensors)
        moves = options.grouping == "similarity" and freedom.heads_fixed is None
        if moves:
            outputs += [t.name for t in block.head_tensors if t.role == "key_norm"]
            outputs += freedom.companions
        layers.append(
            LayerPlan(block, freedom, "similarity" if moves else "adjacent", tuple(outputs))
        )
    layers.sort(key=lambda layer: layer.block.layer or 0)
    return tuple(layers), averaged


def _aliases(index: CheckpointIndex, config: ModelConfig) -> dict[str, str]:
    """Tied tensors of a .bin source that share another's bytes; safetensors stores them once."""
    if not config.tie_word_embeddings:
        return {}
    kept: dict[tuple[str, int, int, tuple[int, ...]], str] = {}
    dropped = {}
    # Heads last: of a tied pair the embedding keeps its bytes, as in transformers' own files.
    for name, tensor in sorted(index.tensors.items(), key=lambda item: "head" in item[0]):
        if name in index.derived:
            continue
        place = (tensor.file, tensor.begin, tensor.end, tensor.shape)
        if tensor.end > tensor.begin and place in kept:
            dropped[name] = f"tied to {kept[place]}"
        else:
            kept[place] = name
    return dropped


def _planned(
    index: CheckpointIndex,
    attention: Attention,
    options: ConversionOptions,
    layers: Iterable[LayerPlan],
) -> Iterator[PlannedTensor]:
    folded = {name for layer in layers for name in layer.outputs}
    changes = {
        head.name: (block, head) for block in attention.blocks for head in block.head_tensors
    }
    modules = {
        names[0]: (block, names) for block in attention.blocks for names in block.norm_modules
    }
    replaced = {name for _, names in modules.values() for name in names}
    for name, tensor in index.tensors.items():
        if name in changes:
            yield _changed(tensor, *changes[name], attention, options)
        elif name in modules:
            block, names = modules[name]
            yield from _changed_modules([index.tensors[n] for n in names], block, options)
        elif name in folded:
            output = replace(tensor, dtype=_dtype(tensor, options), strides=None)
            yield PlannedTensor(output, "fold", (tensor,))
        elif name not in replaced:
            yield _untouched(tensor, options, derived=name in index.derived)


def _changed(
    tensor: StoredTensor,
    block: AttentionBlock,
    head: HeadTensor,
    attention: Attention,
    options: ConversionOptions,
) -> PlannedTensor:
    wanted = options.num_kv_heads
    after = head.layout
    if head.role == "fused":
        after = fused_layout_after(attention, head.layout, wanted)
    change = HeadChange(head.role, head.layout, after, block.num_heads, block.num_kv_heads, wanted)
    rows = block_rows(head.layout, tensor.shape[0], block.num_heads, block.num_kv_heads)
    blocks = len(head_order(after, block.num_heads, wanted))
    output = replace(
        tensor, dtype=_dtype(tensor, options), shape=(rows * blocks, *tensor.shape[1:])
    )
    return PlannedTensor(output, _head_action(block, options), (tensor,), change)


def _changed_modules(
    tensors: list[StoredTensor], block: AttentionBlock, options: ConversionOptions
) -> Iterator[PlannedTensor]:
    wanted = options.num_kv_heads
    prefix, _, parameter = tensors[0].name.rpartition(".norms.0.")
    for number in range(wanted):
        chosen = pooled_sources(block.num_kv_heads, wanted, number)
        output = replace(
            tensors[0],
            name=f"{prefix}.norms.{number}.{parameter}",
            dtype=_dtype(tensors[0], options),
        )
        change = HeadChange("key_norm", "k", "k", len(chosen), len(chosen), 1)
        yield PlannedTensor(
            output, _head_action(block, options), tuple(tensors[n] for n in chosen), change
        )


def _untouched(tensor: StoredTensor, options: ConversionOptions, *, derived: bool) -> PlannedTensor:
    dtype = _dtype(tensor, options)
    if derived:
        return PlannedTensor(replace(tensor, dtype=dtype), "derive", (tensor,))
    if dtype != tensor.dtype or tensor.strides is not None:
        return PlannedTensor(replace(tensor, dtype=dtype, strides=None), "cast", (tensor,))
    return PlannedTensor(tensor, "copy", (tensor,))


def _head_action(block: AttentionBlock, options: ConversionOptions) -> Action:
    return "pool" if options.num_kv_heads < block.num_kv_heads else "repeat"


def _dtype(tensor: StoredTensor, options: ConversionOptions) -> str:
    if options.dtype and ELEMENT_TYPES[tensor.dtype].is_weight:
        return options.dtype
    return tensor.dtype


def _shards(
    index: CheckpointIndex, outputs: list[StoredTensor], options: ConversionOptions
) -> list[Shard]:
    if options.max_shard_bytes is None:
        names = {file.name: file.name for file in index.files}
        if index.kind == "torch":
            names = dict(zip(names, shard_names(len(names)), strict=True))
        parts = [(names[f.name], [t for t in outputs if t.file == f.name]) for f in index.files]
    else:
        split = split_by_size(outputs, options.max_shard_bytes)
        parts = list(zip(shard_names(len(split)), split, strict=True))
    sources = {file.name: file for file in index.files}
    shards = []
    for name, tensors in parts:
        file = sources[tensors[0].file] if tensors else index.files[0]
        metadata = {"format": "pt", **file.metadata}
        aligned = tensors[0].begin if tensors and index.kind == "safetensors" else 0
        shards.append(lay_out(name, tensors, metadata, aligned_with=aligned))
    return shards


def _config_edits(
    config: ModelConfig, attention: Attention, options: ConversionOptions
) -> Iterator[ConfigEdit]:
    wanted = options.num_kv_heads
    for path in dict.fromkeys((config.kv_heads_key or (), *_copies_of_the_count(config))):
        after = wanted == 1 if path[-1] == "multi_query" else wanted
        yield _edit(config, (*config.text_path, *path), after)
    # Readers that derive head_dim do so from other keys, but a converted checkpoint should not
    # leave it to them.
    widths = {block.head_dim for block in attention.blocks}
    in_class = config.head_dim_key in config.section.record.fields
    if in_class and not config.head_dim_explicit and len(widths) == 1:
        yield _edit(config, (*config.text_path, config.head_dim_key), widths.pop())
    if options.dtype:
        name = ELEMENT_TYPES[options.dtype].config_name
        for path in _dtype_paths(config):
            if _value(config.raw, path) != name:
                yield _edit(config, path, name)


def _copies_of_the_count(config: ModelConfig) -> Iterator[tuple[str, ...]]:
    """Other keys that hold the same count: a class may ignore them, but they must not disagree."""
    paths: list[tuple[str, ...]] = [("num_key_value_heads",), ("num_global_key_value_heads",)]
    layers = config.text.get("per_layer_config")
    if isinstance(layers, dict):
        paths += [("per_layer_config", layer, "num_key_value_heads") for layer in layers]
    return (path for path in paths if _value(config.text, path) == config.num_kv_heads)


def _dtype_paths(config: ModelConfig) -> list[tuple[str, ...]]:
    sections = dict.fromkeys(((), config.text_path))
    paths = [(*section, key) for section in sections for key in ("dtype", "torch_dtype")]
    return [path for path in paths if _value(config.raw, path) is not None] or [("dtype",)]


def _edit(config: ModelConfig, path: tuple[str, ...], after: object) -> ConfigEdit:
    return ConfigEdit(path, _value(config.raw, path), after)


def _value(raw: Mapping[str, Any], path: tuple[str, ...]) -> Any:  # noqa: ANN401
    value: Any = raw
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
