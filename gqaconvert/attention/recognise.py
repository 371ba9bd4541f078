"""From tensor names, shapes and config.json to `Attention`, or to the exact reason why not.

Counts come from shapes and are checked against the config: a class that accepts
`num_key_value_heads` and ignores it, or a config edited by hand, is found here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from gqaconvert.attention.blocks import CONTRADICTION, fused_block, layer_number, split_block
from gqaconvert.attention.geometry import Attention, AttentionBlock
from gqaconvert.attention.specs import (
    LayoutSpec,
    LegalCount,
    is_certified,
    layout_for,
    naming,
    ordinary_layout,
    refusal,
    rope_pairing,
)
from gqaconvert.checkpoint.tensors import StoredTensor
from gqaconvert.errors import CheckpointError, UnsupportedModelError
from gqaconvert.kv_cache.config_faults import config_faults
from gqaconvert.kv_cache.layer_attention import LayerKind
from gqaconvert.kv_cache.model_config import ModelConfig
from gqaconvert.units import ELEMENT_TYPES


def recognise(tensors: Mapping[str, StoredTensor], config: ModelConfig) -> Attention:
    """Understand the attention of a checkpoint.

    Args:
        tensors: name → tensor, of which only names, types and shapes are used.
        config: the checkpoint's config.

    Raises:
        UnsupportedModelError: the model is sound but cannot be converted.
        CheckpointError: tensors and config contradict each other.
    """
    refuse_by_config(config)
    spec = layout_for(config.text_model_type)
    _refuse_options(spec, config)
    modules = _modules(tensors, spec, config)
    if not modules and spec.fused:
        # Some classes that are fused on disk are split in memory, as sarvam_moe.
        spec = ordinary_layout()
        modules = _modules(tensors, spec, config)
    build = fused_block if spec.fused else split_block
    blocks = tuple(build(module, parts, tensors, spec, config) for module, parts in modules.items())
    _refuse_leftovers(tensors, blocks, spec, config)
    if not blocks:
        raise UnsupportedModelError(
            f"no attention projections of a known layout in this {config.model_type} checkpoint",
            at=config.at,
            remedy="CONTRIBUTING.md tells how to add a layout",
        )
    _check_layers(blocks, spec, config)
    _check_one_stack(blocks)
    _check_counts(blocks, config)
    return Attention(
        model_type=config.text_model_type,
        layout=spec.name if spec.name != "ordinary" else "split",
        blocks=blocks,
        certified=is_certified(config.text_model_type),
        legal_counts=_legal_counts(spec, config),
        caches_all_heads=spec.caches_all_heads and not _is_multi_query(config),
        rope="none" if config.rope.kind != "rotary" else rope_pairing(config.text_model_type),
    )


def _legal_counts(spec: LayoutSpec, config: ModelConfig) -> tuple[LegalCount, ...]:
    # A class that says multi_query, as Falcon does in its old layout, knows one KV head or all.
    return ("one",) if _is_multi_query(config) else spec.legal


def _is_multi_query(config: ModelConfig) -> bool:
    return config.kv_heads_key == ("multi_query",)


def _refuse_options(spec: LayoutSpec, config: ModelConfig) -> None:
    for option, reason in spec.refused_options.items():
        if config.get(option):
            raise UnsupportedModelError(
                f"{config.text_model_type} with {option} cannot be converted: {reason}",
                at=config.at,
            )


def refuse_by_config(config: ModelConfig) -> None:
    """Refuse what the config alone rules out.

    Raises:
        UnsupportedModelError: with the reason.
        CheckpointError: counts that cannot be right.
    """
    for model_type in (config.model_type, config.text_model_type):
        reason = refusal(model_type)
        if reason:
            raise UnsupportedModelError(f"{model_type} cannot be converted: {reason}", at=config.at)
    if config.kv_lora_rank:
        raise UnsupportedModelError(
            f"{config.model_type} uses multi-head latent attention"
            f" (kv_lora_rank={config.kv_lora_rank}): its cache holds one latent a token, not heads",
            at=config.at,
        )
    if config.quantization:
        raise UnsupportedModelError(
            f"weights are quantised ({config.quantization}); packed heads cannot be pooled",
            at=config.at,
            remedy="convert the unquantised checkpoint, then quantise the result",
        )
    if config.num_kv_shared_layers:
        raise UnsupportedModelError(
            f"the last {config.num_kv_shared_layers} layers reuse keys and values of earlier ones"
            " (num_kv_shared_layers), so pooling a layer changes others",
            at=config.at,
        )
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder-decoder model, which is not supported", at=config.at
        )
    faults = config_faults(config)
    if faults:
        raise CheckpointError("; ".join(faults), at=config.at, remedy=CONTRADICTION)
    # Whether a class that transformers does not know reads the key can only be told from its file.
    written = config.text.get(config.kv_heads_key[0]) if config.kv_heads_key else None
    if written == 0 and not isinstance(written, bool):
        raise CheckpointError("config says 0 KV heads", at=config.at, remedy=CONTRADICTION)
    if not config.declares_kv_heads or not (config.known or written is not None):
        fault = "its class accepts the key and ignores it"
        raise UnsupportedModelError(
            f"{config.model_type} has no number of KV heads: "
            + (fault if config.known else "config.json has no key for it"),
            at=config.at,
            remedy="a model of a class with grouped-query attention",
        )


def _modules(
    tensors: Mapping[str, StoredTensor], spec: LayoutSpec, config: ModelConfig
) -> dict[str, dict[str, str]]:
    """Module path → projection ("q", "k", "v", "o", "qkv") → name without ".weight"."""
    wanted = {"q": spec.query, "k": spec.key, "v": spec.value, "o": spec.output, "qkv": spec.fused}
    needed = {"qkv"} if spec.fused else {"k", "v"}
    if spec.key_is_value and config.get(spec.key_is_value):
        needed = {"k"}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name in tensors:
        stem, _, parameter = name.rpartition(".")
        if parameter != "weight" or _is_apart(name):
            continue
        for part, projections in wanted.items():
            for projection in projections:
                if stem.endswith("." + projection):
                    found[stem.removesuffix("." + projection)][part] = stem
    return {
        module: parts
        for module, parts in found.items()
        if needed <= set(parts) and _has_kv_cache(module, spec, config)
    }


def _refuse_leftovers(
    tensors: Mapping[str, StoredTensor],
    blocks: Iterable[AttentionBlock],
    spec: LayoutSpec,
    config: ModelConfig,
) -> None:
    known = {tensor.name for block in blocks for tensor in block.head_tensors}
    for name, tensor in tensors.items():
        hints = naming().attention_hints & set(name.split("."))
        if not hints or name in known or _is_apart(name):
            continue
        parts = name.split(".")
        module = ".".join(parts[: min(parts.index(hint) for hint in hints)])
        if not _has_kv_cache(module, spec, config):
            continue
        if not ELEMENT_TYPES[tensor.dtype].is_weight or name.rpartition(".")[2] not in (
            "weight",
            "bias",
        ):
            raise UnsupportedModelError(
                f"keys and values are packed or quantised ({tensor.dtype})",
                at=name,
                remedy="convert the unquantised checkpoint, then quantise the result",
            )
        raise UnsupportedModelError(
            f"attention tensor of an unknown layout in this {config.model_type} checkpoint",
            at=name,
            remedy="CONTRIBUTING.md tells how to add a layout",
        )
    for name in known:
        if not ELEMENT_TYPES[tensors[name].dtype].is_weight:
            raise UnsupportedModelError(
                f"element type {tensors[name].dtype} cannot be pooled",
                at=name,
                remedy="convert the unquantised checkpoint, then quantise the result",
            )


def _check_layers(
    blocks: tuple[AttentionBlock, ...], spec: LayoutSpec, config: ModelConfig
) -> None:
    if spec.shared_blocks or not config.known:
        return
    expected = {
        number
        for number, layer in enumerate(config.layers)
        if layer.kind not in _WITHOUT_KV and not layer.shared
    }
    missing = expected - {block.layer for block in blocks if block.layer is not None}
    if missing:
        raise CheckpointError(
            f"layers {sorted(missing)[:5]} have no attention tensors of the {spec.name} layout",
            at=config.at,
            remedy="fetch the checkpoint again, or see CONTRIBUTING.md for a new layout",
        )


def _check_one_stack(blocks: tuple[AttentionBlock, ...]) -> None:
    """Refuse a second stack of layers, such as a tower that naming.yaml does not know."""
    stacks: dict[str, str] = {}
    for block in blocks:
        parts = block.module.split(".")
        if block.layer is not None and not naming().draft_layers & set(parts):
            stacks.setdefault(".".join(parts[: parts.index(str(block.layer))]), block.module)
    if len(stacks) > 1:
        first, second, *_ = stacks.values()
        raise UnsupportedModelError(
            f"two stacks of layers hold keys and values, in {first} and here;"
            " which of them is the language model is not known",
            at=second,
            remedy="CONTRIBUTING.md tells how to add the name of a tower",
        )


def _check_counts(blocks: tuple[AttentionBlock, ...], config: ModelConfig) -> None:
    first = blocks[0]
    for block in blocks:
        if block.num_kv_heads != first.num_kv_heads:
            raise UnsupportedModelError(
                f"layers differ in KV heads: {first.num_kv_heads} in {first.module},"
                f" {block.num_kv_heads} here",
                at=block.module,
            )
    if config.num_kv_heads != first.num_kv_heads:
        raise CheckpointError(
            f"config says {config.num_kv_heads} KV heads, the tensors hold {first.num_kv_heads};"
            " loading such a checkpoint fails or leaves K and V random",
            at=f"{config.at} {'.'.join(config.kv_heads_key or ())} and {first.module}",
            remedy=CONTRADICTION,
        )
    if first.num_heads % first.num_kv_heads:
        raise CheckpointError(
            f"{first.num_heads} query heads do not divide by {first.num_kv_heads} KV heads",
            at=first.module,
        )


_WITHOUT_KV: frozenset[LayerKind] = frozenset({"linear", "none"})


def _has_kv_cache(module: str, spec: LayoutSpec, config: ModelConfig) -> bool:
    """Whether a module's layer caches keys and values; draft layers always do."""
    if spec.shared_blocks or naming().draft_layers & set(module.split(".")):
        return True
    layer = layer_number(module)
    if layer is None or layer >= len(config.layers):
        return True
    return config.layers[layer].kind not in _WITHOUT_KV


def _is_apart(name: str) -> bool:
    return bool((naming().towers | naming().indexers) & set(name.split(".")))
