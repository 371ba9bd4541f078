"""Makes the plan of a conversion from headers, config and options; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gqaconvert.attention.blocks import fused_layout_after
from gqaconvert.attention.geometry import Attention, AttentionBlock, HeadTensor
from gqaconvert.attention.layouts import block_rows, head_order, pooled_sources
from gqaconvert.checkpoint.shards import Shard, lay_out, shard_names, split_by_size
from gqaconvert.checkpoint.tensors import CheckpointIndex, StoredTensor
from gqaconvert.errors import UsageError
from gqaconvert.kv_cache.model_config import ModelConfig
from gqaconvert.surgery.options import ConversionOptions
from gqaconvert.surgery.plan import (
    Action,
    ConfigEdit,
    ConversionPlan,
    HeadChange,
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
    _check_count(attention, config, options)
    _check_tensor_parallel(attention, options)
    aliases = _aliases(index, config)
    unplaced = [
        tensor
        for tensor in _planned(index, attention, options)
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
    )


def _check_count(attention: Attention, config: ModelConfig, options: ConversionOptions) -> None:
    have, wanted = attention.num_kv_heads, options.num_kv_heads
    if attention.is_poolable(wanted) or attention.is_expandable(wanted):
        return
    at = f"{config.at} {'.'.join(config.kv_heads_key or ())}={have}"
    if wanted == have:
        raise UsageError(f"the model has {have} KV heads already; nothing to change", at=at)
    legal = [str(n) for n in attention.poolable()]
    verb = "pooled" if wanted < have else "repeated"
    if wanted > have:
        legal = [
            str(n) for n in range(have + 1, attention.num_heads + 1) if attention.is_expandable(n)
        ]
    raise UsageError(
        f"{have} KV heads cannot be {verb} into {wanted}",
        at=at,
        remedy="--kv-heads " + _choice(legal)
        if legal
        else f"a model with {'more' if wanted < have else 'fewer'} KV heads",
    )


def _check_tensor_parallel(attention: Attention, options: ConversionOptions) -> None:
    degree, wanted = options.tensor_parallel, options.num_kv_heads
    if attention.num_heads % degree:
        raise UsageError(
            f"{attention.num_heads} query heads do not divide by a tensor-parallel degree"
            f" of {degree}",
            remedy="a degree that divides the query heads",
        )
    if wanted % degree and degree % wanted:
        raise UsageError(
            f"{wanted} KV heads and a tensor-parallel degree of {degree} do not divide one another",
            remedy="--kv-heads equal to the degree or to a multiple of it",
        )


def _choice(values: list[str]) -> str:
    return values[0] if len(values) == 1 else ", ".join(values[:-1]) + " or " + values[-1]


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
    index: CheckpointIndex, attention: Attention, options: ConversionOptions
) -> Iterator[PlannedTensor]:
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
